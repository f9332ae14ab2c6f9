"""Trains the cases of a plan inside the environment under test and writes down what happened.

Runs with what the environment has (torch, megatron-core) and nothing else. It does not judge: whether a
case agrees with its baseline is decided by whoever reads `results.jsonl`.
"""

__version__ = "1.0.0"
