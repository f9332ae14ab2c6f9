"""What cases run on, as far as it decides which of them are possible: the device, its generation, the packages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from envbuild.catalog.catalog import Selection
from envbuild.catalog.fields import Device


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What cases run on.

    Attributes:
        sm: the target's compute capabilities ("90", "100a"); empty on the CPU.
        packages: the names of the packages in the environment.
    """

    device: Device
    sm: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset()

    @classmethod
    def of(cls, selection: Selection, packages: Iterable[str] = ()) -> Capabilities:
        """That of a selection: with the packages of its lock, what the stack names, and what the base brings."""
        target, stack = selection.target, selection.stack
        names = frozenset({*packages, *stack.components, *stack.requirements, *selection.base.provides})
        return cls(device=target.device, sm=target.sm, packages=names)
