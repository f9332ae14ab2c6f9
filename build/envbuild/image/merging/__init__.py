"""Layers read as one file system: blobs, tar members, what upper layers hide, and directories made from it.

The way in is :func:`merge.merged`, for directories :func:`unpack.unpack`.
"""
