"""Layers read as one root file system: members, whiteouts, overlay, and unpacking."""
