"""envbuild: reproducible, certified NeMo and Megatron training environments."""

__version__ = "0.1.0"
