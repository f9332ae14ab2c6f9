"""A package that no lock has, and that is there."""

FusedAdam = object()
