"""Runs uv and reads its answers: the program, its settings, resolutions, and where builds of torch are."""
