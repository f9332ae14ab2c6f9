"""A small float64 model of what the cases train, in torch's elementary operations.

Nothing here comes from megatron-core or Transformer Engine: a baseline, which is the library on one device, is compared
with it, and so a bug that is also there on one device shows. It is slow, keeps whole score matrices, and is meant to be
read: every formula names its source.
"""
