"""SM lists in the spellings that compilers and build systems want, and what a wheel must contain for one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.catalog.models import Target

_SM = re.compile(r"^(?P<major>\d+)(?P<minor>\d)(?P<suffix>[af]?)$")


def dotted(sm: str) -> str:
    """``90`` as ``9.0``, ``100a`` as ``10.0a``: torch's spelling."""
    match = _SM.match(sm)
    if match is None:
        raise ValueError(f"{sm!r} is no SM version")
    return f"{match['major']}.{match['minor']}{match['suffix']}"


def order(sm: str) -> tuple[int, str]:
    """Sorts SM versions by age: 90, 90a, 100."""
    return int(sm.rstrip("af")), sm


@dataclass(frozen=True, kw_only=True)
class Architectures:
    """GPU code: machine code (SASS) for some SMs, PTX for some. SM versions such as ``90`` or ``100a``."""

    sass: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()

    @classmethod
    def of(cls, sass: Sequence[str], ptx: Sequence[str] = ()) -> Architectures:
        """Each once, oldest first."""
        return cls(sass=tuple(sorted(set(sass), key=order)), ptx=tuple(sorted(set(ptx), key=order)))

    @classmethod
    def for_target(cls, target: Target) -> Architectures:
        """What is asked for: machine code for every SM of the target; PTX of the newest when the target wants it."""
        newest = sorted(target.sm, key=order)[-1:] if target.ptx else []
        return cls.of(target.sm, newest)

    def torch_list(self) -> str:
        """As TORCH_CUDA_ARCH_LIST: ``9.0;10.0a+PTX``."""
        return ";".join(dotted(sm) + ("+PTX" if sm in self.ptx else "") for sm in self.sass)

    def text(self) -> str:
        """For people: ``sm_90, PTX 90``."""
        return ", ".join([*(f"sm_{sm}" for sm in self.sass), *(f"PTX {sm}" for sm in self.ptx)]) or "no GPU code"

    def __add__(self, other: Architectures) -> Architectures:
        return Architectures.of(self.sass + other.sass, self.ptx + other.ptx)
