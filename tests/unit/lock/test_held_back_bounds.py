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
from envbuild.lock.uv import program as uv_program_module
from envbuild.lock.uv.program import TookTooLongError, run_uv
from envbuild.lock.uv.resolution import NO_SOLUTION

ITEM = HeldBack(name="run", version="0.4", uploaded="2024-06-01", newest="0.11")
FOUND = SimpleNamespace(pins={})


@pytest.fixture
def context(tmp_path):
    return WorkContext(folder=tmp_path, log=tmp_path / "log", site=None, store=None, reporter=Notes())


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """How much each resolution may take; each ends as ``ends`` says."""
    seconds, ends = [], []

    def resolve(folder, source, what, context, **more):
        seconds.append(context.most_cpu_seconds)
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
    plan, found, lines = with_newer(PLAN, FOUND, context)
    assert (plan, found) == (PLAN, FOUND)
    assert lines == ("run 0.4 (2024-06-01), not 0.11: what holds it back was not found in 1 resolution",)
    assert context.reporter.lines == [f"note: {lines[0]}"]
    # Of a busy machine's clock nothing depends.
    assert asked.seconds == [held_back.MOST_CPU_SECONDS]


def test_components_share_the_resolutions(monkeypatch, context, asked):
    monkeypatch.setattr(held_back, "held_back", lambda *given: [ITEM, ITEM, ITEM])
    monkeypatch.setattr(held_back, "_demand", demand)
    asked.ends.append(ResolutionError("no", why=NO_SOLUTION))
    _, _, lines = with_newer(PLAN, FOUND, context)
    assert [text.partition(": ")[2] for text in lines] == [
        "held back by other",
        "what holds it back was not found in 8 resolutions",
        "what holds it back was not found in 8 resolutions",
    ]


@pytest.mark.parametrize(("program", "ended"), [("while :; do :; done", True), ("exit 0", False)])
def test_uv_is_ended_when_its_processor_time_is_over(tmp_path: Path, monkeypatch, program, ended):
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\n{program}\n")
    uv.chmod(0o755)
    monkeypatch.setattr(uv_program_module, "uv_program", lambda: uv)
    expected = pytest.raises(TookTooLongError, match="1 s of processor time") if ended else contextlib.nullcontext()
    with expected:
        run_uv(["lock"], what="x", log=tmp_path / "log", cwd=tmp_path, most_cpu_seconds=1)
