"""Find the package that breaks a lock, between one that works and one that does not."""
