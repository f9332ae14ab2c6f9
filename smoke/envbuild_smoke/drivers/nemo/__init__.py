"""Trains cut-down recipes with NeMo's own pretrain; `pretrain` is the driver, and imports NeMo."""
