"""The search for a lock that passes: other releases than upstream's pins, and older commits of a branch."""
