"""Follows a job of Slurm to its end, and tells what changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from envbuild.core.errors import MachineError
from envbuild.launch.slurm.commands import SlurmCommands
from envbuild.launch.slurm.states import JobState

# One query for all jobs in so many seconds: controllers of large clusters are slow, and others ask too.
QUERY_SECONDS = 30.0
# A controller that is restarted is away for minutes; the job goes on meanwhile.
MOST_SILENT_QUERIES = 20


@dataclass(frozen=True, kw_only=True)
class Following:
    """How a job is followed.

    Attributes:
        tell: called with each sentence that is new.
        sleep: waits so many seconds.
    """

    commands: SlurmCommands
    tell: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep

    def to_the_end(self, job: str) -> JobState | None:
        """Wait until a job has ended; None where Slurm has forgotten it: its results tell.

        Raises:
            MachineError: Slurm has not answered for ten minutes.
        """
        told, silent = "", 0
        while True:
            try:
                states = self.commands.states([job])
            except MachineError as error:
                silent += 1
                if silent > MOST_SILENT_QUERIES:
                    raise
                self._tell_once(f"Slurm does not answer: {error.why}", told)
            else:
                silent = 0
                if job not in states:
                    return None
                state = states[job]
                if state.ended:
                    self.tell(f"job {job}: {state.sentence}")
                    return state
                told = self._tell_once(f"job {job}: {state.sentence}", told)
            self.sleep(QUERY_SECONDS)

    def _tell_once(self, sentence: str, told: str) -> str:
        if sentence != told:
            self.tell(sentence)
        return sentence
