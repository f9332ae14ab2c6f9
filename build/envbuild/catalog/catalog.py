"""Looks things up by name: a user's ``envs/`` first, then the ones that come with envbuild."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from envbuild.catalog import knowledge, toml
from envbuild.catalog.base import Base
from envbuild.catalog.cluster import Cluster
from envbuild.catalog.conflict import Conflict
from envbuild.catalog.data import data_root
from envbuild.catalog.extends import extended_by, merged, not_extending, refuse_misspelt
from envbuild.catalog.fields import NAME_PATTERN, Device
from envbuild.catalog.folders import exists, listed, no_file
from envbuild.catalog.matrix import Matrix
from envbuild.catalog.models import EXTENDABLE, KINDS, SINGULAR, Companions, Target
from envbuild.catalog.names import Named, meant, named_by, near, wanted
from envbuild.catalog.policy import Policy
from envbuild.catalog.recipe import WheelRecipe
from envbuild.catalog.stack import Driver, Stack
from envbuild.core.digests import digest_of
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.core.files import machine_errors

M = TypeVar("M", bound=BaseModel)


def definition_digest(model: BaseModel) -> str:
    """The digest of what a definition says: comments and the order of keys do not count.

    Neither do keys left at their defaults, so that a new key of the format changes no digest.
    """
    # Locks record this digest: with defaults in it, each new key of the format would make every lock old.
    value = model.model_dump(mode="json", exclude_defaults=True)
    if isinstance(model, Stack):
        # The default base decides no lock. Locks were recorded with the first base in its place.
        for entry in (entry for entry in value["builds"] if "default_base" in entry):
            entry["default_base"] = entry["bases"][0]
    return digest_of(value)


def digest_without_summary(model: BaseModel) -> str:
    """The digest of all that a definition decides: of a matrix its models, training, cases, tolerances; no summary."""
    return definition_digest(model.model_copy(update={"summary": ""}))


@dataclass(frozen=True)
class Catalog:
    """``envs/`` folders in the order in which they are searched."""

    folders: tuple[Path, ...]

    @classmethod
    def open(cls, project: Path) -> Catalog:
        """The catalog seen from the directory ``project``: its own ``envs/``, then the shipped one.

        Raises:
            MachineError: this account may not look into the directory.
        """
        folders = (project / "envs", data_root() / "envs")
        # exists first: where a folder may not be searched, is_dir() raises a PermissionError that names no way out.
        existing = [folder.resolve() for folder in folders if exists(folder) and folder.is_dir()]
        # In a checkout the project's envs/ is the shipped one.
        return cls(tuple(dict.fromkeys(existing)))

    def names(self, kind: str) -> list[str]:
        """All names of a kind (``stacks``, ``bases``, ``targets``, ``clusters``, ``matrices``), sorted."""
        # Editors leave hidden files (.#mcore.toml) next to what they edit.
        files = [Path(name) for folder in self.folders for name in listed(folder / kind)]
        return sorted({file.stem for file in files if file.suffix == ".toml" and not file.name.startswith(".")})

    def strays(self) -> list[str]:
        """Notes on folders and files of ``envs/`` that hold definitions but have names that are not read."""
        notes = []
        for folder in self.folders:
            # Projects have no knowledge of their own.
            read = {*KINDS, knowledge.FOLDER} if folder == _shipped_envs() else {*KINDS}
            for name in sorted(listed(folder)):
                path = folder / name
                if name.startswith(".") or name in read or (path.suffix != ".toml" and not any(path.glob("*.toml"))):
                    continue
                notes.append(
                    f"{path} is not read. {meant(name, KINDS)}Definitions are in the folders {', '.join(KINDS)}."
                )
        return notes

    def path(self, kind: str, name: str) -> Path:
        """The file that defines ``name``.

        Raises:
            ConfigurationError: there is none (lists those there are), or its file's name is no name.
        """
        if (path := self._path(kind, name, self.folders)) is not None:
            return path
        raise ConfigurationError(
            f"there is no {SINGULAR[kind]} {name!r}",
            why=near(name, self.names(kind)),
            fix=f"Choose one of these, or define it in envs/{kind}/{name}.toml (`envbuild schema` has the format).",
        )

    def _path(self, kind: str, name: str, folders: Iterable[Path]) -> Path | None:
        for folder in folders:
            path = folder / kind / f"{name}.toml"
            # A name comes from the command line, and must not lead out of the folder.
            if "/" in name or not exists(path):
                continue
            if not path.is_file():
                raise no_file(path)
            # Only of a file that is there: any other wrong name is answered with the names that there are.
            if not re.match(NAME_PATTERN, name):
                raise ConfigurationError(
                    f"{path}: {name!r} cannot be the name of a {SINGULAR[kind]}",
                    why="A name is made of lower-case letters, digits, '.', '_' and '-', and begins with a letter "
                    "or digit.",
                    fix="Rename the file.",
                )
            return path
        return None

    def _load(self, kind: str, name: str, model: type[M]) -> M:
        return toml.load(self.path(kind, name), model, wanted(kind, name))

    def stack(self, name: str) -> Stack:
        """The stack ``name``, with what it takes from those that it extends; the names in it are there."""
        return self._with_extended("stacks", name, Stack)

    def cluster(self, name: str) -> Cluster:
        """The cluster ``name``, with what it takes from those that it extends."""
        return self._with_extended("clusters", name, Cluster)

    def _with_extended(self, kind: str, name: str, model: type[M]) -> M:
        return self._over_extended(kind, name, model, self.path(kind, name), ())[0]

    def _over_extended(
        self, kind: str, name: str, model: type[M], path: Path, extending: tuple[Path, ...]
    ) -> tuple[M, Mapping[str, Any]]:
        """A definition, and the tables of its file over those of the files that it extends.

        Args:
            extending: the files that extend it, one the other.
        """
        text = toml.read(path, wanted(kind, name))
        values: Mapping[str, Any] = toml.values_of(text, str(path))
        if (extended := extended_by(values, path, kind)) is not None:
            # A file may extend the shipped one of its own name.
            folders = self.folders if extended != name else self.folders[self.folders.index(path.parents[1]) + 1 :]
            chain = (*extending, path)
            below = not_extending(self._path(kind, extended, folders), chain, extended, kind, self.names(kind))
            under = self._over_extended(kind, extended, model, below, chain)[1]
            refuse_misspelt(values, under, path, self._components)
            values = merged(under, values)
            read = toml.check(values, text, model, str(path))
        else:
            read = toml.parse(text, model, str(path))
        if isinstance(read, Stack):
            self._refuse_unknown_names(named_by(read), path)
        return read, values

    @staticmethod
    def _components() -> set[str]:
        """The names of the components that any shipped stack has."""
        shipped = Catalog.shipped()
        return {part for name in shipped.names("stacks") for part in shipped.stack(name).every_component()}

    def _refuse_unknown_names(self, named: list[Named], path: Path) -> None:
        known = {kind: self.names(kind) for kind in {kind for kind, _, _ in named}}
        for kind, name, location in named:
            if name not in known[kind]:
                raise ConfigurationError(
                    f"{toml.where(path, location)}: there is no {SINGULAR[kind]} {name!r}",
                    why=f"{toml.dotted(location)} names it. {near(name, known[kind])}",
                    fix=f"Name one of these, or define it in envs/{kind}/{name}.toml.",
                )

    def base(self, name: str) -> Base:
        return self._load("bases", name, Base)

    def target(self, name: str) -> Target:
        """The target ``name``: a shipped name stands for the shipped hardware, whatever else a project changes."""
        target = self._load("targets", name, Target)
        shipped = self._replaced("targets", name, Target) or target
        hardware = ("device", "sm", "platform")
        if changed := [field for field in hardware if getattr(target, field) != getattr(shipped, field)]:
            raise self._taken("targets", name, f"The project's file has another {' and '.join(changed)}.")
        return target

    def matrix(self, name: str) -> Matrix:
        return self._load("matrices", name, Matrix)

    def policy(self, name: str) -> Policy:
        """The policy ``name``; the matrices that it names are there."""
        policy = self._load_judging("policies", name, Policy)
        named: list[Named] = [
            ("matrices", matrix, (key, position))
            for key in ("matrices", "cpu_matrices")
            for position, matrix in enumerate(getattr(policy, key) or ())
        ]
        self._refuse_unknown_names(named, self.path("policies", name))
        return policy

    @classmethod
    def shipped(cls) -> Catalog:
        """What envbuild ships, whatever the project has."""
        return cls((_shipped_envs(),))

    def ships(self, kind: str, name: str) -> bool:
        """Whether the definition ``name`` is what envbuild ships under that name, wherever its file is."""
        if self.path(kind, name).parent == _shipped_envs() / kind:
            return True
        shipped = self._replaced(kind, name, KINDS[kind])
        return shipped is not None and digest_without_summary(self.any(kind, name)) == digest_without_summary(shipped)

    @cached_property
    def conflicts(self) -> dict[str, Conflict]:
        """All conflicts by name. A project's own are added to the shipped ones, and replace none."""
        return {name: self._load_judging("conflicts", name, Conflict) for name in self.names("conflicts")}

    def _load_judging(self, kind: str, name: str, model: type[M]) -> M:
        """A definition by which certificates are judged: a shipped name means what envbuild ships.

        Raises:
            ConfigurationError: the project has another one of that name.
        """
        if not self.ships(kind, name) and self._replaced(kind, name, model):
            raise self._taken(kind, name, "The project's file says something else.")
        return self._load(kind, name, model)

    def _replaced(self, kind: str, name: str, model: type[M]) -> M | None:
        """What envbuild ships under the name of a project's file; None where it ships nothing."""
        shipped = Catalog.shipped()
        is_own = self.path(kind, name).parent != _shipped_envs() / kind
        return shipped._load(kind, name, model) if is_own and name in shipped.names(kind) else None

    def _taken(self, kind: str, name: str, why: str) -> ConfigurationError:
        hints = {
            "conflicts": " `envbuild lock --allow NAME` locks in spite of a shipped one.",
            "policies": " Then name it with --policy.",
        }
        return ConfigurationError(
            f"{self.path(kind, name)}: envbuild ships a {SINGULAR[kind]} {name}",
            why=f"{why} Images are certified and published by the shipped one.",
            fix=f"Give the file another name.{hints.get(kind, '')}",
        )

    def companions(self, package: str) -> Companions | None:
        """What belongs to the releases of a package; None when no file says so."""
        return self._load("companions", package, Companions) if package in self.names("companions") else None

    def wheel_recipe(self, package: str) -> WheelRecipe:
        """How a package is built; for one without a file, what suits most."""
        if package not in self.names("wheels"):
            return WheelRecipe(summary=f"{package}: no recipe, built as most packages are")
        return self._load("wheels", package, WheelRecipe)

    def patch(self, file: str) -> bytes:
        """A change to a package's sources, which a recipe names.

        Raises:
            ConfigurationError: there is no such file.
        """
        for folder in self.folders:
            path = folder / "wheels" / "patches" / file
            if exists(path):
                with machine_errors(path, doing="read"):
                    return path.read_bytes()
        raise ConfigurationError(
            f"there is no patch {file}",
            why=f"A recipe in envs/wheels/ names it. Looked for in: {', '.join(str(f) for f in self.folders)}.",
            fix="Put it into envs/wheels/patches/, in the form of `git diff`, or correct its name.",
        )

    def any(self, kind: str, name: str) -> BaseModel:
        """The definition ``name`` of whichever kind."""
        read = self._with_extended if kind in EXTENDABLE else self._load
        return read(kind, name, KINDS[kind])


@dataclass(frozen=True)
class HostDistribution:
    """The distribution of the machine envbuild runs on, from /etc/os-release (os-release(5))."""

    distribution: str
    release: str

    @classmethod
    def here(cls, path: Path = Path("/etc/os-release")) -> HostDistribution:
        # platform.freedesktop_os_release() reads the file of this machine alone, and not one of a root file system.
        lines = path.read_text().splitlines() if path.is_file() else []
        # Values may be in quotes, as in a shell: os-release(5).
        pairs = (line.partition("=")[::2] for line in lines)
        values = {key.strip(): value.strip().strip("\"'") for key, value in pairs}
        return cls(distribution=values.get("ID", "unknown"), release=values.get("VERSION_ID", "unknown"))


@dataclass(frozen=True)
class Selection:
    """What a command works on: names and their definitions, checked to belong together."""

    catalog: Catalog
    stack_name: str
    base_name: str
    target_name: str

    @cached_property
    def stack(self) -> Stack:
        """The stack as it is on the base: what it has for another device only is no part of it."""
        return self.catalog.stack(self.stack_name).on(self.base.device)

    @property
    def folder(self) -> Path:
        """The folder that has the envs/ of the stack's file."""
        return self.catalog.path("stacks", self.stack_name).parents[2]

    @cached_property
    def base(self) -> Base:
        return self.catalog.base(self.base_name)

    @cached_property
    def target(self) -> Target:
        return self.catalog.target(self.target_name)

    def matrix_for(self, driver: Driver | None = None) -> str:
        """The matrix that certifies the stack for the target without --matrix; ``driver``: the lock's.

        Raises:
            ConfigurationError: nothing trains in its environment.
        """
        if (driver or self.stack.driver) is Driver.NONE:
            raise ConfigurationError(
                f"no matrix certifies stack {self.stack_name}",
                why='Its driver is "none": its image is built and import-checked, and nothing trains in it.',
                fix='Give it a driver ("mcore", "nemo", "bridge") if its packages can train.',
            )
        return self.stack.matrix_for(self.target.device, driver)


def select(
    catalog: Catalog, stack_name: str, target_name: str | None, base_name: str | None, machine: HostDistribution
) -> Selection:
    """Apply the defaults of the command line: which target and base a stack is taken for.

    Raises:
        UsageError: no target was named.
        ConfigurationError: the stack is not meant for the target or base.
    """
    # The command line names a target, and its entry in the stack decides the base.
    stack = catalog.stack(stack_name)
    targets = [entry.target for entry in stack.builds]
    if target_name is None:
        raise UsageError(
            "no target was named",
            why=f"Stack {stack_name} is for: {', '.join(targets)}.",
            fix=f"Add --target {targets[0]}" + (" (or another of these)." if len(targets) > 1 else "."),
        )
    # For its error: a target that does not exist is another mistake than one that the stack does not name.
    catalog.target(target_name)
    builds = stack.builds_for(target_name)
    if builds is None:
        raise ConfigurationError(
            f"stack {stack_name} is not for target {target_name}",
            why=f"It names the targets: {', '.join(targets)}.",
            fix=f"Choose one of these, or add a [[builds]] entry to envs/stacks/{stack_name}.toml.",
        )
    if base_name is None:
        base_name = _default_base(catalog, builds.bases, builds.default_base, machine)
    elif base_name not in builds.bases:
        catalog.base(base_name)
        raise _not_for_base(catalog, stack_name, base_name, builds.bases, f" for target {target_name}")
    selection = Selection(catalog, stack_name, base_name, target_name)
    _refuse_other_hardware(selection)
    return selection


def _refuse_other_hardware(selection: Selection) -> None:
    base, target = selection.base, selection.target
    if base.platform != target.platform:
        raise ConfigurationError(
            f"base {selection.base_name} is not for the platform of target {selection.target_name}",
            why=f"The base is for {base.platform}, the target's machines are {target.platform}.",
            fix=f"Take a base for {target.platform} (its file says platform), and name it for the target in "
            f"envs/stacks/{selection.stack_name}.toml.",
        )
    # No case would run on a GPU, and what is certified so is counted as an image for CPUs.
    if base.device is Device.CUDA and target.device is Device.CPU:
        raise ConfigurationError(
            f"base {selection.base_name} is for GPUs, and target {selection.target_name} has none",
            why=f"The base has CUDA {base.cuda}, which would be certified without a GPU.",
            fix='Take a base without CUDA, or a target with device = "cuda" and its sm.',
        )


def select_to_lock(
    catalog: Catalog, stack_name: str, target_name: str | None, base_name: str | None, machine: HostDistribution
) -> Selection:
    """Like :func:`select`, but without a target the stack's first one that is for the base: targets share a lock."""
    if target_name is None:
        stack = catalog.stack(stack_name)
        if base_name is not None:
            catalog.base(base_name)
        fitting = [entry for entry in stack.builds if base_name is None or base_name in entry.bases]
        if not fitting:
            known = dict.fromkeys(base for entry in stack.builds for base in entry.bases)
            raise _not_for_base(catalog, stack_name, base_name or "", known)
        target_name = fitting[0].target
    return select(catalog, stack_name, target_name, base_name, machine)


def stacks_like(catalog: Catalog, stack_name: str) -> list[str]:
    """The other stacks with the same anchor, the newest first."""
    anchor = catalog.stack(stack_name).anchor
    names = sorted(set(catalog.names("stacks")) - {stack_name}, key=_by_numbers, reverse=True)
    return [name for name in names if anchor is not None and catalog.stack(name).anchor == anchor]


def _by_numbers(name: str) -> list[tuple[str, int]]:
    """Puts nemo-2.10 behind nemo-2.7."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def _not_for_base(
    catalog: Catalog, stack_name: str, base_name: str, known: Iterable[str], of_target: str = ""
) -> ConfigurationError:
    """The error for a base that a stack does not name; it names a stack with the same anchor that does."""
    others = [
        f"\nStack {name} is for that base: --stack {name} --base {base_name}"
        for name in stacks_like(catalog, stack_name)
        if any(base_name in entry.bases for entry in catalog.stack(name).builds)
    ]
    return ConfigurationError(
        f"stack {stack_name}{of_target} is not meant for base {base_name}",
        why=f"It names the bases: {', '.join(known)}.",
        fix="".join([f"Choose one of these with --base, or add it to envs/stacks/{stack_name}.toml.", *others[:1]]),
    )


def _default_base(catalog: Catalog, bases: tuple[str, ...], default: str, machine: HostDistribution) -> str:
    if default != "host":
        return default
    for name in bases:
        base = catalog.base(name)
        if (base.distribution, base.release) == (machine.distribution, machine.release):
            return name
    return bases[0]


def _shipped_envs() -> Path:
    return (data_root() / "envs").resolve()
