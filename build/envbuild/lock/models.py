"""The record of a lock, ``stack.lock.toml``, as frozen models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from envbuild.catalog.base import PythonSource
from envbuild.catalog.fields import Name, TomlModel
from envbuild.catalog.stack import Driver, Phase

SCHEMA: Literal["envbuild.lock/1"] = "envbuild.lock/1"


class LockedComponent(TomlModel):
    """A component as asked and as found."""

    asked: str
    version: str
    phase: Phase
    because: str = Field(default="the stack's file", description="who decided it: the stack, a pin, upstream's file")
    modules: tuple[str, ...] = ()
    sdist: str | None = Field(
        default=None, description="digest of the sdist that a compile-phase component is built from"
    )
    git: str | None = None
    commit: str | None = None
    committed_at: str | None = None
    ref_kind: Literal["branch", "tag", "commit"] | None = None
    url: str | None = Field(default=None, description="the file that is taken, where another component names one")
    index: str | None = Field(
        default=None, description="the index that a component takes it from, by name; the site's configuration has it"
    )
    subdirectory: str | None = Field(default=None, description="the folder of the repository that holds it")
    transitive: bool = Field(
        default=False, description="not a component of the stack: one from git takes it from there, as `because` says"
    )
    follows: bool = Field(default=False, description="locked at a branch's tip: the lock is old once the branch moves")


class Deviation(TomlModel):
    """One thing of a lock that is not what upstream, the stack's file or the newest release say."""

    package: str
    instead_of: str = Field(description="what these say, for people: '==2.7.*', 'the newest release'")
    specifier: str = Field(default="", description="the releases that are taken instead; empty for any")
    until: str = Field(
        default="", description="nothing uploaded after this moment is taken of it; empty: the lock's moment"
    )
    added: bool = Field(default=False, description="nothing asks for it, and something needs it")
    declared_by: str = Field(
        default="", description="whose declared range of it is replaced, and no other's; empty: it is for all"
    )
    reason: str

    @property
    def taken(self) -> str:
        """What is taken, for people."""
        parts = [self.specifier, f"as of {self.until}" if self.until else ""]
        return ", ".join(filter(None, parts)) or "any release"

    def text(self, packages: str = "") -> str:
        """One line for people and the record; for several packages that are taken alike, with their names."""
        name = packages or self.package
        if self.added:
            return f"{name} is added: {self.reason}"
        return f"{name} {self.taken} instead of {self.instead_of}: {self.reason}"


class LockedPhase(TomlModel):
    """A requirements file of the lock."""

    file: str
    packages: int
    digest: str
    builds: str = Field(
        default="", description="digest of git-build.txt, which isolated builds of the phase are held to"
    )


class LockedProject(TomlModel):
    """The uv project whose uv.lock is the lock's resolution."""

    git: str | None = None
    commit: str | None = None
    dirty: bool = Field(default=False, description="its files were not all as in the commit")
    uv_lock: str = Field(description="digest of its uv.lock")
    pyproject: str = Field(description="digest of its pyproject.toml")
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


class LockedTorch(TomlModel):
    """Which build of torch the lock took, and through which kind of place it was found (never where that is)."""

    version: str
    build: str = Field(description="'cpu', 'cu130', ...; 'index' for the build that the package index has")
    found_in: Literal["find-links", "torch-index", "package-index"]


class LockedBase(TomlModel):
    """The base the lock is for."""

    name: Name
    definition_digest: str
    distribution: str
    release: str
    platform: str
    glibc: str
    python: str
    python_source: PythonSource = Field(
        default=PythonSource.BASE, description="the distribution's own, a standalone build, or one in a prefix"
    )
    cuda: str | None = None
    provides: dict[str, str] = Field(default_factory=dict)


class Inputs(TomlModel):
    """What the lock was made from. The same inputs and as-of date give the same lock."""

    digest: str
    stack_digest: str
    base_digest: str
    torch_build: str
    uv: str
    as_of: str = Field(description="nothing uploaded to the index after this moment was taken (UTC)")
    as_of_asked: str = Field(default="now", description="'now', 'release', a date or a commit")
    pins: dict[str, str] = Field(default_factory=dict, description="what the user pinned on the command line")
    as_of_held: bool = Field(default=True, description="false: the index states no upload times, so newer may be there")
    not_held: tuple[str, ...] = Field(default=(), description="packages that alone are not held, for the same reason")
    no_as_of: bool = Field(default=False, description="--no-as-of")
    as_of_request: str | None = Field(default=None, description="--as-of, when it was given")
    torch_build_request: str | None = Field(default=None, description="--torch-build, when it was given")
    allow: tuple[str, ...] = Field(default=(), description="--allow")
    exact: bool = Field(default=False, description="--exact")
    as_of_reason: str = Field(default="", description="how the moment follows from what was asked")


# A new field has a default: records from before it can be read, and their seals hold (lockfile._seal).
class Lock(TomlModel):
    """``stack.lock.toml``."""

    # `schema` itself is a method of pydantic's BaseModel.
    schema_: Literal["envbuild.lock/1"] = Field(alias="schema", default=SCHEMA)
    stack: Name
    digest: str = Field(description="of the lock's content: files, components and base; not of dates")
    source_date_epoch: int = Field(description="newest upload time among the locked files, seconds since 1970")
    inputs: Inputs
    base: LockedBase
    torch: LockedTorch
    components: dict[str, LockedComponent]
    phases: dict[str, LockedPhase]
    environment: dict[str, str] = Field(
        default_factory=dict, description="variables of the finished environment, with {venv} and {site_packages}"
    )
    files: dict[str, str] = Field(
        default_factory=dict,
        description="files of the finished environment besides its packages', by their paths below site-packages",
    )
    pyproject_digest: str = Field(default="", description="of the generated pyproject.toml")
    seal: str = Field(default="", description="digest of everything else in the record: it is not edited by hand")
    overrides: dict[str, str] = Field(default_factory=dict, description="versions put over what packages declare")
    overridden: tuple[str, ...] = Field(default=(), description="declared ranges that overrides and pins go against")
    driver: Driver | None = Field(default=None, description="the training code of its certification cases")
    project: LockedProject | None = Field(default=None, description="the uv project whose uv.lock decides it")
    wheels: dict[str, str] = Field(
        default_factory=dict, description="digests of the wheels in the lock, by file: the project's own packages"
    )
    driver_because: str = Field(default="", description="why it is that driver")
    allowed: tuple[str, ...] = Field(default=(), description="findings of checks that the user let pass")
    warnings: tuple[str, ...] = Field(
        default=(), description="findings that refuse nothing: they are in code that the stack does not reach"
    )
    left_out: tuple[str, ...] = Field(
        default=(), description="what upstream or a table of companions names, and is not a component of the stack"
    )
    exempt: dict[str, str] = Field(
        default_factory=dict,
        description="packages that may be newer than the as-of moment, until when and why; components whose date is in "
        "the stack's file are not among them",
    )
    rewritten: tuple[str, ...] = Field(default=(), description="requirements that named another CUDA than the base's")
    deviations: tuple[str, ...] = Field(
        default=(), description="what was taken in the place of upstream's pins, each with the reason"
    )
    deviating: tuple[Deviation, ...] = Field(
        default=(), description="the same, one for each package: where upstream's pins stay, the next lock begins there"
    )
    fallback_from: str = Field(
        default="", description="the stack's default base, where nothing worked, when no base was named"
    )
    preferred: tuple[str, ...] = Field(
        default=(), description="files of upstream's with versions, and how many of them were taken"
    )
    verified_in: str = Field(
        default="", description="where its modules were imported before it was published; empty: nothing was open"
    )
    base_image: str = Field(
        default="", description="digest of the image of the base on which it was verified; empty: verified elsewhere"
    )
    base_made_at: str = Field(default="", description="when that base was made; empty: not known")
    stubbed: tuple[str, ...] = Field(
        default=(), description="packages whose compiled modules were stubs then, since their wheels were not built"
    )

    @property
    def title(self) -> str:
        """Which lock it is, for messages."""
        return f"the lock of {self.stack} on {self.base.name}"

    @property
    def indexes(self) -> dict[str, list[str]]:
        """The packages of each named index."""
        listed: dict[str, list[str]] = {}
        for package, component in self.components.items():
            if component.index:
                listed.setdefault(component.index, []).append(package)
        return listed

    def site_packages(self, venv: str) -> str:
        """The folder of packages in the environment at the path ``venv``."""
        return f"{venv}/lib/python{self.base.python}/site-packages"

    def variables(self, venv: str) -> dict[str, str]:
        """The variables that must be set in the environment at the path ``venv``."""
        folders = {"{venv}": venv, "{site_packages}": self.site_packages(venv)}
        values = dict(sorted(self.environment.items()))
        for placeholder, folder in folders.items():
            values = {name: value.replace(placeholder, folder) for name, value in values.items()}
        return values
