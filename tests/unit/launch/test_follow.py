"""Following a job over a login host that does not always answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from envbuild.core.errors import MachineError
from envbuild.launch.slurm.commands import SlurmCommands
from envbuild.launch.slurm.follow import Following
from envbuild.launch.slurm.states import JobState

SILENCE = MachineError("cannot read the job's log: ssh to lab failed", why="Connection timed out", fix="")


@dataclass(frozen=True, kw_only=True)
class _Commands(SlurmCommands):
    answers: list[str]

    def states(self, jobs):
        return {jobs[0]: JobState(job=jobs[0], state=self.answers.pop(0), nodes="n1")}


@dataclass
class _Login:
    """The outages of a host: one answer for each look at the log."""

    outages: list[bool]
    told: list[str] = field(default_factory=list)

    def look(self):
        if self.outages.pop(0):
            raise SILENCE

    def following(self, states, query_seconds=60.0):
        return Following(
            commands=_Commands(answers=states),
            query_seconds=query_seconds,
            tell=self.told.append,
            look=self.look,
            sleep=lambda _seconds: None,
        )


def test_a_log_that_cannot_be_read_for_a_while_changes_nothing():
    login = _Login([False, True, True, False, True, False])
    states = ["RUNNING", "RUNNING", "RUNNING", "RUNNING", "COMPLETED", "COMPLETED"]
    assert login.following(states).to_the_end("7").state == "COMPLETED"
    silent = "cannot read the job's log: ssh to lab failed, and the job goes on meanwhile: Connection timed out"
    assert login.told == ["job 7: running on n1", silent, "job 7: running on n1", silent, "job 7: it ended"]


def test_a_host_that_is_away_for_ten_minutes_is_given_up():
    with pytest.raises(MachineError) as caught:
        _Login([True] * 99).following(["RUNNING"] * 99).to_the_end("7")
    assert caught.value is SILENCE
