
# The base, an image. Steps are root's, whoever its containers are.
FROM @REFERENCE@ AS base
USER 0
