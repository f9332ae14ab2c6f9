"""What the benchmark over a real history makes of a log, a record and many results."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from envbuild.catalog.data import data_root

LOG = """\
* read upstream's pins at nemo-toolkit c4c64c8885ad ...
* resolve nemo on ubuntu2404-cu130 ...
  resolve nemo on ubuntu2404-cu130: Resolved 292 packages in 35.43s
  resolve nemo on ubuntu2404-cu130: stopped after 2.5 s
trying transformer-engine ==2.6.* instead of ==2.7.*: the nearest earlier release
trying transformer-engine-torch ==2.6.* instead of ==2.7.*: the nearest earlier release
* resolve nemo on ubuntu2404-cu130 ...
  resolve nemo on ubuntu2404-cu130: done in 15.0 s
  check the lock: done in 14.6 s
  install phase main: 260 packages: done in 38.5 s
  install phase git: 2 packages: done in 28.6 s
  import 6 modules: done in 132.4 s
its packages are of another CUDA than base ubuntu2404-cu130 has: taking ubuntu2204-cu126, which stack nemo names too
* resolve nemo on ubuntu2204-cu126 ...
trying packaging >=25.0 instead of <25.0, which lightning declares
* resolve nemo on ubuntu2204-cu126 ...
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(data_root() / "benchmarks"))
    monkeypatch.setitem(sys.modules, "history_record", importlib.import_module("history_record"))
    return importlib.import_module("bench_history")


@pytest.fixture
def record(bench: ModuleType) -> ModuleType:
    return sys.modules["history_record"]


def result(record: ModuleType, name: str = "2025-03-01", **values: Any) -> Any:
    common = {"name": name, "exit_code": 0, "seconds": 100.0, "attempts": 1, "envbuild": "abc", "verified": True}
    return record.Result(**{**common, **values})


def test_attempts_and_steps_of_a_log(record: ModuleType) -> None:
    assert record.attempts("") == 1
    assert record.attempts(LOG) == 4
    assert record.step_seconds(LOG) == {"resolve": 17.5, "check": 14.6, "install": 67.1, "import": 132.4}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", "nothing was printed"),
        ("Traceback\nKeyError: 'x'\n", "KeyError: 'x'"),
        (
            "note: a\nerror: it does not resolve\n  cause: no foo\n         more\n  help:  x\n",
            "it does not resolve; no foo",
        ),
        ("error: interrupted\n", "interrupted"),
    ],
)
def test_failure_in_one_line(record: ModuleType, log: str, expected: str) -> None:
    assert record.failure(log) == expected


@pytest.mark.parametrize(
    ("driver", "imported", "missing"),
    [
        ("nemo", ["nemo", "nemo.collections.llm", "nemo.collections.llm.recipes"], []),
        ("nemo", ["torch", "nemo.collections.llm"], ["nemo.collections.llm.recipes"]),
        ("bridge", ["megatron.bridge"], ["megatron.bridge.recipes", "megatron.bridge.training.pretrain"]),
    ],
)
def test_modules_of_the_entry_point(record: ModuleType, driver: str, imported: list[str], missing: list[str]) -> None:
    assert record.not_imported(driver, {"imported": imported}) == missing
    assert record.not_imported(driver, None) == [*record.ENTRY_POINTS[driver]]


@pytest.mark.parametrize(
    ("drivers", "expected"),
    [
        (["bridge", "", "bridge"], "Megatron-Bridge main"),
        (["nemo", "bridge"], "NeMo r2.6"),
        (["", "nemo"], "NeMo r2.6"),
        ([""], "NeMo r2.6"),
    ],
)
def test_the_branch_in_the_title(record: ModuleType, drivers: list[str], expected: str) -> None:
    assert record.branch("r2.6", [result(record, driver=driver) for driver in drivers]) == expected


def test_days(bench: ModuleType) -> None:
    found = bench.days(date(2025, 3, 1), date(2025, 3, 21), 10)
    assert [*map(str, found)] == ["2025-03-01", "2025-03-11", "2025-03-21"]


def test_summary_and_what_it_misses(record: ModuleType) -> None:
    good = [
        result(record, deviations=("x",) * count, seconds=seconds)
        for count, seconds in [(2, 100.0), (0, 300.0), (3, 200.0)]
    ]
    numbers = record.summary(good)
    assert numbers["share_verified"] == 1
    assert numbers["deviations"] == {"median": 2, "largest": 3}
    assert numbers["seconds"] == {"median": 200.0, "largest": 300.0}
    assert record.misses(numbers) == []
    # A failed case has no lock that could deviate.
    bad = result(record, exit_code=5, verified=False, failure="refused", seconds=900.0)
    numbers = record.summary([*good, bad])
    assert (numbers["verified"], numbers["cases"], numbers["deviations"]["median"]) == (3, 4, 2)
    assert record.misses(numbers) == ["verified: 75% (at least 95%)"]
    assert len(record.misses(record.summary([result(record, deviations=("x",) * 3)]))) == 1
    assert record.misses(record.summary([]))


def test_a_record_and_its_table(record: ModuleType, tmp_path: Path) -> None:
    good = result(
        record,
        digest="sha256:1",
        commit="c" * 40,
        version="2.6.0rc0",
        deviations=("torch <2.9 instead",),
        stubbed=("te",),
    )
    bad = result(record, "2025-03-11", exit_code=4, verified=False, failure="a|b")
    record.write_record(tmp_path / "r.json", "title", [good, bad])
    value = json.loads((tmp_path / "r.json").read_text())
    assert [record.Result.from_json(item) for item in value["cases"]] == [good, bad]
    assert [item["deviation_count"] for item in value["cases"]] == [1, 0]
    text = (tmp_path / "r.md").read_text()
    assert re.search(r"\| 2025-03-01 \| [^|]*\| te \| ", text)
    assert "2.6.0rc0 cccccccccccc | 1 | 1 | 100 |  |" in text
    assert "| **failed** |" in text
    assert "a\\|b |" in text
    assert "- 2025-03-01: torch <2.9 instead" in text


def test_git_takes_the_local_copy(bench: ModuleType, tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(origin)]
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    (tmp_path / "config").write_text(bench.git_config({"https://example.org/a/b": origin}))
    for address in ("https://example.org/a/b", "https://example.org/a/b.git"):
        done = subprocess.run(
            ["git", "ls-remote", address, "HEAD"],
            env={"GIT_CONFIG_GLOBAL": str(tmp_path / "config"), "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.endswith("\tHEAD\n")


def test_a_case_is_run_once(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench.Case("2025-03-01", ("--nemo", "main"))
    command = "import sys; print(f'error: no {1 + 1}', file=sys.stderr); sys.exit(4)"
    monkeypatch.setattr(bench, "ENVBUILD", [sys.executable, "-c", command])
    history = bench.History(tmp_path, {}, 60)
    found = history.result(case, fresh=False, retry=False)
    assert (found.exit_code, found.failure, found.verified) == (4, "no 2", False)
    monkeypatch.setattr(bench, "ENVBUILD", [sys.executable, "-c", command.replace("4", "5")])
    assert history.result(case, fresh=False, retry=False) == found
    assert history.result(case, fresh=False, retry=True).exit_code == 5
    monkeypatch.setattr(bench, "ENVBUILD", [sys.executable, "-c", "import time; time.sleep(3600)"])
    late = bench.History(tmp_path, {}, 0.2).result(case, fresh=True, retry=False)
    assert (late.exit_code, late.failure) == (bench.TIMED_OUT, "not done after 0.2 s")


def test_a_lock_that_was_made(bench: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.mkdir()
    (lock / "stack.lock.toml").write_text(
        f'deviations = ["a", "b"]\n[components.nemo-toolkit]\nversion = "2.6.0rc0"\ngit = "https://example.org/NeMo"\n'
        f'commit = "{"a" * 40}"\n'
    )
    history = bench.History(tmp_path / "work", {}, 60)
    printed = {
        "path": str(lock),
        "driver": "nemo",
        "base": "ubuntu2204-cu126",
        "digest": "sha256:1",
        "verified": {"where": "base x", "imported": ["nemo.collections.llm"]},
    }
    found = history._of_lock(printed)
    assert found["driver"] == "nemo"
    assert (found["commit"], found["deviations"], found["verified"]) == ("a" * 40, ("a", "b"), False)
    assert found["failure"] == "not imported: nemo.collections.llm.recipes"
