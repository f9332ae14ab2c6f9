"""Bases: a root file system as a directory to run in and as layers, made by mmdebstrap or taken from an image."""

from envbuild.image.base.base import KIND, OWN_PLACE, StoredBase, base_key, check_tools, find_base, make_base

__all__ = ["KIND", "OWN_PLACE", "StoredBase", "base_key", "check_tools", "find_base", "make_base"]
