"""The policy that assigns packages to layers, as containers/native/layers.toml states it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

from packaging.utils import canonicalize_name
from pydantic import Field, model_validator
from typing_extensions import Self

from envbuild.catalog import toml
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Name, TomlModel
from envbuild.catalog.stack import Phase
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.record.content import locked_content

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
    components = {str(canonicalize_name(name)): component for name, component in lock.lock.components.items()}
    # A component from git stands in git.txt, whichever phase it belongs to.
    phases |= {name: components[name].phase for name in components if name in phases}
    groups: dict[str, list[str]] = {name: [] for name in policy.order[1:]}
    for name, phase in sorted(phases.items()):
        groups[policy.layer_of(name, phase, component=name in components)].append(name)
    return {name: packages for name, packages in groups.items() if packages}
