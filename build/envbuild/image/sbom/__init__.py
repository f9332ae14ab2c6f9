"""SBOMs and provenance of an image, and how they are attached to it."""
