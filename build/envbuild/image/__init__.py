"""Images: base, environment and configuration layers, the OCI layout of them, and the .sqsh made from them."""
