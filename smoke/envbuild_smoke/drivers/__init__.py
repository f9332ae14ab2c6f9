"""Drivers: each trains one case with one library.

A driver is a module named in `MODULES` with a function `train(context: RankContext) -> None`. It is
imported in the template process, once, before any rank exists; so importing it must not start CUDA,
threads or process groups.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from envbuild_smoke.rank import RankContext

MODULES = {"mcore": "envbuild_smoke.drivers.mcore"}


def module(name: str) -> ModuleType:
    """Return the module of the driver `name` (a key of `MODULES`)."""
    return importlib.import_module(MODULES[name])


def load(name: str) -> "Callable[[RankContext], None]":
    """Return the `train` function of the driver `name` (a key of `MODULES`)."""
    return cast("Callable[[RankContext], None]", module(name).train)
