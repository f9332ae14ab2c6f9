"""A matrix becomes cases, each checked against the rules of its layout before anything starts."""

from envbuild.certify.cases.case import Case, Layout, ResolvedRow, same_arithmetic, tolerance_of
from envbuild.certify.cases.expansion import Expansion, LeftOut, expand, expansion

__all__ = [
    "Case",
    "Expansion",
    "Layout",
    "LeftOut",
    "ResolvedRow",
    "expand",
    "expansion",
    "same_arithmetic",
    "tolerance_of",
]
