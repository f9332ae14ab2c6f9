"""Which packages bring a module, as far as its name says."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.utils import canonicalize_name

from envbuild.catalog import knowledge


def distribution_of(module: str) -> str:
    """The package that is likely to bring an outermost module."""
    return canonicalize_name(knowledge.packages().distributions.get(module, module))


def is_brought(module: str, packages: Iterable[str]) -> bool:
    """Whether one of the packages, by canonical name, may bring an outermost module: ``nvidia-modelopt`` modelopt."""
    wanted = {distribution_of(module), canonicalize_name(module)}
    return any(name in package or name.startswith(f"{package}-") for package in packages for name in wanted)
