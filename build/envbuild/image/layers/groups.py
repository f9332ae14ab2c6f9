"""The layers of an environment before they are made: which packages belong to each, by containers/native/layers.toml,
and keys of what decides their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from pydantic import Field, model_validator
from typing_extensions import Self

from envbuild.catalog import toml
from envbuild.catalog.base import Base
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Name, TomlModel
from envbuild.catalog.stack import Phase
from envbuild.core.digests import Json, digest_of, sha256_file
from envbuild.image.base import StoredBase
from envbuild.image.base.standalone import COMPILER
from envbuild.image.layers.sandbox import VENV
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.record.content import Package, locked_content
from envbuild.lock.uv.program import uv_version
from envbuild.rootfs import gzip_writer
from envbuild.wheels.cache.wheelhouse import NO_BUILT, Built

POLICY_FILE = "containers/native/layers.toml"


class LayerRule(TomlModel):
    """Which packages belong to a layer; every condition that is stated must hold."""

    layer: Name
    names: tuple[str, ...] = Field(default=(), description="patterns of canonical names")
    components: bool = Field(default=False, description="components of the stack only")
    phases: tuple[Phase, ...] = ()

    def holds(self, name: str, phase: Phase, *, component: bool) -> bool:
        """Whether a package belongs to the layer; the first rule that holds decides."""
        return (
            (not self.names or any(fnmatchcase(name, pattern) for pattern in self.names))
            and (component or not self.components)
            and (not self.phases or phase in self.phases)
        )


class LayerPolicy(TomlModel):
    """The layers of an environment, and the rules that assign packages to them."""

    order: tuple[Name, ...] = Field(min_length=2, description="lowest first; the first is the bare environment")
    overlaps: tuple[str, ...] = Field(default=(), description="files of several packages that may differ")
    rules: tuple[LayerRule, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        layers = [rule.layer for rule in self.rules]
        if unknown := sorted({*layers} - {*self.order[1:]}):
            raise ValueError(f"rules name {', '.join(unknown)}; allowed: {', '.join(self.order[1:])}")
        if len(set(self.order)) != len(self.order):
            raise ValueError("order names a layer twice")
        last = self.rules[-1]
        if last.names or last.components or last.phases:
            raise ValueError("the last rule has a condition: some packages would belong to no layer")
        return self

    def layer_of(self, name: str, phase: Phase, *, component: bool) -> str:
        return next(rule.layer for rule in self.rules if rule.holds(name, phase, component=component))

    def may_differ(self, path: str) -> bool:
        """Whether several packages may each bring their own file at ``path``, relative to site-packages."""
        return any(fnmatchcase(path, pattern) for pattern in self.overlaps)


@cache
def layer_policy() -> LayerPolicy:
    """The policy that comes with envbuild.

    Raises:
        ConfigurationError: the file is damaged.
    """
    wanted = toml.Wanted(
        "the layer policy",
        why="It comes with envbuild, and assigns packages to layers.",
        fix="Install envbuild again.",
    )
    return toml.load(data_root() / POLICY_FILE, LayerPolicy, wanted)


def group_packages(lock: LockDirectory, policy: LayerPolicy) -> dict[str, list[str]]:
    """The packages of each layer by canonical name, lowest layer first; layers without packages are left out."""
    phases: dict[str, Phase] = {}
    for phase in PHASE_FILES:
        known = Phase.COMPILE if phase == Phase.COMPILE.value else Phase.MAIN
        phases |= dict.fromkeys(locked_content(lock, (phase,)), known)
    components = lock.lock.components
    # A component from git stands in git.txt, whichever phase it belongs to.
    phases |= {name: components[name].phase for name in components if name in phases}
    groups: dict[str, list[str]] = {name: [] for name in policy.order[1:]}
    for name, phase in sorted(phases.items()):
        groups[policy.layer_of(name, phase, component=name in components)].append(name)
    return {name: packages for name, packages in groups.items() if packages}


# Raised when a layer made from the same inputs would come out differently.
FORMAT = 1
# The interpreter and its library, as Debian and Ubuntu name their packages.
_PYTHON = re.compile(r"(lib)?python3")


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """A layer before it is made: its packages with their versions, and its key."""

    name: str
    packages: Mapping[str, str]
    key: str


def plan_layers(
    lock: LockDirectory, base: Base, made: StoredBase, wheels: Mapping[str, Built] = NO_BUILT
) -> tuple[LayerPlan, ...]:
    """The layers of a lock's environment, lowest first.

    A layer's key has nothing of the lock but its own packages, so that stacks, targets and locks share it.

    Args:
        wheels: wheels of the wheelhouse for packages that are then not built.
    """
    content = locked_content(lock, tuple(PHASE_FILES))
    locked = lock.packages()
    common = _common(base, made)
    policy = layer_policy()
    bare = policy.order[0]
    plans = [LayerPlan(name=bare, packages={}, key=digest_of({**common, "layer": bare}))]
    for name, packages in group_packages(lock, policy).items():
        value: dict[str, Json] = {
            **common,
            "layer": name,
            "packages": {package: _package(lock, package, content[package], wheels) for package in packages},
        }
        if any(_is_built(lock, package, wheels) for package in packages):
            # Built with what is installed: the layers below decide too.
            value["below"] = [plan.key for plan in plans]
        versions = {package: locked[package] for package in packages}
        plans.append(LayerPlan(name=name, packages=versions, key=digest_of(value)))
    return tuple(plans)


def _common(base: Base, made: StoredBase) -> dict[str, Json]:
    """What decides the bytes of every layer: the interpreter, which wheels suit the base, and the tools."""
    packages: dict[str, Json] = {name: text for name, text in made.record.packages.items() if _PYTHON.match(name)}
    return {
        "format": FORMAT,
        "python": [base.python.executable, base.python.version],
        # The build of Python decides the bytecode. Where it is not known, the whole base stands for it.
        "python_build": packages or made.digest,
        # uv chooses a wheel by its platform tag, which names a processor and a glibc (PEP 600).
        "wheels_for": [base.platform, base.glibc],
        "prefix": VENV,
        # It is in pyvenv.cfg, a file of the lowest layer.
        "sees_base": bool(base.provides),
        "uv": uv_version(),
        "gzip": gzip_writer.ENCODER,
        "compiler": sha256_file(data_root() / COMPILER),
    }


def _package(lock: LockDirectory, name: str, package: Package, wheels: Mapping[str, Built]) -> Json:
    """What decides the files of a package."""
    if name in wheels:
        return {"built": wheels[name].record.digest}
    value: dict[str, Json] = {"version": package.version, "hashes": [*sorted(package.hashes)]}
    component = lock.lock.components.get(name)
    if component and (component.commit or component.url):
        value |= {"git": component.git, "commit": component.commit, "url": component.url}
        value["subdirectory"] = component.subdirectory
        if component.commit and (builds := lock.lock.phases["git"].builds):
            value["builds"] = builds
    return value


def _is_built(lock: LockDirectory, name: str, wheels: Mapping[str, Built]) -> bool:
    """Whether a package is built while it is installed, with the packages below it."""
    component = lock.lock.components.get(name)
    return bool(name not in wheels and component and (component.commit or component.sdist))
