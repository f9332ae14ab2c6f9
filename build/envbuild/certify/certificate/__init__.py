"""Certificates: the statement, its signature, whose signature counts, and what a certificate says."""
