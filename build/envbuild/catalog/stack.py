"""A stack: its components, where they come from, and for which targets and bases it is meant."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from envbuild.catalog.fields import (
    DATE,
    Device,
    Extra,
    MisplacedError,
    Module,
    Name,
    PackageName,
    Specifier,
    TomlModel,
    VariableName,
    complete_or_extending,
)

# What every image sets itself, or what changes which Python runs which code.
RESERVED_VARIABLES = ("HOME", "LANG", "LD_PRELOAD", "PATH", "VIRTUAL_ENV")


# "13" of CUDA 13.0.
CudaMajor = Annotated[str, StringConstraints(pattern=r"^[1-9]\d*$")]


class Phase(str, Enum):
    """``main``: from wheels or isolated builds. ``compile``: against the installed torch, without build isolation."""

    # Extensions of torch are compiled against its headers, so torch must be installed before they are built.
    MAIN = "main"
    COMPILE = "compile"


class Driver(str, Enum):
    """Which training code a stack's certification cases run."""

    MCORE = "mcore"
    NEMO = "nemo"
    BRIDGE = "bridge"
    # An environment of workers, say: it is built and import-checked, and nothing trains in it.
    NONE = "none"


_MATRICES = {Driver.MCORE: "certify-quick", Driver.NEMO: "nemo-recipes", Driver.BRIDGE: "bridge-recipes"}


def shipped_matrix(driver: Driver, device: Device) -> str:
    """The shipped matrix that certifies what a driver trains on a device."""
    # The default policy does not count certify-quick there.
    return "certify-full" if (driver, device) == (Driver.MCORE, Device.CUDA) else _MATRICES[driver]


class Component(TomlModel):
    """A part of a stack that people name: where it comes from, its phase and the modules it must import.

    It comes from the package index, or, when ``ref`` (or a pin) names a branch, tag or commit, from ``git``.
    """

    version: Specifier = Field(default="", description="which versions may be taken, as a PEP 440 specifier")
    git: str | None = Field(default=None, description="the component's repository, for refs and upstream's own pins")
    ref: str | None = Field(default=None, description="branch, tag or commit to take instead of a release")
    # A build of Transformer Engine's core takes hours, and its setup.py finds out by then what it requires.
    release_file: str | None = Field(
        default=None,
        min_length=1,
        description="a file of the repository that holds the version: of a commit that upstream pins, the release of "
        "that version is taken, since only a build would tell what the commit requires",
    )
    extras: tuple[Extra, ...] = Field(
        default=(), description="extras of the package; {cuda_major} becomes the major version of the base's CUDA"
    )
    # uv only warns of an extra that a package lacks: the lock of NeMo as of 2025-03-01, before it had the extra llm,
    # had 163 packages and no lightning.
    former_extras: dict[Extra, Extra] = Field(
        default_factory=dict,
        description="for an extra, the one that had its requirements in older trees and releases, which lack it",
    )
    phase: Phase = Phase.MAIN
    device: Device | None = Field(
        default=None,
        description="'cuda': left out of the stack on bases without CUDA; 'cpu': on those with CUDA",
    )
    modules: tuple[Module, ...] = Field(default=(), description="modules that must import in the finished environment")
    uses: tuple[PackageName, ...] = Field(
        default=(), description="components whose API it calls: a lock is refused where they lack what it asks for"
    )
    unused: tuple[str, ...] = Field(
        default=(),
        description="folders and files of the package that the stack is not for; what they ask for is not checked",
    )
    # The package index has each release of torch for one CUDA: 2.10 for 12.8, 2.11 for 13.0.
    releases_for_cuda: dict[CudaMajor, Specifier] = Field(
        default_factory=dict,
        description="which releases on the package index are for which CUDA, by its major version: on a base with that "
        "CUDA these are taken, where the component is not pinned; the first of them also where it is newer than the "
        "as-of moment",
    )
    # torchvision 0.26.0 needs torch 2.11.0 exactly, and so on.
    released_with: tuple[PackageName, ...] = Field(
        default=(),
        description="packages each release of which needs one release of this component: exempt from the as-of moment "
        "where it is",
    )
    as_of: str | None = Field(
        default=None,
        pattern=DATE,
        description="an as-of date of its own (YYYY-MM-DD), for a component that is newer than the stack's anchor",
    )

    @model_validator(mode="after")
    def _ref_has_a_repository(self) -> Component:
        if self.ref is not None and self.git is None:
            raise ValueError("ref names a branch, tag or commit, so git must name the repository")
        return self


class Requirement(TomlModel):
    """A package that components need without declaring it, or whose versions must be held back."""

    version: Specifier = ""
    reason: str = Field(min_length=1, description="why the stack names it, with the evidence")


class Override(TomlModel):
    """A version that replaces what other packages declare, where their declaration is wrong."""

    version: Specifier
    only_against: bool = Field(
        default=False,
        description="replace what the packages under `against` declare and nothing else: what others declare holds",
    )
    against: tuple[PackageName, ...] = Field(
        default=(),
        description="the packages whose declared range is known to be wrong; a lock that goes against any other's is "
        "refused",
    )
    reason: str = Field(min_length=1, description="why the declared versions are wrong, with the evidence")

    @model_validator(mode="after")
    def _only_against_names_whom(self) -> Override:
        if self.only_against and not self.against:
            raise ValueError("only_against = true needs the packages whose declaration is replaced, under against")
        if self.only_against and not self.version:
            raise ValueError("only_against = true needs a version to put there")
        return self


class Takeover(TomlModel):
    """What takes over where the anchor's tree lacks the part that the stack's driver needs."""

    without: str = Field(min_length=1, description="the folder of the anchor's tree that decides: gone, this holds")
    driver: Driver = Field(description="the training code of the certification cases then")
    lead: PackageName = Field(description="the component whose upstream's pins decide the companions then")
    reason: str = Field(min_length=1, description="why, for people; part of the lock's record")
    components: dict[PackageName, Component] = Field(
        min_length=1, description="added to the stack's, or in the place of the stack's one of that name"
    )

    @model_validator(mode="after")
    def _lead_is_a_component(self) -> Takeover:
        if self.lead not in self.components:
            raise ValueError(f"lead {self.lead!r} is not one of its components {sorted(self.components)}")
        return self


# enroot's /etc/environment is unquoted, and expands ${NAME} when the image starts.
VariableValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_./:,=+@-]|\{venv\}|\{site_packages\})+$")]


class Variable(TomlModel):
    """A variable that must be set in the finished environment.

    Its value goes unquoted into files that docker, enroot and login shells read each in their own way, so it has no
    character that means something to one of them.
    """

    value: VariableValue | None = Field(
        default=None, description="{venv} and {site_packages} become the folders of the environment"
    )
    # The wheels of CUDA 12 have their headers in other folders than those of CUDA 13.
    value_for_cuda: dict[CudaMajor, VariableValue] = Field(
        default_factory=dict,
        description="instead of value, by the major version of the base's CUDA; not set where it has another",
    )
    reason: str = Field(min_length=1, description="why the stack needs it, with the evidence")
    device: Device | None = Field(
        default=None, description="'cuda': set on bases with CUDA alone; 'cpu': on those without"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Variable:
        if (self.value is None) == (not self.value_for_cuda):
            raise ValueError("a variable has either value or value_for_cuda")
        return self

    def value_on(self, cuda_major: str | None) -> str | None:
        """The value on bases with this CUDA; None: it is not set there."""
        return self.value if self.value is not None else self.value_for_cuda.get(cuda_major or "")


# No empty, "." or ".." part: the file is below site-packages.
SitePath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_+-][A-Za-z0-9_.+-]*(/[A-Za-z0-9_+-][A-Za-z0-9_.+-]*)*$")
]


class AddedFile(TomlModel):
    """A file that a package asks for and its wheel lacks."""

    text: str = Field(min_length=1, description="its content")
    reason: str = Field(min_length=1, description="why the stack needs it, with the evidence")


class UvProject(TomlModel):
    """A uv project whose uv.lock is the resolution of the stack: a folder, or a commit of a repository."""

    path: str | None = Field(
        default=None, min_length=1, description="its folder, as seen from the folder that has envs/"
    )
    git: str | None = Field(default=None, min_length=1, description="its repository, in the place of a folder")
    ref: str | None = Field(default=None, min_length=1, description="branch, tag or commit of the repository")
    extras: tuple[str, ...] = Field(default=(), description="extras of it that are installed, as by `uv sync --extra`")
    groups: tuple[str, ...] = Field(default=(), description="dependency groups besides its default ones")
    imports: tuple[Module, ...] | None = Field(
        default=None, description="modules that must import; default: the top-level ones of its own packages"
    )

    @model_validator(mode="after")
    def _is_in_one_place(self) -> UvProject:
        if (self.path is None) == (self.git is None):
            raise ValueError("a project has either path or git")
        if (self.git is None) != (self.ref is None):
            raise ValueError("git and ref go together: the repository, and the branch, tag or commit")
        return self


def _twice(names: tuple[str, ...]) -> str | None:
    return next((name for position, name in enumerate(names) if name in names[:position]), None)


class Builds(TomlModel):
    """For which target on which bases a stack is meant."""

    target: Name
    bases: tuple[Name, ...] = Field(min_length=1)
    default_base: Name = Field(
        default="host", description="the base taken without --base; 'host': the one of this machine's distribution"
    )

    @model_validator(mode="after")
    def _default_is_listed(self) -> Builds:
        if self.default_base != "host" and self.default_base not in self.bases:
            raise ValueError(f"default_base {self.default_base!r} is not among bases {list(self.bases)}")
        if (twice := _twice(self.bases)) is not None:
            raise MisplacedError(("bases",), f"{twice!r} is there twice")
        return self


def _using(spec: Component, removed: Collection[str]) -> Component:
    """A component without its word on those that are not there."""
    used = tuple(name for name in spec.uses if name not in removed)
    return spec if used == spec.uses else spec.model_copy(update={"uses": used})


class Stack(TomlModel):
    """Which components at which versions, for which targets and bases (``envs/stacks/*.toml``)."""

    model_config = ConfigDict(json_schema_extra=complete_or_extending)

    summary: str
    driver: Driver
    matrix: Name | None = Field(
        default=None, description="what certifies it without --matrix; default: the shipped one of its driver"
    )
    # Excluded: it decides no lock.
    gpu_matrix: Name | None = Field(
        default=None, exclude=True, description="the same for targets with GPUs; default: matrix"
    )
    # Excluded: what a stack is counts, and not in how many files it is written.
    extends: Name | None = Field(
        default=None,
        exclude=True,
        description="another stack, which this file changes: tables merge key by key, a list replaces the list",
    )
    builds: tuple[Builds, ...] = Field(min_length=1)
    anchor: PackageName | None = Field(
        default=None, description="the component whose ref and date lead: its upstream's pins decide the companions"
    )
    as_of: str = Field(
        default="now",
        pattern=rf"^(now|release)$|{DATE}",
        description="without --as-of: 'now', 'release' (the anchor's date and the margin), or a date",
    )
    margin_days: Annotated[int, Field(ge=0)] = Field(
        default=14, description="days after the anchor's date up to which 'release' takes packages"
    )
    project: UvProject | None = Field(
        default=None, description="a uv project, whose uv.lock decides every package; then components has none"
    )
    components: dict[PackageName, Component] = Field(default_factory=dict)
    requirements: dict[PackageName, Requirement] = Field(default_factory=dict)
    overrides: dict[PackageName, Override] = Field(default_factory=dict)
    takeover: Takeover | None = Field(
        default=None, description="what holds where the anchor's tree lacks what the driver needs"
    )
    environment: dict[VariableName, Variable] = Field(
        default_factory=dict, description="variables that must be set in the finished environment"
    )
    files: dict[SitePath, AddedFile] = Field(
        default_factory=dict,
        description="files that the finished environment has besides its packages', by their paths below site-packages",
    )

    @model_validator(mode="after")
    def _something_decides_the_packages(self) -> Stack:
        if self.project is None and not self.components:
            raise MisplacedError(("components",), "a stack has components, or a project whose uv.lock has them")
        deciding = {"anchor", "as_of", "margin_days", "components", "requirements", "overrides", "takeover"}
        if self.project is not None and (idle := sorted(deciding & self.model_fields_set)):
            raise ValueError(f"{', '.join(idle)}: the project's uv.lock decides every package")
        return self

    @model_validator(mode="after")
    def _anchor_is_a_component(self) -> Stack:
        if self.anchor is not None and self.anchor not in self.components:
            raise ValueError(f"anchor {self.anchor!r} is not one of the components {sorted(self.components)}")
        if self.takeover is not None and self.anchor is None:
            raise ValueError("takeover needs an anchor, whose tree decides whether it holds")
        if self.takeover is not None and self.takeover.lead == self.anchor:
            raise ValueError(f"takeover: lead {self.anchor!r} is the anchor, which leads anyway")
        if self.as_of == "release" and self.anchor is None:
            raise ValueError("as_of = 'release' needs an anchor")
        if taken := [name for name in self.environment if name in RESERVED_VARIABLES or name.startswith("PYTHON")]:
            raise ValueError(f"environment may not set {', '.join(taken)}: images set it, or it changes Python itself")
        return self

    @model_validator(mode="after")
    def _what_leads_is_on_every_base(self) -> Stack:
        takeover = self.takeover
        leading = [("components", self.components, self.anchor)]
        leading += [("takeover", takeover.components, takeover.lead)] if takeover is not None else []
        for place, components, name in leading:
            if name is not None and components[name].device is not None:
                keys = ("components",) if place == "components" else ("takeover", "components")
                raise MisplacedError((*keys, name, "device"), f"{name} decides the companions, and so on every base")
        if self.components and all(spec.device is not None for spec in self.components.values()):
            raise MisplacedError(("components",), "each has a device, so that none may be left on a base")
        return self

    @model_validator(mode="after")
    def _each_target_has_one_entry(self) -> Stack:
        targets = tuple(entry.target for entry in self.builds)
        for position, target in enumerate(targets):
            if target in targets[:position]:
                raise MisplacedError(
                    ("builds", position, "target"), f"target {target!r} has an entry already; name all its bases there"
                )
        return self

    @model_validator(mode="after")
    def _uses_are_components(self) -> Stack:
        known = self.every_component()
        places: dict[tuple[str, ...], dict[str, Component]] = {("components",): self.components}
        if self.takeover is not None:
            places["takeover", "components"] = self.takeover.components
        for place, components in places.items():
            for name, spec in components.items():
                if unknown := [used for used in spec.uses if used not in known]:
                    text = f"{', '.join(map(repr, unknown))}: no component of the stack; components: {', '.join(known)}"
                    raise MisplacedError((*place, name, "uses"), text)
        return self

    def matrix_for(self, device: Device, driver: Driver | None = None) -> str:
        """The matrix that certifies it for a device without --matrix; ``driver``: the lock's, or else the stack's."""
        named = self.gpu_matrix if device is Device.CUDA else None
        return named or self.matrix or shipped_matrix(driver or self.driver, device)

    def every_component(self) -> dict[str, Component]:
        """The components, and those that only a takeover brings."""
        return {**(self.takeover.components if self.takeover else {}), **self.components}

    def on(self, device: Device) -> Stack:
        """The stack as it is on bases for a device: without components and variables that are for another one."""

        def kept(components: dict[str, Component]) -> dict[str, Component]:
            return {name: spec for name, spec in components.items() if spec.device in (None, device)}

        own, takeover = kept(self.components), self.takeover
        added = kept(takeover.components) if takeover is not None else {}
        removed = self.every_component().keys() - own.keys() - added.keys()
        tables: dict[str, object] = {
            "components": {name: _using(spec, removed) for name, spec in own.items()},
            "environment": {
                name: variable for name, variable in self.environment.items() if variable.device in (None, device)
            },
        }
        if takeover is not None:
            added = {name: _using(spec, removed) for name, spec in added.items()}
            tables["takeover"] = takeover.model_copy(update={"components": added})
        return self.model_copy(update=tables)

    def taken_over(self) -> Stack:
        """The stack as it is once its takeover holds.

        The takeover's driver and components are in place of the stack's own, in the stack's order.
        """
        if self.takeover is None:
            return self
        components = {**self.components, **self.takeover.components}
        return self.model_copy(update={"components": components, "driver": self.takeover.driver})

    def variables_on(self, cuda_major: str | None) -> dict[str, str]:
        """The variables that are set on bases with this CUDA, with {venv} and {site_packages}."""
        values = {name: variable.value_on(cuda_major) for name, variable in self.environment.items()}
        return {name: value for name, value in values.items() if value is not None}

    def undecided(self) -> set[str]:
        """The components of which the stack's file says nothing, also those that only a takeover brings."""
        return {name for name, spec in self.every_component().items() if not spec.version and spec.ref is None}

    def overrides_of_all(self) -> list[str]:
        """The packages whose overrides are for what all others declare."""
        return [name for name, override in self.overrides.items() if not override.only_against]

    def scoped_overrides(self) -> dict[str, dict[str, str]]:
        """The overrides that are for what single packages declare: by these, specifiers by package."""
        scoped: dict[str, dict[str, str]] = {}
        for name, override in self.overrides.items():
            for declared_by in override.against if override.only_against else ():
                scoped.setdefault(declared_by, {})[name] = override.version
        return scoped

    def builds_for(self, target: str) -> Builds | None:
        """The entry for ``target``, or None when the stack is not for it."""
        return next((entry for entry in self.builds if entry.target == target), None)
