"""How far two numbers are from each other."""

from __future__ import annotations

import math


def relative_difference(expected: float | None, actual: float | None) -> float:
    """``|actual - expected| / |expected|``; infinite when only the expected value is zero, and where one is None."""
    if expected is None or actual is None:
        return math.inf
    if expected == actual:
        return 0.0
    return abs(actual - expected) / abs(expected) if expected else math.inf


def off_by(expected: float, actual: float, allowed: float) -> str:
    """What a problem states of a number that is too far off."""
    difference = relative_difference(expected, actual)
    return f"expected {expected:.8g}, found {actual:.8g}: off by {difference:.2e} relative, allowed {allowed:.2g}"
