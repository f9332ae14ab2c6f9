"""The search for a lock that passes: other releases than upstream's pins."""
