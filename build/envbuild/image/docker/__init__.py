"""Images and docker: the daemon, loading a finished image into it, and the Dockerfile of a lock."""
