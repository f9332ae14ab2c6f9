"""Plans to break, and runs of the real runner whose ranks are fake."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.smoke_plans import Document, case_document, plan_document, read_results
from unit.smoke.run_with_fake_ranks import FAKE, run_plan

from envbuild_smoke import cli, runner
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.run import task_run
from envbuild_smoke.run.options import Options

# -S: as `without_packages`.
FAKE_COMMAND = [sys.executable, "-S", str(Path(__file__).with_name("run_with_fake_ranks.py"))]
HERE = Path(__file__).resolve().parent
BASELINE = case_document("train-baseline")
# Long enough for ranks to start on a busy machine, short enough to wait for.
SHORT_LIMIT = 1.5


def two_ranks(name: str, baseline: str = "train-baseline", **changes: object) -> Document:
    return {**case_document(name, baseline, data=2), **changes}


@dataclass(frozen=True)
class Done:
    """A run that has ended: its folder, and the lines of its results."""

    out: Path
    lines: list[Document]

    @property
    def cases(self) -> dict[str, Document]:
        return {line["case"]: line for line in self.lines if line["type"] == "case"}

    def pids(self, case: str) -> list[str]:
        return [path.read_text() for path in self._of_ranks(case, "pid")]

    def context(self, case: str) -> list[Document]:
        """What the ranks of a case were started with."""
        return [json.loads(path.read_text()) for path in self._of_ranks(case, "context")]

    def _of_ranks(self, case: str, kind: str) -> list[Path]:
        files = (self.out / "cases" / case).glob(f"rank*.{kind}")
        return sorted(files, key=lambda path: int(path.stem.removeprefix("rank")))


@dataclass(frozen=True)
class Command:
    """A command that has ended: exit status and what it printed."""

    status: int
    output: str
    errors: str

    @property
    def events(self) -> list[Document]:
        return [json.loads(line) for line in self.output.splitlines()]

    @property
    def started(self) -> list[str]:
        """The cases that it started, in their order."""
        return [event["case"] for event in self.events if event["event"] == "case-started"]


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Command]]:
    """Runs the command line in this process, with fake ranks."""

    def run(*arguments: str | Path) -> Command:
        capfd.readouterr()
        with without_packages():
            status = cli.main([str(argument) for argument in arguments])
        output, errors = capfd.readouterr()
        return Command(status, output, errors)

    monkeypatch.setattr(runner, "run_plan", run_plan)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def without_packages() -> Iterator[None]:
    """The runner finds no packages: reading the metadata of all of ours is most of what a run does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [folder for folder in sys.path if not folder.endswith("-packages")])
        yield


@contextmanager
def fake_ranks() -> Iterator[pytest.MonkeyPatch]:
    """The fake rank program can be imported by the fork server, failing cases end sooner, and there are two cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[2] / "smoke")]))
        patch.setattr(task_run, "GRACE_SECONDS", 0.8)
        patch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
        yield patch


@pytest.fixture(autouse=True)
def _fake_ranks() -> Iterator[None]:
    with fake_ranks():
        yield


def run_into(out: Path, *cases: Document, options: Options | None = None, **changes: object) -> Done:
    options = options or Options()
    plan = parse_plan(json.dumps({**plan_document(*cases), **changes}).encode())
    options = replace(options, program=options.program or FAKE)
    with without_packages():
        runner.run_plan(plan, plan.cases, out, emit=lambda _event: None, stop=threading.Event(), options=options)
    return Done(out, read_results(out))


def write_plan(folder: Path, *cases: Document, **changes: object) -> Path:
    (folder / "plan.json").write_text(json.dumps({**plan_document(*cases), **changes}))
    return folder / "plan.json"


@pytest.fixture
def document() -> Document:
    """A plan with a baseline and one case of two ranks."""
    return plan_document(BASELINE, two_ranks("train-dp2"))


@pytest.fixture
def run_fake(tmp_path: Path) -> Callable[..., Done]:
    """Runs cases into tmp_path with the fake rank program."""

    def run(*cases: Document, **changes: Any) -> Done:
        return run_into(tmp_path, *cases, **changes)

    return run


@pytest.fixture(scope="session")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Cases of two ranks on two devices, one after the other; after each that fails, one that trains."""
    names = ["train-a", "train-b", "train-c"]
    for number, what in enumerate(("raises", "exits", "killed", "leaves", "orphans", "silent", "late", "short")):
        names += [f"{what}-dp2", f"train-{number}"]
    names += ["observes-dp2", "meets-a", "meets-b", "prints-a", "prints-b", "environment-dp2", "lazily-a"]
    with fake_ranks() as patch:
        patch.setenv("OMP_NUM_THREADS", "64")
        patch.setenv("MASTER_PORT", "1")
        return run_into(
            tmp_path_factory.mktemp("one-by-one"),
            BASELINE,
            *map(two_ranks, names),
            expected_versions={"no-such-package": "1"},
            expected_modules=["json", "no_such_module", "fake_dies", "math", "processes"],
        )


@pytest.fixture(scope="session")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Cases on twelve devices, several at a time: those that hang, those whose baseline failed, and comparisons."""
    limit = {"time_limit_seconds": SHORT_LIMIT}
    broken = [{**case_document("killed-baseline")}, {**case_document("ignores-baseline"), **limit}]
    cases = [
        BASELINE,
        case_document("nan-baseline"),
        *broken,
        case_document("train-wide", "train-baseline", data=12),
        *(two_ranks(f"{what}-dp2", **limit) for what in ("hangs", "managed", "signalled", "lingers", "stopped")),
        two_ranks("train-last"),
        two_ranks("train-of-killed", "killed-baseline", compare_weights=True),
        two_ranks("train-of-ignores", "ignores-baseline"),
        two_ranks("train-compared", compare_weights=True),
        two_ranks("train-bad", compare_weights=True),
    ]
    sweep = {"ranks": 2, "sizes_bytes": [1024, 4096], "floor_gigabytes_per_second": None}
    with fake_ranks():
        return run_into(tmp_path_factory.mktemp("at-once"), *cases, bandwidth=sweep)


def finding_codes(line: Mapping[str, Any]) -> dict[str, set[str]]:
    """The packages of a run's findings, by code."""
    codes: dict[str, set[str]] = {}
    for finding in line["environment_findings"]:
        codes.setdefault(finding["code"], set()).add(finding["package"])
    return codes
