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
        look: called after each query; what it cannot reach is tried again.
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
            MachineError: Slurm, or its login host, has not answered for ten minutes.
        """
        told, silent = "", 0.0
        while True:
            try:
                state = self.commands.states([job]).get(job)
                self.look()
            except MachineError as error:
                silent += self.query_seconds
                if silent > MOST_SILENT_SECONDS:
                    raise
                told = self._tell(f"{error.what}, and the job goes on meanwhile: {error.why}", told)
            else:
                silent = 0.0
                if state is None:
                    return None
                told = self._tell(f"job {job}: {state.sentence}", told)
                if state.ended:
                    return state
                if state.impossible:
                    self._give_up(state)
            self.sleep(self.query_seconds)

    def _tell(self, sentence: str, told: str) -> str:
        if sentence != told:
            self.tell(sentence)
        return sentence

    def _give_up(self, state: JobState) -> None:
        self.commands.cancel(state.job)
        raise CertificationCannotRunError(
            f"job {state.job} would never start, and was cancelled",
            why=f"It {state.impossible} ({state.reason}).",
            fix="Correct [slurm] of the cluster's file or --nodes; `scontrol show partition` there lists the limits.",
            reason="job-refused",
        )
