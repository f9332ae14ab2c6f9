"""CUDA toolkits and host compilers: this machine's, or the package index's."""
