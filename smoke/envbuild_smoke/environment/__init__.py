"""The environment under test: what is installed and imported, on which machine, and where it differs from the lock."""
