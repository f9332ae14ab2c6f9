"""Checks of a finished image's layers, without a GPU."""
