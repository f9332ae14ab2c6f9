"""Knows failures that others have met: their texts, causes and cures."""
