"""Judges what cases measured: results read, compared with their baselines, and verdicts kept."""
