"""An installed package that is not in the lock."""

FusedAdam = object()
