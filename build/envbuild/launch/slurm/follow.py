"""Follows a job of Slurm to its end, and tells what changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from envbuild.core.errors import CertificationCannotRunError, MachineError
from envbuild.launch.slurm.commands import SlurmCommands
from envbuild.launch.slurm.states import JobState

# A controller that is restarted is away for minutes; the job goes on meanwhile.
MOST_SILENT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Following:
    """How a job is followed.

    Attributes:
        query_seconds: between two queries.
        tell: called with each sentence that is new.
        look: called after each query.
    """

    commands: SlurmCommands
    query_seconds: float
    tell: Callable[[str], None]
    look: Callable[[], None]
    sleep: Callable[[float], None] = time.sleep

    def to_the_end(self, job: str) -> JobState | None:
        """Wait until a job has ended; None where Slurm has forgotten it: its results tell.

        Raises:
            CertificationCannotRunError: it will never start; it is cancelled.
            MachineError: Slurm has not answered for ten minutes.
        """
        told, silent = "", 0.0
        while True:
            try:
                states = self.commands.states([job])
            except MachineError as error:
                silent += self.query_seconds
                if silent > MOST_SILENT_SECONDS:
                    raise
                sentence = f"Slurm does not answer, and the job goes on meanwhile: {error.why}"
            else:
                silent = 0.0
                if job not in states:
                    return None
                sentence = f"job {job}: {states[job].sentence}"
            if sentence != told:
                self.tell(sentence)
                told = sentence
            self.look()
            if not silent and states[job].ended:
                return states[job]
            if not silent and states[job].impossible:
                self._give_up(states[job])
            self.sleep(self.query_seconds)

    def _give_up(self, state: JobState) -> None:
        self.commands.cancel(state.job)
        raise CertificationCannotRunError(
            f"job {state.job} would never start, and was cancelled",
            why=f"It {state.impossible} ({state.reason}).",
            fix="Correct [slurm] of the cluster's file or --nodes; `scontrol show partition` there lists the limits.",
            reason="job-refused",
        )
