"""What everything else stands on: errors, processes, files, locks, digests, progress."""
