"""Git mirrors and repositories: refs become commits, and files are read without a checkout."""
