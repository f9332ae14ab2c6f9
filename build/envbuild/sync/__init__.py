"""Installs a lock into an environment, phase by phase, and checks that its components import."""
