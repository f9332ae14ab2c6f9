"""Drivers: each trains one case with one library.

A driver is a module named in `MODULES` with a function `train(context: RankContext) -> None`. It is
imported in the fork server, once, before any rank exists; so importing it must not start CUDA,
threads or process groups. What else a training needs and a machine without a GPU can show, it checks
in `check_start()`, if it has that function.
"""

import importlib
from types import ModuleType

from envbuild_smoke.plan.axes import Driver

# By name and not by import: the runner reads this table and must not load torch.
MODULES: dict[Driver, str] = {
    "mcore": "envbuild_smoke.drivers.mcore",
    "nemo": "envbuild_smoke.drivers.nemo.pretrain",
    "bridge": "envbuild_smoke.drivers.bridge.pretrain",
}


def module(name: Driver) -> ModuleType:
    """Return the module of the driver `name` (a key of `MODULES`)."""
    return importlib.import_module(MODULES[name])
