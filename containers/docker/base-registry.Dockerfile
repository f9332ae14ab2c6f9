
# The base, by its digest.
FROM @REFERENCE@ AS base
