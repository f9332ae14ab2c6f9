"""Names of packages as they are compared."""

import re


def normalize(name: str) -> str:
    """Return a distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
