"""The nouns of the tool as frozen types: stack, base, target, cluster, matrix.

Each class is one kind of TOML file under ``envs/``; the file's name is the thing's name. Fields carry their units
in their names. Unknown keys are refused.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from envbuild.core.errors import CheckRefusedError

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
PackageName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Extra = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]|\{cuda_major\})*$")]
# Python's names of the machines that a platform is.
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
DATE = r"^\d{4}-\d{2}-\d{2}$"
Module = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"{text!r} is no version specifier (such as '==2.13.0' or '>=1,<2')") from error
    return text


Specifier = Annotated[str, AfterValidator(_specifier)]


# What every image sets itself, or what changes which Python runs which code.
RESERVED_VARIABLES = ("HOME", "LANG", "LD_PRELOAD", "PATH", "VIRTUAL_ENV")
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Model(BaseModel):
    """A frozen model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Device(str, Enum):
    """Where tensors live."""

    CPU = "cpu"
    CUDA = "cuda"


class Phase(str, Enum):
    """``main``: from wheels or isolated builds. ``compile``: against the installed torch, without build isolation."""

    MAIN = "main"
    COMPILE = "compile"


class Driver(str, Enum):
    """Which training code a stack's certification cases run."""

    MCORE = "mcore"
    NEMO = "nemo"
    BRIDGE = "bridge"


class Component(Model):
    """A part of a stack that people name: where it comes from, its phase and the modules it must import.

    It comes from the package index, or, when ``ref`` (or a pin) names a branch, tag or commit, from ``git``.
    """

    version: Specifier = Field(default="", description="which versions may be taken, as a PEP 440 specifier")
    git: str | None = Field(default=None, description="the component's repository, for refs and upstream's own pins")
    ref: str | None = Field(default=None, description="branch, tag or commit to take instead of a release")
    extras: tuple[Extra, ...] = Field(
        default=(), description="extras of the package; {cuda_major} becomes the major version of the base's CUDA"
    )
    phase: Phase = Phase.MAIN
    modules: tuple[Module, ...] = Field(default=(), description="modules that must import in the finished environment")
    uses: tuple[PackageName, ...] = Field(
        default=(), description="components whose API it calls: a lock is refused where they lack what it asks for"
    )
    unused: tuple[str, ...] = Field(
        default=(),
        description="folders and files of the package that the stack is not for; what they ask for is not checked",
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


class Requirement(Model):
    """A package that components need without declaring it, or whose versions must be held back."""

    version: Specifier = ""
    reason: str = Field(min_length=1, description="why the stack names it, with the evidence")


class Override(Model):
    """A version that replaces what other packages declare, where their declaration is wrong."""

    version: Specifier
    against: tuple[PackageName, ...] = Field(
        default=(),
        description="the packages whose declared range is known to be wrong; a lock that goes against any other's is "
        "refused",
    )
    reason: str = Field(min_length=1, description="why the declared versions are wrong, with the evidence")


class Takeover(Model):
    """What takes over where the anchor's tree lacks the part that the stack's driver needs."""

    without: str = Field(min_length=1, description="the folder of the anchor's tree that decides: gone, this holds")
    driver: Driver = Field(description="the training code of the certification cases then")
    lead: PackageName = Field(description="the component whose upstream's pins decide the companions then")
    reason: str = Field(min_length=1, description="why, in words; the lock's record says so")
    components: dict[PackageName, Component] = Field(
        min_length=1, description="added to the stack's, or in the place of the stack's one of that name"
    )

    @model_validator(mode="after")
    def _lead_is_a_component(self) -> Takeover:
        if self.lead not in self.components:
            raise ValueError(f"lead {self.lead!r} is none of its components {sorted(self.components)}")
        return self


class Variable(Model):
    """A variable that must be set in the finished environment.

    Its value goes unquoted into files that docker, enroot and login shells read each in their own way, so it has no
    character that means something to one of them.
    """

    value: Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_./:,=+@-]|\{venv\}|\{site_packages\})+$")] = Field(
        description="{venv} and {site_packages} become the folders of the environment"
    )
    reason: str = Field(min_length=1, description="why the stack needs it, with the evidence")


class Builds(Model):
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
        return self


class Stack(Model):
    """Which components at which versions, for which targets and bases (``envs/stacks/*.toml``)."""

    summary: str
    driver: Driver
    matrix: Name = Field(description="the matrix that certifies it without --matrix")
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
    components: dict[PackageName, Component] = Field(min_length=1)
    requirements: dict[PackageName, Requirement] = Field(default_factory=dict)
    overrides: dict[PackageName, Override] = Field(default_factory=dict)
    takeover: Takeover | None = Field(
        default=None, description="what holds where the anchor's tree lacks what the driver needs"
    )
    environment: dict[VariableName, Variable] = Field(
        default_factory=dict, description="variables that must be set in the finished environment"
    )

    @model_validator(mode="after")
    def _anchor_is_a_component(self) -> Stack:
        if self.anchor is not None and self.anchor not in self.components:
            raise ValueError(f"anchor {self.anchor!r} is none of the components {sorted(self.components)}")
        if self.takeover is not None and self.anchor is None:
            raise ValueError("takeover needs an anchor, whose tree decides whether it holds")
        if self.takeover is not None and self.takeover.lead == self.anchor:
            raise ValueError(f"takeover: lead {self.anchor!r} is the anchor, which leads anyway")
        if self.as_of == "release" and self.anchor is None:
            raise ValueError("as_of = 'release' needs an anchor")
        if taken := [name for name in self.environment if name in RESERVED_VARIABLES or name.startswith("PYTHON")]:
            raise ValueError(f"environment may not set {', '.join(taken)}: images set it, or it changes Python itself")
        return self

    def every_component(self) -> dict[str, Component]:
        """The components, and those that only a takeover brings."""
        return {**(self.takeover.components if self.takeover else {}), **self.components}

    def taken_over(self) -> Stack:
        """The stack as it is once its takeover holds.

        The takeover's driver and components are in place of the stack's own, in the stack's order.
        """
        if self.takeover is None:
            return self
        components = {**self.components, **self.takeover.components}
        return self.model_copy(update={"components": components, "driver": self.takeover.driver})

    def undecided(self) -> set[str]:
        """The components of which the stack's file says nothing, also those that only a takeover brings."""
        return {name for name, spec in self.every_component().items() if not spec.version and spec.ref is None}

    def builds_for(self, target: str) -> Builds | None:
        """The entry for ``target``, or None when the stack is not for it."""
        return next((entry for entry in self.builds if entry.target == target), None)


class PythonSource(str, Enum):
    """Where an environment's Python comes from.

    ``base``: the distribution's own. ``standalone``: a build that uv installs. ``prefix``: one that lies in a folder of
    the base already (conda's, or a site's own).
    """

    BASE = "base"
    STANDALONE = "standalone"
    PREFIX = "prefix"


class BasePython(Model):
    """The Python of a base."""

    version: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")] = Field(description="major.minor")
    source: PythonSource
    executable: Annotated[str, StringConstraints(pattern=r"^/")]


class BaseTorch(Model):
    """Which build of torch a base takes."""

    build: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+$")] = Field(
        description="the part after the plus sign of torch's version ('cpu', 'cu130', ...); 'index': the build that "
        "the package index has"
    )


class Mmdebstrap(Model):
    """A root file system made by mmdebstrap from the machine's own apt sources."""

    method: Literal["mmdebstrap"]
    suite: Name
    components: tuple[Name, ...] = Field(min_length=1)
    packages: tuple[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+.-]+$")], ...]


class OciImage(Model):
    """A root file system that is an image on a registry."""

    method: Literal["oci"]
    image: str = Field(description="registry/repository:tag")
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")] | None = Field(
        default=None, description="the image's digest; until it was resolved, nothing can be built on it"
    )


class Base(Model):
    """The userland a stack is put on (``envs/bases/*.toml``)."""

    summary: str
    distribution: Literal["debian", "ubuntu"]
    release: str = Field(description="VERSION_ID of /etc/os-release")
    platform: Literal["linux/amd64"]
    glibc: Annotated[str, StringConstraints(pattern=r"^2\.\d+$")]
    python: BasePython
    torch: BaseTorch
    cuda: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")] | None = Field(
        default=None, description="the CUDA that the environment's packages are for, major.minor; none: no CUDA"
    )
    provides: dict[PackageName, str] = Field(
        default_factory=dict, description="packages that the base brings and no lock may replace, with their versions"
    )
    obtain: Annotated[Mmdebstrap | OciImage, Field(discriminator="method")]

    @property
    def archive(self) -> Mmdebstrap:
        """How mmdebstrap makes it.

        Raises:
            CheckRefusedError: it is an image on a registry instead, which no builder starts from yet.
        """
        if isinstance(self.obtain, Mmdebstrap):
            return self.obtain
        image, digest = self.obtain.image, self.obtain.digest
        if digest is None:
            raise CheckRefusedError(
                f"the base {image} is an image on a registry, and its digest was not resolved",
                why="A tag is another image tomorrow; nothing is built on it.",
                fix=f"Ask the registry: skopeo inspect --format '{{{{.Digest}}}}' docker://{image}\n"
                f"(or: docker buildx imagetools inspect --format '{{{{.Manifest.Digest}}}}' {image}), and write what "
                'it says under [obtain] of the base: digest = "sha256:..."',
            )
        raise CheckRefusedError(
            f"the base {image}@{digest} is an image on a registry",
            why="Images are built on bases that mmdebstrap makes; those of registries can be locked, not yet built on.",
            fix='Choose a base with method = "mmdebstrap" (`envbuild list bases`).',
        )


class Target(Model):
    """A hardware generation (``envs/targets/*.toml``)."""

    summary: str
    device: Device
    sm: tuple[Annotated[str, StringConstraints(pattern=r"^\d{2,3}[af]?$")], ...] = Field(
        default=(), description="CUDA SM versions, such as '90' or '100a'"
    )
    driver: Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)*$")] | None = Field(
        default=None, description="the oldest NVIDIA driver of the fleet; without it drivers are not checked"
    )
    ptx: bool = Field(
        default=False, description="whether compiled wheels also have PTX for the newest SM, for GPUs yet to come"
    )
    platform: Literal["linux/amd64", "linux/arm64"]

    @model_validator(mode="after")
    def _sm_fits_device(self) -> Target:
        if (self.device is Device.CUDA) != bool(self.sm):
            raise ValueError("a cuda target needs its SM list, a cpu target has none")
        return self


class Cluster(Model):
    """Where jobs run (``envs/clusters/*.toml``)."""

    summary: str
    launcher: Literal["bwrap"]


# With a vocabulary of 1 every loss is 0, whatever is computed; this many leave something to compare.
LEAST_VOCABULARY = 32


class GptModel(Model):
    """A small GPT for certification, in megatron-core's words."""

    kind: Literal["gpt"]
    num_layers: Annotated[int, Field(gt=0, le=1024)]
    hidden_size: Annotated[int, Field(gt=0, le=65536)]
    num_attention_heads: Annotated[int, Field(gt=0, le=1024)]
    sequence_length: Annotated[int, Field(gt=0, le=131072, description="tokens a sample")]
    vocabulary_size: Annotated[int, Field(ge=LEAST_VOCABULARY, le=2**20)]


class Training(Model):
    """How every case of a matrix trains."""

    steps: Annotated[int, Field(gt=0, le=100_000)]
    micro_batch_size: Annotated[int, Field(gt=0, le=1024, description="samples")]
    global_batch_size: Annotated[int, Field(gt=0, le=65536, description="samples")]
    learning_rate: Annotated[float, Field(gt=0)]
    clip_grad_norm: Annotated[float, Field(gt=0)]
    seed: Annotated[int, Field(ge=0, lt=2**32)]


class Tolerance(Model):
    """How far a step's numbers may be from the baseline's, relative to the baseline's."""

    loss_relative: Annotated[float, Field(ge=0, le=0.01)]
    grad_norm_relative: Annotated[float, Field(ge=0, le=0.02)]


class Precision(str, Enum):
    """The number format a case trains in."""

    FP32 = "fp32"


class CaseSpec(Model):
    """One row of a matrix: the axes in which it differs from the baseline."""

    model: Name
    precision: Precision = Precision.FP32
    data: Annotated[int, Field(ge=1, le=1024)] = 1
    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    virtual_pipeline: Annotated[int, Field(ge=1, le=1024, description="model chunks a pipeline stage")] = 1
    overlap_p2p_comm: bool | None = Field(
        default=None, description="megatron-core's flag; without it the setting that is right for the layout"
    )


class Matrix(Model):
    """The certification cases of a stack (``envs/matrices/*.toml``)."""

    summary: str
    devices: tuple[Device, ...] = Field(min_length=1, description="the devices these cases can run on")
    time_limit_seconds: Annotated[int, Field(gt=0, le=604_800, description="for each case")]
    models: dict[Name, GptModel] = Field(min_length=1)
    training: Training
    tolerance: dict[Precision, Tolerance]
    cases: tuple[CaseSpec, ...] = Field(min_length=1)


class Conflict(Model):
    """Versions that resolve and install together and do not work together (``envs/conflicts/*.toml``).

    The file's name is the code under which `envbuild lock` refuses them.
    """

    summary: str = Field(description="what goes wrong")
    packages: dict[PackageName, Specifier] = Field(min_length=2, description="the versions, as specifiers")
    evidence: str = Field(min_length=1, description="how it is known")
    fix: str


class CompanionRelease(Model):
    """What belongs to some releases of a package."""

    versions: Specifier = Field(min_length=1, description="the releases, as a PEP 440 specifier")
    components: dict[PackageName, Specifier] = Field(min_length=1, description="what belongs to them, as specifiers")
    evidence: str = Field(min_length=1, description="how it is known")


class Companions(Model):
    """What belongs to the releases of a package, where its metadata does not say so (``envs/companions/*.toml``).

    The file's name is the package's.
    """

    summary: str
    releases: tuple[CompanionRelease, ...] = Field(min_length=1, description="the first that has a release counts")

    def of(self, version: str) -> CompanionRelease | None:
        """The entry for a release; None when there is none."""
        return next(
            (entry for entry in self.releases if SpecifierSet(entry.versions).contains(version, prereleases=True)), None
        )

    def names(self) -> set[str]:
        """The packages that any entry names."""
        return {name for entry in self.releases for name in entry.components}


class BuildVariable(Model):
    """A variable that is set while a wheel is built."""

    value: str = Field(
        min_length=1,
        description="{sm} becomes the target's SM list as '90;100a', {sm_dotted} the same as '9.0;10.0a'",
    )
    reason: str = Field(min_length=1, description="why the build needs it, with the evidence")


class WheelRecipe(Model):
    """How a package of the compile phase is built (``envs/wheels/*.toml``); the file's name is the package's."""

    summary: str
    gpu_code: bool = Field(default=True, description="whether it has CUDA sources: then its wheel must show them")
    variables: dict[VariableName, BuildVariable] = Field(default_factory=dict)
    headers: tuple[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]|\{cuda_major\})*$")], ...
    ] = Field(
        default=(),
        description="folders of site-packages that the compilers search; {cuda_major} as in a stack's extras",
    )
    build_requirements: tuple[PackageName, ...] = Field(
        default=(), description="what its build uses beyond what its pyproject.toml declares; phase main must have it"
    )
    foreign_symbols: tuple[Annotated[str, StringConstraints(pattern=r"^\w+$")], ...] = Field(
        default=(),
        description="how names of symbols begin that a library of another package of phase compile brings",
    )
    job_memory_gib: Annotated[float, Field(gt=0, le=64)] = Field(
        default=4, description="memory of one compiler process at its peak, in GiB"
    )
    time_limit_minutes: Annotated[int, Field(gt=0, le=10_080)] = Field(
        default=360, description="after which the build is ended"
    )


KINDS: dict[str, type[Model]] = {
    "stacks": Stack,
    "bases": Base,
    "targets": Target,
    "clusters": Cluster,
    "matrices": Matrix,
    "conflicts": Conflict,
    "companions": Companions,
    "wheels": WheelRecipe,
}
