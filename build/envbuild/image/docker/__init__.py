"""The docker builder: the same images from a daemon with BuildKit, or podman, by a Dockerfile that people can read."""
