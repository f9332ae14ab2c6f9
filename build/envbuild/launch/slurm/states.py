"""What Slurm says of a job, as a sentence; a job's state decides nothing, the judged results do."""

from __future__ import annotations

from dataclasses import dataclass

# squeue(1), "JOB STATE CODES" and "JOB REASON CODES".
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"})
RUNNING = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"})
_ENDS = {
    "COMPLETED": "it ended",
    "FAILED": "it ended with a failure",
    "CANCELLED": "it was cancelled",
    "TIMEOUT": "it reached its time limit",
    "PREEMPTED": "it was preempted, and Slurm did not put it back",
    "NODE_FAIL": "one of its nodes failed",
    "BOOT_FAIL": "one of its nodes did not boot",
    "OUT_OF_MEMORY": "a node's memory ran out",
    "DEADLINE": "its deadline passed",
}
_REASONS = {
    "Resources": "waiting for resources",
    "Priority": "waiting for jobs of a higher priority",
    "Dependency": "waiting for another job",
    "BeginTime": "waiting for the time when it may start again",
    "JobHeldUser": "held by its user (`scontrol release {job}`)",
    "JobHeldAdmin": "held by an administrator of the cluster",
    # Slurm puts a job back so, and does nothing more about it.
    "launch failed requeued held": "held, as a node could not start it: see to the node, then `scontrol release {job}`",
    "ReqNodeNotAvail": "waiting for nodes that are down or reserved",
    "Reservation": "waiting for its reservation to begin",
    "PartitionConfig": "waiting for what its partition does not give as it is now",
    "PartitionDown": "waiting for its partition, which is down",
}
# Time does not cure these.
_IMPOSSIBLE = {
    "PartitionTimeLimit": "asks for more time than its partition gives",
    "PartitionNodeLimit": "asks for more nodes than its partition has",
    "BadConstraints": "asks for what no node has",
    "DependencyNeverSatisfied": "waits for a job that failed",
}


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A job as Slurm has it.

    Attributes:
        state: Slurm's word.
        reason: Slurm's word for why it waits, or ended.
        start: when it started or is expected to; "" when Slurm does not say.
        nodes: those that it has, as Slurm writes a list.
    """

    job: str
    state: str
    reason: str = ""
    start: str = ""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing of it will run any more."""
        return self.state not in WAITING | RUNNING

    @property
    def impossible(self) -> str:
        """Why it will never start as it is; "" if it may."""
        return _IMPOSSIBLE.get(self.reason.partition(",")[0], "") if self.state == "PENDING" else ""

    @property
    def sentence(self) -> str:
        """What people are told."""
        # Its nodes leave the list one by one.
        if self.state == "COMPLETING":
            return "ending"
        if self.state in RUNNING:
            return f"running on {self.nodes}"
        if not self.ended:
            # Slurm adds to a reason: "ReqNodeNotAvail, UnavailableNodes:n1"; limits of accounts have many names.
            word = self.reason.partition(",")[0]
            limit = "waiting for the limit of its account or QOS" if word.startswith(("Assoc", "QOS")) else ""
            known = self.impossible or _REASONS.get(word, "").format(job=self.job)
            why = known or limit or (f"waiting ({self.reason})" if self.reason else "waiting")
            return f"{why}, start expected {self.start}" if self.start and self.state == "PENDING" else why
        return _ENDS.get(self.state, f"it ended ({self.state})")
