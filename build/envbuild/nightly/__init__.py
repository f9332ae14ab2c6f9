"""The chain with memory: what a night does, what it found, and the site that shows it."""
