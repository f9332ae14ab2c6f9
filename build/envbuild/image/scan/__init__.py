"""What a layer contains: read in one pass, and cached under the layer's digest."""
