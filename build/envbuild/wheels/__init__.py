"""Compiled wheels: for the target's architectures only, built once, kept under a key that names all that made them."""
