"""SM lists in the spellings that compilers and build systems want, and what a wheel must contain for one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.catalog import knowledge
from envbuild.catalog.models import Target

# The last digit is the minor version: 90 is 9.0, and 100 is 10.0.
_SM = re.compile(r"^(?P<major>\d+)(?P<minor>\d)(?P<suffix>[af]?)$")


def dotted(sm: str) -> str:
    """``90`` as ``9.0``, ``100a`` as ``10.0a``: torch's spelling."""
    major, minor, suffix = _numbers(sm)
    return f"{major}.{minor}{suffix}"


def first_and_last(sm: str) -> tuple[str, str]:
    """The compute capabilities that machine code for an SM runs on: the first, and the first that is beyond them."""
    major, minor, suffix = _numbers(sm)
    # As in _executes: `a` code and Jetson's run on one capability alone.
    alone = suffix == "a" or f"{major}{minor}" in knowledge.cuda().jetson
    return f"{major}.{minor}", f"{major}.{minor + 1}" if alone else f"{major + 1}.0"


def order(sm: str) -> tuple[int, str]:
    """Sorts SM versions by age: 90, 90a, 100."""
    # As text, 100 would come before 90.
    return int(sm.rstrip("af")), sm


def _numbers(sm: str) -> tuple[int, int, str]:
    match = _SM.match(sm)
    if match is None:
        raise ValueError(f"{sm!r} is not an SM version")
    return int(match["major"]), int(match["minor"]), match["suffix"]


def _executes(code: str, sm: str) -> bool:
    """Whether machine code runs on a GPU; a target's suffix says what is compiled for it, and is no other GPU."""
    (major, minor, suffix), (gpu_major, gpu_minor, _) = _numbers(code), _numbers(sm)
    if suffix == "a" or not knowledge.cuda().jetson.isdisjoint({f"{major}{minor}", f"{gpu_major}{gpu_minor}"}):
        return (major, minor) == (gpu_major, gpu_minor)
    return major == gpu_major and minor <= gpu_minor


def _compiles(code: str, sm: str) -> bool:
    (major, minor, suffix), (gpu_major, gpu_minor, _) = _numbers(code), _numbers(sm)
    if suffix == "a":
        return (major, minor) == (gpu_major, gpu_minor)
    if suffix == "f":
        return major == gpu_major and minor <= gpu_minor
    # Plain PTX goes across major versions, unlike machine code.
    return (major, minor) <= (gpu_major, gpu_minor)


@dataclass(frozen=True, kw_only=True)
class Architectures:
    """GPU code: machine code (SASS) for some SMs, PTX for some. SM versions such as ``90`` or ``100a``."""

    sass: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()

    @classmethod
    def named(cls, sass: Sequence[str], ptx: Sequence[str] = ()) -> Architectures:
        """Each once, oldest first."""
        return cls(sass=tuple(sorted(set(sass), key=order)), ptx=tuple(sorted(set(ptx), key=order)))

    @classmethod
    def for_target(cls, target: Target) -> Architectures:
        """What is asked for: machine code for every SM of the target; PTX of the newest when the target wants it."""
        # The target's own GPUs have machine code. PTX is for GPUs to come, which compile that of any older SM.
        newest = sorted(target.sm, key=order)[-1:] if target.ptx else []
        return cls.named(target.sm, newest)

    def torch_list(self) -> str:
        """As TORCH_CUDA_ARCH_LIST: ``9.0;10.0a+PTX``."""
        return ";".join(dotted(sm) + ("+PTX" if sm in self.ptx else "") for sm in self.sass)

    def text(self) -> str:
        """For people: ``sm_90, PTX 90``."""
        return ", ".join([*(f"sm_{sm}" for sm in self.sass), *(f"PTX {sm}" for sm in self.ptx)]) or "no GPU code"

    def runs_on(self, sm: str) -> bool:
        """Whether some of it runs on GPUs of an SM: as it is, or compiled by the driver.

        After NVIDIA's CUDA Programming Guide: "Binary Compatibility" and "PTX Compatibility" of its chapter on the CUDA
        platform, and "Feature Set Compiler Targets" of its appendix on compute capabilities. Machine code runs on the
        same major version with the same or a newer minor one, of Jetson's GPUs on its own only; PTX is compiled for the
        same SM or a newer one. With ``a`` both are for the very SM, with ``f`` for the same major version (a family)
        with the same or a newer minor one.
        """
        return any(_executes(code, sm) for code in self.sass) or any(_compiles(code, sm) for code in self.ptx)

    def __add__(self, other: Architectures) -> Architectures:
        return Architectures.named(self.sass + other.sass, self.ptx + other.ptx)
