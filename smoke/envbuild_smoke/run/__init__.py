"""The runner: schedules the cases of a plan, watches their rank processes and writes the results."""
