"""Drivers: each trains one case with one library.

A driver is a module named in `MODULES` with a function `train(context: RankContext) -> None`. It is
imported in the template process, once, before any rank exists; so importing it must not start CUDA,
threads or process groups.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from envbuild_smoke.rank import RankContext

MODULES = {"mcore": "envbuild_smoke.drivers.mcore"}


def load(name: str) -> "Callable[[RankContext], None]":
    """Return the `train` function of the driver `name` (a key of `MODULES`)."""
    module = importlib.import_module(MODULES[name])
    return cast("Callable[[RankContext], None]", module.train)
