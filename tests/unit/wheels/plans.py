"""A lock whose compile phase has one package, and the plan of its wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.locks import DIGEST, make_lock
from unit.wheels.test_key import PARTS

from envbuild.catalog.recipe import WheelRecipe
from envbuild.catalog.stack import Phase
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.models import LockedBase, LockedComponent
from envbuild.wheels.plan import WheelPlan
from envbuild.wheels.sources import SourceOrigin

MAIN = """\
ninja==1.13.0 \\
    --hash=sha256:aa
setuptools==80.1 \\
    --hash=sha256:bb
torch==2.11.0 \\
    --hash=sha256:cc
nvidia-cudnn-cu13==9.19.0.56 \\
    --hash=sha256:dd
"""
SDIST = "sha256:" + "5" * 64


def plan(recipe: dict[str, Any] | None = None, **changes: Any) -> WheelPlan:
    """The plan of causal-conv1d 1.7.0 for sm_90, with other parts or another recipe."""
    made = WheelRecipe.model_validate({"summary": "a test's own", **(recipe or {})})
    origin = SourceOrigin(package="causal-conv1d", version="1.7.0", sdist=SDIST)
    return WheelPlan(parts=PARTS.model_copy(update=changes), origin=origin, recipe=made, modules=("causal_conv1d",))


def compile_lock(path: Path, *, cuda: str | None = "13.0", glibc: str = "2.35") -> LockDirectory:
    """A lock that compiles causal-conv1d 1.7.0."""
    kernels = LockedComponent(asked="==1.7.0", version="1.7.0", phase=Phase.COMPILE, sdist=SDIST)
    wheel = LockedComponent(asked="", version="2.9.0", phase=Phase.COMPILE)
    base = LockedBase(
        name="small",
        definition_digest=DIGEST,
        distribution="debian",
        release="12",
        platform="linux/amd64",
        glibc=glibc,
        python="3.10",
        cuda=cuda,
    )
    lock = make_lock(path, MAIN, base=base, components={"causal-conv1d": kernels, "prebuilt": wheel})
    return LockDirectory(path, lock)
