"""Checks before a lock is accepted: what resolves need not install, import or train."""
