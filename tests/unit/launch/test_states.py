"""What people are told of a job."""

from __future__ import annotations

import pytest

from envbuild.launch.slurm.states import JobState


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (JobState(job="2", state="RUNNING", nodes="n[1-2]"), "running on n[1-2]"),
        # Nodes whose processes are gone have left the list: the others do not run anything either.
        (JobState(job="2", state="COMPLETING", nodes="n1"), "ending"),
        (
            JobState(job="2", state="PENDING", reason="launch failed requeued held"),
            "held, as a node could not start it: see to the node, then `scontrol release 2`",
        ),
        (JobState(job="2", state="PREEMPTED"), "it was preempted, and Slurm did not put it back"),
    ],
    ids=lambda value: value.state if isinstance(value, JobState) else "",
)
def test_sentence(state: JobState, sentence: str) -> None:
    assert state.sentence == sentence
