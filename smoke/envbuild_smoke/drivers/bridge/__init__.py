"""Trains cut-down recipes with Megatron-Bridge's own pretrain; `pretrain` is the driver."""
