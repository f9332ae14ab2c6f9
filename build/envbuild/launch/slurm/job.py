"""A job for Slurm: all that its batch script says, before it is a text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from envbuild.catalog.cluster import JOB_ID, NODE_PATH, SLURM_WORD, Cluster, Mount, Slurm, Transport
from envbuild.core.errors import ConfigurationError, InternalError
from envbuild.image.layers.sandbox import VENV
from envbuild_smoke.plan.models import Plan

# Where a job's files are in its container; the folder of the run on shared storage is the same on every node.
RUN_FOLDER, IMAGE_FILE = "/envbuild/run", "/envbuild/image.sqsh"
# Names in the folder of a run.
PLAN, RUNNER, RESULTS, LOG = "plan.json", "smoke.pyz", "results", "slurm-%j.log"
# Of the files in which each start of a run has its token.
TOKENS = "token-"
# Where a container engine opens the image by such a file.
EDF = "environment.toml"
# In place of a .sqsh, where the job has the image from a registry.
MANIFEST = "manifest.json"
_IMAGE = rf"{NODE_PATH}|[A-Za-z0-9.:#_/-]+@sha256:[0-9a-f]{{64}}"
# A line for each time that it was queued again for lack of time.
REQUEUED = "requeued.txt"
# The runner's exit statuses when nothing can run there, and when its time is over (smoke/envbuild_smoke/cli.py).
UNUSABLE, OUT_OF_TIME = 3, 7
# Slurm ends a job at its limit; so long before that no case starts that would not end.
MARGIN_SECONDS = 120


def slurm_of(cluster: Cluster) -> Slurm:
    """What Slurm is asked for on a cluster that has it."""
    if cluster.slurm is None:
        raise InternalError("a job for Slurm on a cluster without it")
    return cluster.slurm


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """The smoke runner with a plan on some nodes of a cluster.

    Attributes:
        name: what ``squeue`` shows.
        folder: the run's folder on the cluster's shared storage, with the plan and the runner.
        image: the .sqsh where it lies on shared storage, or what the importer takes, HOST#NAME@DIGEST.
        python: the image's interpreter.
        arguments: more words for the runner.
        requeues: how often it is queued again when its time limit comes before the last case.
    """

    name: str
    cluster: Cluster
    nodes: int
    folder: str
    image: str
    python: str
    arguments: tuple[str, ...] = ()
    requeues: int = 0

    def __post_init__(self) -> None:
        # Words of a cluster's file were checked when it was read.
        allowed = {"name": (self.name, SLURM_WORD), "folder": (self.folder, NODE_PATH), "image": (self.image, _IMAGE)}
        for what, (word, pattern) in allowed.items():
            if not re.fullmatch(pattern, word):
                raise ConfigurationError(
                    f"{word!r} cannot be the {what} of a job",
                    why="It goes into a shell script, and has other characters than letters, digits and ._+@=~/-, or "
                    "is not absolute.",
                    fix="Choose another name or folder.",
                )

    @property
    def slurm(self) -> Slurm:
        """What Slurm is asked for."""
        return slurm_of(self.cluster)

    @property
    def transport(self) -> Transport | None:
        """What its GPUs communicate by from node to node; None on one node, where some sites' prologs install none."""
        return self.cluster.transport if self.nodes > 1 else None

    @property
    def environment(self) -> dict[str, str]:
        """Every variable of the job, in the order of their names: also what its container is told to take from it."""
        own = {} if self.transport is None else self.transport.variables
        return {name: ",".join(words) for name, words in sorted(own.items())}

    @property
    def is_pulled(self) -> bool:
        """Whether its image comes from a registry."""
        return not self.image.startswith("/")

    @property
    def image_on_node(self) -> str:
        """The image as a node sees it."""
        folder = self.cluster.image.node_folder
        # Of this job alone: it is removed at its end.
        return self.image if folder is None else f"{folder}/envbuild-{JOB_ID}.sqsh"

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What the container sees of the node: the run's folder, the image's own file, the site's."""
        return (
            Mount(source=self.folder, target=RUN_FOLDER, read_only=False),
            # The runner hashes it: what a step is started from is what it says it is.
            *([] if self.is_pulled else [Mount(source=self.image_on_node, target=IMAGE_FILE)]),
            *(mount for _, mount in sorted(self.cluster.mounts.items())),
            *(() if self.transport is None else self.transport.mounts),
        )

    @property
    def directives(self) -> tuple[str, ...]:
        """What follows ``#SBATCH``, a line each."""
        slurm = self.slurm
        gpus = {
            "gpus-per-node": f"--gpus-per-node={slurm.gpus_per_node}",
            "gres": f"--gres=gpu:{slurm.gpus_per_node}",
            "nothing": "",
        }[slurm.gpus_by if slurm.gpus_per_node else "nothing"]
        named = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude")
        return (
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            f"--time={slurm.time_limit_minutes}",
            f"--output={self.folder}/{LOG}",
            # A job that was put back writes on.
            "--open-mode=append",
            "--requeue",
            *([gpus] if gpus else []),
            # All of the memory is no part of --exclusive.
            *(["--exclusive", "--mem=0"] if slurm.exclusive else []),
            *(f"--{name}={value}" for name in named if (value := getattr(slurm, name)) is not None),
        )

    @property
    def runner_words(self) -> tuple[str, ...]:
        """The runner's command line in the container, without what differs from node to node."""
        return (
            self.python,
            f"{RUN_FOLDER}/{RUNNER}",
            "run",
            "--plan",
            f"{RUN_FOLDER}/{PLAN}",
            "--out",
            f"{RUN_FOLDER}/{RESULTS}",
            "--image",
            f"{RUN_FOLDER}/{MANIFEST}" if self.is_pulled else IMAGE_FILE,
            "--resume",
            "--nodes",
            str(self.nodes),
            *self.arguments,
        )


@dataclass(frozen=True, kw_only=True)
class NamedCluster:
    """A cluster with a scheduler, and its name for errors.

    Raises:
        ConfigurationError: it has none.
    """

    name: str
    cluster: Cluster

    def __post_init__(self) -> None:
        if self.cluster.slurm is None:
            raise ConfigurationError(
                f"cluster {self.name} has no scheduler",
                why=f'envs/clusters/{self.name}.toml has launcher "{self.cluster.launcher}".',
                fix="Name one with launcher slurm (`envbuild list clusters`).",
            )

    @property
    def folder(self) -> str:
        """Its folder on shared storage.

        Raises:
            ConfigurationError: its file has none; no shipped file has.
        """
        if self.cluster.folder is None:
            raise ConfigurationError(
                f"cluster {self.name} has no folder",
                why="Plans, images and results go to a folder that all nodes and the login host see, and no shipped "
                "file can know yours.",
                fix=f'Write envs/clusters/{self.name}.toml with two lines: extends = "{self.name}" and '
                'folder = "/a/folder/on/shared/storage".',
            )
        return self.cluster.folder

    @property
    def images(self) -> str:
        """The folder for images on shared storage.

        Raises:
            ConfigurationError: its file names none.
        """
        return self.cluster.image.folder or f"{self.folder}/images"

    def image_of(self, plan: Plan) -> str:
        """The image of a plan there, named by its digest.

        Raises:
            ConfigurationError: the plan is about another form of the image than the cluster gets, or about none.
        """
        form, by = plan.subject.get("form"), self.cluster.image.by
        wanted = "oci" if by == "importer" else "sqsh"
        digest = plan.subject.get(f"{wanted}_digest")
        if form != wanted or digest is None:
            why = "It leaves no .sqsh to hash: a step can prove the OCI image alone."
            raise ConfigurationError(
                f"the plan is about form {form}, and nodes of cluster {self.name} get {wanted}",
                why=f"envs/clusters/{self.name}.toml: image.by is {by}. {why if by == 'importer' else ''}".strip(),
                fix=f"Write the plan with --in {wanted}" + (", or set another image.by." if by == "importer" else "."),
            )
        if by == "importer":
            return f"{self.cluster.image.repository}@{digest}"
        return f"{self.images}/{digest.removeprefix('sha256:')}.sqsh"

    def job(self, plan: Plan, folder: str, nodes: int | None = None) -> SlurmJob:
        """The job of a plan.

        Args:
            folder: of the run, on shared storage.
            nodes: how many somebody wants it to have; None: as the plan.

        Raises:
            ConfigurationError: the cluster cannot run it, or its file lacks something.
        """
        self._check(plan, plan.nodes if nodes is None else nodes)
        return SlurmJob(
            name=f"envbuild-{plan.nonce[:12]}",
            cluster=self.cluster,
            nodes=plan.nodes,
            folder=folder,
            image=self.image_of(plan),
            python=f"{VENV}/bin/python",
        )

    def _check(self, plan: Plan, nodes: int) -> None:
        target, targets, slurm = plan.subject.get("target"), self.cluster.targets, slurm_of(self.cluster)
        if targets and target not in targets:
            raise ConfigurationError(
                f"the plan is for target {target}, and cluster {self.name} has {' and '.join(targets)}",
                why=f"envs/clusters/{self.name}.toml names its targets.",
                fix="Name another cluster, or write a plan for one of these.",
            )
        if nodes != plan.nodes:
            raise ConfigurationError(
                f"the plan was written with --nodes {plan.nodes}, and not {nodes}",
                why="Every node of a run trains its cases, and the judge compares them: the plan has their number.",
                fix=f"Leave --nodes out, or write a plan with `envbuild certify --on {self.name} --nodes {nodes} "
                "--plan-out DIR`.",
            )
        gpus = max(case.slots_on_node for case in plan.cases)
        if plan.device == "cuda" and gpus > slurm.gpus_per_node:
            raise ConfigurationError(
                f"the plan needs {gpus} GPUs a node, and cluster {self.name} has {slurm.gpus_per_node}",
                why=f"envs/clusters/{self.name}.toml: gpus_per_node = {slurm.gpus_per_node}.",
                fix=f"Correct it, or write a plan with --max-gpus {slurm.gpus_per_node}.",
            )
