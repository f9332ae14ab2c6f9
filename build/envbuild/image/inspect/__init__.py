"""What is in an image, and how two images differ."""
