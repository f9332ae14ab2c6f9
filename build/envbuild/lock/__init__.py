"""Resolves a stack on a base into a lock: the record and the hash-pinned files of each phase."""
