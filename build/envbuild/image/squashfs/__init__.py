"""From layers to an enroot .sqsh: what enroot lays out, the stream for mksquashfs, and packing."""
