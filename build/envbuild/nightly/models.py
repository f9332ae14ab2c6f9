"""The request of a night, and the outcomes of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from envbuild.catalog.catalog import Selection
from envbuild.certify.certificate.sign import Signer
from envbuild.image.output import OUT_DIR, PlacedImage
from envbuild.ledger.models import Row, StepName, StepState
from envbuild.lock.lockfile import LockDirectory
from envbuild.store.remote import Remote


@dataclass(frozen=True, kw_only=True)
class NightCluster:
    """The cluster whose nodes certify a target, by its name in envs/clusters/, and how many of them."""

    name: str
    nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class NightRequest:
    """The request of a night.

    Attributes:
        selections: one for each target, on the base that its lock is to be on.
        base_named: the user named the base, so that no other one is taken.
        project: the folder with lockfiles/.
        lock_name: of a lock that is not the stack's own.
        run_with: by target, the command that runs a plan; under an empty name that of all targets with GPUs.
        on: by target, the cluster that certifies it; under an empty name that of all targets with GPUs.
        retry: run again what failed before, though nothing changed.
        remotes: the remote stores of wheels.
    """

    selections: tuple[Selection, ...]
    base_named: bool = False
    project: Path = field(default_factory=Path.cwd)
    out_dir: Path = OUT_DIR
    lock_name: str | None = None
    signer: Signer | None = None
    run_with: Mapping[str, str] = field(default_factory=dict)
    on: Mapping[str, NightCluster] = field(default_factory=dict)
    retry: bool = False
    remotes: tuple[Remote, ...] = ()

    @property
    def stack(self) -> str:
        return self.selections[0].stack_name

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(selection.target_name for selection in self.selections)

    @property
    def name(self) -> str:
        """The lock's own name, else the stack's."""
        return self.lock_name or self.stack


@dataclass(frozen=True, kw_only=True)
class Job:
    """The state of one target in a night, extended by each step."""

    selection: Selection
    lock: LockDirectory
    image: PlacedImage | None = None
    certificate: Path | None = None

    @property
    def target(self) -> str:
        return self.selection.target_name


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a step that did not fail.

    Attributes:
        job: what the next step has.
        rows: for the ledger.
        plan: the folder of a plan that waits for hardware.
    """

    job: Job
    state: StepState
    digest: str = ""
    bytes_sent: int = 0
    note: str = ""
    plan: str = ""
    rows: tuple[Row, ...] = ()


# Of a job and the number of the attempt: the second one starts all processes anew.
Step: TypeAlias = Callable[[Job, int], Outcome]


@dataclass(frozen=True, kw_only=True)
class NamedStep:
    """A step of the chain of a target.

    Attributes:
        inputs: the digest of all that decides whether it fails; empty: it is tried every night.
    """

    name: StepName
    run: Step
    inputs: Callable[[Job], str] = lambda _job: ""
