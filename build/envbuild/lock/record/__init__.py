"""Writes a lock directory, compares two, and exports one in other formats."""
