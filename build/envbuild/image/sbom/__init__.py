"""What is told about an image beside it: SBOMs and provenance, and how they are attached to it."""
