"""The chain with memory: what a night does, what came of it, and the site that shows it."""
