"""Where the tool's own data is: the checkout it runs from, or the installed package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from envbuild.core.errors import InternalError


@cache
def data_root() -> Path:
    """The folder that holds ``envs/``, ``lockfiles/``, ``containers/`` and ``smoke/``.

    The checkout when the package is imported from one (editable installs included), else ``envbuild/_data`` of the
    installed wheel. importlib.resources finds forced-in wheel data only in the second case, hence this function.
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    if package.parent.name == "build" and (checkout / "envs").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout
    # Forced into the wheel by hatchling (pyproject.toml, [tool.hatch.build.targets.wheel.sources]).
    packaged = package / "_data"
    if (packaged / "envs").is_dir():
        return packaged
    raise InternalError(
        "envbuild's own data (envs/, lockfiles/, containers/, smoke/) is missing",
        why=f"Neither {checkout / 'envs'} nor {packaged / 'envs'} exists.",
        fix="Install envbuild again from its wheel, or run it from a complete checkout.",
    )
