"""A static site from the ledger: which image is good, since when, and what blocks the next one."""
