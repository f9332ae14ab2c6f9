"""The nouns of the tool as frozen types: stack, base, target, cluster, matrix.

Each class is one kind of TOML file under ``envs/``; the file's name is the thing's name. Fields carry their units
in their names. Unknown keys are refused.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
PackageName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
Module = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"{text!r} is no version specifier (such as '==2.13.0' or '>=1,<2')") from error
    return text


Specifier = Annotated[str, AfterValidator(_specifier)]


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


class Component(Model):
    """A part of a stack that people name: its version, its phase and the modules it must import."""

    version: Specifier = Field(description="which versions may be taken, as a PEP 440 specifier")
    extras: tuple[PackageName, ...] = Field(default=(), description="extras of the package that the stack needs")
    phase: Phase = Phase.MAIN
    modules: tuple[Module, ...] = Field(default=(), description="modules that must import in the finished environment")


class Requirement(Model):
    """A package that components need without declaring it, or whose versions must be held back."""

    version: Specifier = ""
    reason: str = Field(min_length=1, description="why the stack names it, with the evidence")


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
    components: dict[PackageName, Component] = Field(min_length=1)
    requirements: dict[PackageName, Requirement] = Field(default_factory=dict)

    def builds_for(self, target: str) -> Builds | None:
        """The entry for ``target``, or None when the stack is not for it."""
        return next((entry for entry in self.builds if entry.target == target), None)


class PythonSource(str, Enum):
    """Where an environment's Python comes from; ``base``: the distribution's own."""

    BASE = "base"


class BasePython(Model):
    """The Python of a base."""

    version: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")] = Field(description="major.minor")
    source: PythonSource
    executable: Annotated[str, StringConstraints(pattern=r"^/")]


class BaseTorch(Model):
    """Which build of torch a base takes: the part after the plus sign of its version."""

    build: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+$")] = Field(description="'cpu', 'cu130', ...")


class Mmdebstrap(Model):
    """A root file system made by mmdebstrap from the machine's own apt sources."""

    method: Literal["mmdebstrap"]
    suite: Name
    components: tuple[Name, ...] = Field(min_length=1)
    packages: tuple[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+.-]+$")], ...]


class Base(Model):
    """The userland a stack is put on (``envs/bases/*.toml``)."""

    summary: str
    distribution: Literal["debian", "ubuntu"]
    release: str = Field(description="VERSION_ID of /etc/os-release")
    platform: Literal["linux/amd64"]
    glibc: Annotated[str, StringConstraints(pattern=r"^2\.\d+$")]
    python: BasePython
    torch: BaseTorch
    obtain: Mmdebstrap


class Target(Model):
    """A hardware generation (``envs/targets/*.toml``)."""

    summary: str
    device: Device
    sm: tuple[Annotated[str, StringConstraints(pattern=r"^\d{2,3}[af]?$")], ...] = Field(
        default=(), description="CUDA SM versions, such as '90' or '100a'"
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


class GptModel(Model):
    """A small GPT for certification, in megatron-core's words."""

    kind: Literal["gpt"]
    num_layers: Annotated[int, Field(gt=0)]
    hidden_size: Annotated[int, Field(gt=0)]
    num_attention_heads: Annotated[int, Field(gt=0)]
    sequence_length: Annotated[int, Field(gt=0, description="tokens a sample")]
    vocabulary_size: Annotated[int, Field(gt=0)]


class Training(Model):
    """How every case of a matrix trains."""

    steps: Annotated[int, Field(gt=0)]
    micro_batch_size: Annotated[int, Field(gt=0, description="samples")]
    global_batch_size: Annotated[int, Field(gt=0, description="samples")]
    learning_rate: Annotated[float, Field(gt=0)]
    clip_grad_norm: Annotated[float, Field(gt=0)]
    seed: Annotated[int, Field(ge=0)]


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
    data: Annotated[int, Field(ge=1)] = 1
    tensor: Annotated[int, Field(ge=1)] = 1
    pipeline: Annotated[int, Field(ge=1)] = 1
    virtual_pipeline: Annotated[int, Field(ge=1, description="model chunks a pipeline stage")] = 1
    overlap_p2p_comm: bool | None = Field(
        default=None, description="megatron-core's flag; without it the setting that is right for the layout"
    )


class Matrix(Model):
    """The certification cases of a stack (``envs/matrices/*.toml``)."""

    summary: str
    devices: tuple[Device, ...] = Field(min_length=1, description="the devices these cases can run on")
    time_limit_seconds: Annotated[int, Field(gt=0, description="for each case")]
    models: dict[Name, GptModel] = Field(min_length=1)
    training: Training
    tolerance: dict[Precision, Tolerance]
    cases: tuple[CaseSpec, ...] = Field(min_length=1)


KINDS: dict[str, type[Model]] = {
    "stacks": Stack,
    "bases": Base,
    "targets": Target,
    "clusters": Cluster,
    "matrices": Matrix,
}
