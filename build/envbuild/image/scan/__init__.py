"""What a layer contains: read in one pass, and kept under the layer's digest."""
