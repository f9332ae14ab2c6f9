"""Certificates: the statement, its signature, and whose signature counts."""
