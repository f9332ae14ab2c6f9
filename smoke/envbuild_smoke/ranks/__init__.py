"""What runs in the other processes: the fork server, and the ranks it starts."""
