"""How far the look for what holds a component back goes: a uv that does not come to an end, and one demand too many."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.notes import Notes

from envbuild.core.errors import ResolutionError
from envbuild.lock.context import WorkContext
from envbuild.lock.resolve import held_back
from envbuild.lock.resolve.held_back import HeldBack, with_newer
from envbuild.lock.uv.program import TookTooLongError, run_uv
from envbuild.lock.uv.resolution import NO_SOLUTION

ITEM = HeldBack(name="run", version="0.4", uploaded="2024-06-01", newest="0.11")
FOUND = SimpleNamespace(pins={}, seconds=50.0)


@pytest.fixture
def context(tmp_path):
    return WorkContext(folder=tmp_path, log=tmp_path / "log", site=None, store=None, reporter=Notes())


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """How long each resolution may take; each ends as ``ends`` says."""
    seconds, ends = [], []

    def resolve(folder, source, what, context, **more):
        seconds.append(context.most_seconds)
        raise ends[0]

    monkeypatch.setattr(held_back, "resolve", resolve)
    monkeypatch.setattr(held_back, "prefer", lambda *given: None)
    return SimpleNamespace(seconds=seconds, ends=ends)


def demand(plan, item, trials):
    """As of a component with so many packages in its way."""
    for _ in range(5):
        with contextlib.suppress(ResolutionError):
            trials.is_better(plan)
    return None, ("other",)


PLAN = SimpleNamespace(
    project=SimpleNamespace(chosen={}), keep={}, torch=None, what="resolve", project_text=lambda pins: ""
)


def test_nothing_newer_is_looked_for_where_others_need_packages_of_another_cuda():
    project = SimpleNamespace(chosen={"run": SimpleNamespace(is_direct=False)}, base=SimpleNamespace(cuda_major="13"))
    plan = SimpleNamespace(project=project, effective=SimpleNamespace(stack=SimpleNamespace(anchor="lead"), leads=()))
    # No more of the plan is read: nothing is asked about the one that is old.
    packages = [{"name": "torch", "dependencies": [{"name": "nvidia-cublas-cu12"}]}, {"name": "nvidia-cublas-cu12"}]
    old = {"name": "run", "version": "0.4"}
    assert held_back.held_back(plan, SimpleNamespace(packages=packages, tables={"run": old}), None) == []


def test_a_resolution_that_does_not_end(monkeypatch, context, asked):
    monkeypatch.setattr(held_back, "held_back", lambda *given: [ITEM])
    monkeypatch.setattr(held_back, "_demand", demand)
    asked.ends.append(TookTooLongError("slow"))
    plan, lines = with_newer(PLAN, FOUND, context)
    assert plan is PLAN
    assert lines == ("run 0.4 (2024-06-01), not 0.11: what holds it back was not found in 1 resolution (0 s)",)
    assert context.reporter.lines == [f"note: {lines[0]}"]
    # Twice as long as the resolution that is to be improved.
    assert asked.seconds == [100.0]


def test_components_share_the_resolutions(monkeypatch, context, asked):
    monkeypatch.setattr(held_back, "held_back", lambda *given: [ITEM, ITEM, ITEM])
    monkeypatch.setattr(held_back, "_demand", demand)
    asked.ends.append(ResolutionError("no", why=NO_SOLUTION))
    _, lines = with_newer(PLAN, FOUND, context)
    assert [text.partition(": ")[2] for text in lines] == [
        "held back by other",
        "what holds it back was not found in 8 resolutions (0 s)",
        "what holds it back was not found in 8 resolutions (0 s)",
    ]


def test_uv_is_ended_when_its_time_is_over(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0"\n')
    with pytest.raises(TookTooLongError, match="longer than 0 s"):
        run_uv(["lock"], what="x", log=tmp_path / "log", cwd=tmp_path, most_seconds=0.0)
