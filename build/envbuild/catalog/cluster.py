"""A cluster: where jobs run, what its launcher is asked for, and what its network has to be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from envbuild.catalog.fields import Name, TomlModel, VariableName, complete_or_extending

# In a path: the job's number.
JOB_ID = "{job_id}"
# What sbatch takes in one word of a directive: no white space, no quotes, nothing that ends a line.
SlurmWord = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,:;&|*!=@%+\[\]()/-]+$")]
# Absolute, and without what separates mounts (a comma, a colon) or lines.
NodePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f,:]*$")]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]+$")]
# How NCCL's log names what it communicates by (`NCCL_DEBUG=INFO`).
Network = Literal["NET/IB", "NET/gIB", "NET/FasTrak", "NET/GPUDirectTCPX", "NET/OFI", "NET/Socket"]
Collective = Literal["all_reduce", "all_gather", "all_to_all"]
Gigabytes = Annotated[float, Field(gt=0)]


class Mount(TomlModel):
    """A folder or file of a node that is seen in the job."""

    source: NodePath
    target: NodePath | None = Field(default=None, description="default: as on the node")
    read_only: bool = True


class Directive(TomlModel):
    """A line for sbatch that envbuild knows nothing about."""

    line: Text = Field(description="what follows #SBATCH")
    reason: Text


class Slurm(TomlModel):
    """What Slurm is asked for; what is left out is Slurm's own default."""

    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    reservation: SlurmWord | None = None
    constraint: SlurmWord | None = None
    nodelist: SlurmWord | None = None
    exclude: SlurmWord | None = None
    time_limit_minutes: int = Field(gt=0, le=60 * 24 * 30)
    gpus_per_node: int = Field(ge=0, le=64)
    gpus_by: Literal["gpus-per-node", "gres", "nothing"] = Field(
        default="gpus-per-node", description="how GPUs are asked for; nothing: nodes are given whole"
    )
    exclusive: bool = True
    runtime: Literal["pyxis", "bwrap"] = Field(
        default="pyxis", description="what opens the image on a node; bwrap: envbuild, which is installed there"
    )
    python: NodePath | None = Field(default=None, description="for bwrap: a Python of the nodes that has envbuild")
    directives: tuple[Directive, ...] = ()

    @model_validator(mode="after")
    def _bwrap_needs_envbuild(self) -> Slurm:
        if (self.runtime == "bwrap") != (self.python is not None):
            raise ValueError(
                "runtime bwrap needs python, a Python of the nodes that has envbuild, and pyxis needs none"
            )
        return self


class ImageDelivery(TomlModel):
    """How a node gets the image."""

    by: Literal["path", "importer", "sbcast"] = Field(
        default="path",
        description="path: opened where it lies, on shared storage; importer: pulled by enroot's importer; sbcast: "
        "copied to each node's own disk first",
    )
    folder: NodePath | None = Field(
        default=None, description="where images lie on shared storage; default: images/ in the cluster's folder"
    )
    node_folder: NodePath | None = Field(default=None, description="where sbcast puts them on a node")

    @model_validator(mode="after")
    def _folders_fit(self) -> ImageDelivery:
        if (self.by == "sbcast") != (self.node_folder is not None):
            raise ValueError("node_folder is for sbcast, which needs it")
        return self


class Transport(TomlModel):
    """What GPUs of several nodes communicate by, and what that needs in the job."""

    network: Network
    variables: dict[VariableName, tuple[Text, ...]] = Field(
        default_factory=dict, description="each a list of words, which are joined by commas"
    )
    mounts: tuple[Mount, ...] = ()
    script: NodePath | None = Field(default=None, description="sourced in the job before anything starts")


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
    login: Text | None = Field(
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
