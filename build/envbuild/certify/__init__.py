"""Plans certification cases, judges what they measured, writes certificates."""
