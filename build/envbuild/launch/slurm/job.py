"""A job for Slurm: all that its batch script says, before it is a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from envbuild.catalog.cluster import Cluster, Mount, Slurm
from envbuild.core.errors import InternalError

# Where a job's files are in its container; the folder of the run on shared storage is the same on every node.
RUN_FOLDER, IMAGE_FILE = "/envbuild/run", "/envbuild/image.sqsh"
# Names in the folder of a run.
PLAN, RUNNER, RESULTS, TOKEN, LOG = "plan.json", "smoke.pyz", "results", "token", "slurm-%j.log"
# A line for each time that it was queued again for lack of time.
REQUEUED = "requeued.txt"
# The runner's exit status when its time is over (smoke/envbuild_smoke/cli.py).
OUT_OF_TIME = 7
# Slurm ends a job at its limit; so long before that no case starts that would not end.
MARGIN_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """The smoke runner with a plan on some nodes of a cluster.

    Attributes:
        name: what ``squeue`` shows.
        folder: the run's folder on the cluster's shared storage, with the plan and the runner.
        image: the .sqsh where it lies on shared storage, or what enroot's importer takes.
        python: the image's interpreter.
        arguments: more words for the runner.
        variables: more variables of the job.
        requeues: how often it is queued again when its time limit comes before the last case.
    """

    name: str
    cluster: Cluster
    nodes: int
    folder: str
    image: str
    python: str
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    requeues: int = 0

    @property
    def slurm(self) -> Slurm:
        """What Slurm is asked for."""
        if self.cluster.slurm is None:
            raise InternalError("a job for Slurm on a cluster without it")
        return self.cluster.slurm

    @property
    def environment(self) -> dict[str, str]:
        """Every variable of the job, in the order of their names: also what its container is told to take from it."""
        transport = self.cluster.transport
        own = {} if transport is None else {name: ",".join(words) for name, words in transport.variables.items()}
        return dict(sorted({**own, **self.variables}.items()))

    @property
    def image_on_node(self) -> str:
        """The .sqsh as a node sees it."""
        delivery = self.cluster.image
        if delivery is not None and delivery.node_folder is not None:
            return f"{delivery.node_folder}/{self.image.rpartition('/')[2]}"
        return self.image

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What the container sees of the node: the run's folder, the image's own file, the site's."""
        transport = self.cluster.transport
        return (
            Mount(source=self.folder, target=RUN_FOLDER, read_only=False),
            *([] if self.cluster.image and self.cluster.image.by == "importer" else [self._image_file]),
            *(mount for _, mount in sorted(self.cluster.mounts.items())),
            *(() if transport is None else transport.mounts),
        )

    @property
    def _image_file(self) -> Mount:
        # The runner hashes it: what a step is started from is what it says it is.
        return Mount(source=self.image_on_node, target=IMAGE_FILE)

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
            *(["--exclusive"] if slurm.exclusive else []),
            *(f"--{name}={value}" for name in named if (value := getattr(slurm, name)) is not None),
        )

    @property
    def runner_words(self) -> tuple[str, ...]:
        """The runner's command line in the container, without what differs from node to node."""
        hashed = () if self.cluster.image and self.cluster.image.by == "importer" else ("--image", IMAGE_FILE)
        return (
            self.python,
            f"{RUN_FOLDER}/{RUNNER}",
            "run",
            "--plan",
            f"{RUN_FOLDER}/{PLAN}",
            "--out",
            f"{RUN_FOLDER}/{RESULTS}",
            *hashed,
            "--resume",
            "--token-file",
            f"{RUN_FOLDER}/{TOKEN}",
            "--nodes",
            str(self.nodes),
            *self.arguments,
        )
