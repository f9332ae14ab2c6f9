"""Runs commands inside an image."""
