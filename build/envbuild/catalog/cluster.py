"""A cluster: where jobs run, what its launcher is asked for, and what its network has to be."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from envbuild.catalog.fields import Name, TomlModel, VariableName, complete_or_extending, part_of_extending

# In a path or a variable's word: the job's number.
JOB_ID = "{job_id}"
# What sbatch takes in one word of a directive: no white space, no quotes, nothing that ends a line.
SLURM_WORD = r"^[A-Za-z0-9_.,:;&|*!=@%+\[\]()/-]+$"
# Absolute. No more characters: pyxis writes the paths of mounts into a script that enroot's shell runs
# (enroot_create_start_config in pyxis_slurmstepd.c), so that $(...) in one would be a command; a comma and a colon
# separate mounts, and % is a pattern in the names of Slurm's logs.
NODE_PATH = r"^/[\w.+@=~/-]*$"
SlurmWord = Annotated[str, StringConstraints(pattern=SLURM_WORD)]
NodePath = Annotated[str, StringConstraints(pattern=NODE_PATH)]
JobPath = Annotated[str, StringConstraints(pattern=r"^/([\w.+@=~/-]|\{job_id\})*$")]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]
# enroot takes quotes off that stand around a value (common::envfmt in its src/common.sh).
Word = Annotated[str, StringConstraints(pattern=r"""^[^\x00-\x1f\x7f"'][^\x00-\x1f\x7f]*$""")]
# As enroot writes it, HOST#NAME: with a slash in place of the # it would be a path or of another registry.
Repository = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+(:\d+)?#[a-z0-9]+([._/-]+[a-z0-9]+)*$")]
# A host of ~/.ssh/config, also USER@HOST: no option of ssh's.
Login = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@:%-]*$")]
# How NCCL's log names what it communicates by (`NCCL_DEBUG=INFO`).
Network = Literal["NET/IB", "NET/gIB", "NET/FasTrak", "NET/GPUDirectTCPX", "NET/OFI", "NET/Socket"]
Collective = Literal["all_reduce", "all_gather", "all_to_all"]
Gigabytes = Annotated[float, Field(gt=0)]


class Mount(TomlModel):
    """A folder or file of a node that is seen in the job; ``{job_id}`` in a path is the job's number."""

    source: JobPath
    target: JobPath | None = Field(default=None, description="default: as on the node")
    read_only: bool = True


class Directive(TomlModel):
    """A line for sbatch that envbuild knows nothing about."""

    line: Annotated[str, StringConstraints(pattern=r"^-[^\x00-\x1f\x7f]*$")] = Field(description="what follows #SBATCH")
    reason: Text

    @model_validator(mode="after")
    def _is_a_line_of_one_job(self) -> Directive:
        try:
            words = shlex.split(self.line, comments=True)
        except ValueError as error:
            raise ValueError(f"line {self.line!r} has quotes that do not end: {error}") from error
        if any(word.partition("=")[0] in ("-a", "--array", "-W", "--wait") for word in words):
            raise ValueError("a job here is one job, whose end is waited for: no --array and no --wait")
        return self


class Slurm(TomlModel):
    """What Slurm is asked for; what is left out is Slurm's own default."""

    model_config = ConfigDict(json_schema_extra=part_of_extending)

    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    reservation: SlurmWord | None = None
    constraint: SlurmWord | None = None
    nodelist: SlurmWord | None = None
    exclude: SlurmWord | None = None
    time_limit_minutes: int = Field(
        ge=5, le=60 * 24 * 30, description="no case starts that would not end 2 minutes before"
    )
    gpus_per_node: int = Field(ge=0, le=64)
    gpus_by: Literal["gpus-per-node", "gres", "nothing"] = Field(
        default="gpus-per-node", description="how GPUs are asked for; nothing: nodes are given whole"
    )
    exclusive: bool = Field(default=True, description="nobody else's jobs on its nodes, and all of their memory")
    runtime: Literal["pyxis", "bwrap", "edf"] = Field(
        default="pyxis",
        description="what opens the image on a node; bwrap: envbuild, which is installed there; edf: a container "
        "engine with environment definition files (srun --environment)",
    )
    python: NodePath | None = Field(default=None, description="for bwrap: a Python of the nodes that has envbuild")
    query_seconds: int = Field(
        default=30, gt=0, le=600, description="between two queries for the job's state, one for all jobs"
    )
    directives: tuple[Directive, ...] = ()

    @model_validator(mode="after")
    def _bwrap_needs_envbuild(self) -> Slurm:
        if (self.runtime == "bwrap") != (self.python is not None):
            raise ValueError(
                "runtime bwrap needs python, a Python of the nodes that has envbuild; the others need none"
            )
        return self


class ImageDelivery(TomlModel):
    """How a node gets the image."""

    by: Literal["path", "importer", "sbcast"] = Field(
        default="path",
        description="path: opened where it lies, on shared storage; importer: pulled by envbuild's importer of pyxis; "
        "sbcast: copied to each node's own disk first",
    )
    folder: NodePath | None = Field(
        default=None, description="where images lie on shared storage; default: images/ in the cluster's folder"
    )
    node_folder: NodePath | None = Field(
        default=None, description="for sbcast: a folder of each node's own disk or memory, such as /tmp or /dev/shm"
    )
    repository: Repository | None = Field(default=None, description="for importer: HOST#NAME, as enroot writes it")

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> ImageDelivery:
        if (self.by == "sbcast") != (self.node_folder is not None):
            raise ValueError("node_folder is for sbcast, which needs it")
        if (self.by == "importer") != (self.repository is not None):
            raise ValueError("repository is for importer, which needs it")
        return self


class Transport(TomlModel):
    """What GPUs of several nodes communicate by, and what that needs in a job of more than one node."""

    model_config = ConfigDict(json_schema_extra=part_of_extending)

    network: Network
    variables: dict[VariableName, Annotated[tuple[Word, ...], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="each a list of words, which are joined by commas; {job_id} in one is the job's number",
    )
    mounts: tuple[Mount, ...] = ()
    script: NodePath | None = Field(
        default=None, description="sourced by bash inside the image, before the variables are set"
    )
    libraries: tuple[NodePath, ...] = Field(
        default=(), description="folders that go before the image's LD_LIBRARY_PATH"
    )
    annotations: dict[Text, Text] = Field(default_factory=dict, description="of an environment definition file")

    @model_validator(mode="after")
    def _leaves_the_batch_script_alone(self) -> Transport:
        if "PATH" in self.variables:
            raise ValueError("variables: PATH would be the batch script's too, which needs Slurm's commands")
        return self


class Floors(TomlModel):
    """The least bus bandwidth of a target's GPUs by collective, in GB/s, for the best of a matrix's sizes."""

    node: dict[Collective, Gigabytes] = Field(default_factory=dict, description="between the GPUs of a node")
    network: dict[Collective, Gigabytes] = Field(default_factory=dict, description="between nodes")


class Cluster(TomlModel):
    """Where jobs run (``envs/clusters/*.toml``)."""

    model_config = ConfigDict(json_schema_extra=complete_or_extending)

    summary: str
    extends: Name | None = Field(
        default=None, description="another cluster, which this file changes: tables merge key by key, a list replaces"
    )
    launcher: Literal["here", "slurm"] = "here"
    source: str | None = Field(default=None, description="where its settings are from")
    evidence: str | None = Field(default=None, description="what was run on such a cluster; without it: nothing")
    targets: tuple[Name, ...] = Field(default=(), description="of its nodes; without it: any")
    login: Login | None = Field(
        default=None, description="a host of the user's ssh configuration, where jobs are submitted; default: here"
    )
    folder: NodePath | None = Field(default=None, description="on storage that all nodes and the login host share")
    slurm: Slurm | None = None
    image: ImageDelivery = ImageDelivery()
    mounts: dict[Literal["data", "cache", "checkpoints"], Mount] = Field(default_factory=dict)
    transport: Transport | None = None
    floors: dict[Name, Floors] = Field(default_factory=dict, description="by target")
    sqsh_compression: tuple[Literal["zstd", "lz4", "lzo", "gzip"], ...] = Field(
        default=(),
        min_length=1,
        description="what the nodes' squashfs tools can read, the best first; anything when left out",
    )

    @model_validator(mode="after")
    def _slurm_is_described(self) -> Cluster:
        if (self.launcher == "slurm") != (self.slurm is not None):
            raise ValueError("launcher slurm needs [slurm], which has no effect with another one")
        return self

    @property
    def never_run(self) -> bool:
        """Whether nothing is known to have run there; what runs here is known to anybody."""
        return self.launcher != "here" and self.evidence is None
