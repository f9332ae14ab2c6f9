"""A plan to break, and a runner whose ranks are fake."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.smoke_plans import Document, case_document, plan_document

from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.run import task_run
from envbuild_smoke.run.options import Options
from envbuild_smoke.run.runner import run_plan

FAKE = RankProgram(entry="fake_ranks:main", compare="fake_ranks:compare", bandwidth="fake_ranks:bandwidth")
HERE = Path(__file__).resolve().parent


@pytest.fixture
def document() -> Document:
    """A plan with a baseline and one case of two ranks."""
    return plan_document(case_document("train-baseline"), case_document("train-dp2", "train-baseline", data=2))


@pytest.fixture(autouse=True)
def _fake_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fake rank program importable in the template process, and failing cases end sooner."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[2] / "smoke")]))
    monkeypatch.setattr(task_run, "GRACE_SECONDS", 1.2)


@pytest.fixture
def run_fake(tmp_path: Path) -> Callable[..., list[Document]]:
    """Runs cases into tmp_path with the fake rank program; returns the lines of results.jsonl."""

    def run(
        *cases: Document, program: RankProgram = FAKE, options: Options | None = None, **changes: object
    ) -> list[Document]:
        plan = parse_plan(json.dumps({**plan_document(*cases), **changes}).encode())
        run_plan(
            plan,
            plan.cases,
            tmp_path,
            emit=lambda _event: None,
            stop=threading.Event(),
            program=program,
            options=options,
        )
        return [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]

    return run
