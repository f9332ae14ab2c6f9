"""The content-addressed store: entries that are complete or absent."""
