"""What compiled files contain, and whether a wheel is what was asked for."""
