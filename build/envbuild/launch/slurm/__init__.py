"""The launcher ``slurm``: a job is a frozen request, a pure rendering of it, and commands that submit and follow it."""
