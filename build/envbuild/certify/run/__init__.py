"""Runs the cases of a certification: the job, the plan, and where it trains."""
