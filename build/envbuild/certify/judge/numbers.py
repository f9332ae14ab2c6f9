"""How far two numbers are from each other."""

from __future__ import annotations

import math


def relative_difference(expected: float | None, found: float | None) -> float:
    """``|found - expected| / |expected|``; infinite when only the expected value is zero, and where one is None."""
    if expected is None or found is None:
        return math.inf
    if expected == found:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else math.inf


def off_by(expected: float, found: float, allowed: float) -> str:
    """What a problem states of a number that is too far off."""
    difference = relative_difference(expected, found)
    return f"expected {expected:.8g}, found {found:.8g}: off by {difference:.2e} relative, allowed {allowed:.2g}"
