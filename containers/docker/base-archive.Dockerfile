
# The base: the very layer that the native builder uses, so that both start from the same bytes.
FROM scratch AS base
@ADD@
