"""Locks of uv projects: their uv.lock is the resolution."""
