"""Publishes certified images, finds them again, and takes them back."""
