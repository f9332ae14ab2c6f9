"""A matrix for tests: the first six cases of the one that ships, one model in six layouts."""

from __future__ import annotations

from pathlib import Path

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.matrix import Matrix


def six_layouts() -> Matrix:
    """certify-quick with nothing but its baseline, DP 2, TP 2, PP 2, PP 2 x 2 and TP 2 x PP 2."""
    shipped = Catalog.open(Path("/nonexistent")).matrix("certify-quick")
    return shipped.model_copy(update={"cases": shipped.cases[:6], "models": {"gpt": shipped.models["gpt"]}})
