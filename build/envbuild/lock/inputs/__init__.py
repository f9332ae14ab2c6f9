"""What decides a lock: what was asked for, its name, and the as-of moment."""
