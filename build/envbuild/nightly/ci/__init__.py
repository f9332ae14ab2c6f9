"""Files that call the nightly from where a site runs its jobs."""
