"""Which fields of the library's configuration a run's cases account for, and which of those a recipe sets."""
