"""Environments: a lock installed at its final path inside a base, in layers that are kept and shared."""
