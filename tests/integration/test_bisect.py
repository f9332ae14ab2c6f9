"""`envbuild bisect`: locks by the real uv, environments by it, and modules that really fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.ledger_rows import certificate_row, digest, step_row
from helpers.lock_runs import OLD
from helpers.stack_files import BASE, write_base, write_stack
from helpers.upstreams import MCORE_URL, SETUPTOOLS, Upstream, project_files

from envbuild.catalog.catalog import Catalog, HostDistribution, select
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.progress import SilentReporter
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import BisectRow, StepError
from envbuild.lock.lockfile import read_lock
from envbuild.nightly.culprits import CERTIFIED_LOCKS, CulpritSearch
from envbuild.nightly.models import NightRequest
from envbuild.store.local import LocalStore

LIBRARIES = [f"lib{number:02}" for number in range(12)]
NEW = "2025-03-01T00:00:00Z"
APP = "import {0}\nassert {1}, 'the libraries do not fit'\n"


def lock_both(own: Any, wheel: Callable[..., Path], module: str, names: list[str]) -> tuple[Path, Path]:
    """Two locks of `app`, which stays, and libraries that all move from 1.0 to 2.0."""
    wheel("app", "1.0", module=module)
    for name in names:
        wheel(name, "1.0", OLD, module="V = 1\n")
        wheel(name, "2.0", NEW, module="V = 2\n")
    components = {name: {"modules": [name]} for name in ("app", *names)}
    return tuple(lock(own, components, name, day) for name, day in (("good", "2025-02-01"), ("bad", "2025-04-01")))  # type: ignore[return-value]


def lock(own: Any, components: dict[str, Any], name: str, day: str, **more: Any) -> Path:
    write_stack(own.project, "s", components, as_of=day, **more)
    folder = own.project / name
    own.run("lock", "--stack", "s", "--out", str(folder), "--no-verify")
    return Path(folder)


def bisect(own: Any, good: Path, bad: Path, *more: str, status: int = 0) -> dict[str, Any]:
    done = own.run("bisect", str(good), str(bad), "--json", *more, status=status)
    assert "Traceback" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def own(own: Any) -> Any:
    """With a base that this machine can stand in for."""
    write_base(own.project, glibc="2.17")
    return own


@pytest.mark.slow
def test_one_of_twelve_is_found_in_four_trials_and_known_the_second_time(own: Any, wheel: Callable[..., Path]) -> None:
    culprit = LIBRARIES[7]
    good, bad = lock_both(own, wheel, APP.format(", ".join(LIBRARIES), f"{culprit}.V == 1"), LIBRARIES)
    actual = bisect(own, good, bad)
    (only,) = actual["culprits"]
    assert [(package["name"], package["from"], package["to"]) for package in only["packages"]] == [
        (culprit, "1.0", "2.0")
    ]
    assert (len(actual["moved"]), actual["only_together"], actual["finished"]) == (12, False, True)
    assert actual["runs"] <= 2 + 4
    assert "AssertionError: the libraries do not fit" in actual["failure"]
    again = bisect(own, good, bad)
    assert (again["culprits"], again["runs"], again["reused"]) == (actual["culprits"], 0, actual["runs"])


@pytest.mark.slow
def test_two_that_break_only_together_are_both_named(own: Any, wheel: Callable[..., Path]) -> None:
    names = LIBRARIES[:4]
    module = APP.format(", ".join(names), f"{names[0]}.V + {names[3]}.V < 4")
    actual = bisect(own, *lock_both(own, wheel, module, names))
    assert [entry["packages"][0]["name"] for entry in actual["culprits"]] == [names[0], names[3]]
    assert actual["only_together"]


@pytest.mark.slow
def test_what_does_not_install_or_fails_otherwise_is_gone_around(own: Any, wheel: Callable[..., Path]) -> None:
    # The culprit moves only with two others, of which one that moves alone fails by something else.
    names = LIBRARIES[:5]
    module = (
        f"import {', '.join(names)}\n"
        f"if ({names[1]}.V, {names[2]}.V) == (2, 1): raise RuntimeError('another failure')\n"
        f"assert {names[3]}.V == 1, 'the libraries do not fit'\n"
    )
    actual = bisect(own, *lock_both(own, wheel, module, names))
    assert [entry["packages"][0]["name"] for entry in actual["culprits"]] == [names[3]]
    assert not actual["only_together"]


def test_ends_are_confirmed_and_a_time_limit_holds(own: Any, wheel: Callable[..., Path]) -> None:
    good, bad = lock_both(own, wheel, APP.format(", ".join(LIBRARIES[:2]), f"{LIBRARIES[1]}.V == 1"), LIBRARIES[:2])
    error = bisect(own, bad, good, status=5)["error"]
    assert error["what"].startswith("the bad lock")
    assert error["what"].endswith("passes")
    assert "hold the same packages" in bisect(own, bad, bad, status=2)["error"]["what"]
    out_of_time = bisect(own, good, bad, "--budget", "0")
    # The trial of the good lock is known: it was the bad end of the first bisection.
    assert (out_of_time["finished"], out_of_time["runs"], out_of_time["culprits"]) == (False, 0, [])
    assert bisect(own, good, bad)["finished"]


def test_a_night_finds_what_broke_a_target_that_was_certified_before(
    own: Any, wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = LIBRARIES[:4]
    lock_both(own, wheel, APP.format(", ".join(names), f"{names[2]}.V == 1"), names)
    place = own.project / "lockfiles/s" / BASE
    shutil.copytree(own.project / "good", place)
    for name, value in own.environment().items():
        monkeypatch.setenv(name, value)
    reporter = SilentReporter()
    context = Context(store=LocalStore(own.cache, reporter), site=load_site(), reporter=reporter)
    selection = select(Catalog.open(own.project), "s", "cpu", BASE, HostDistribution.here())
    with Ledger.open(own.project / "ledger.sqlite") as ledger:
        request = NightRequest(selections=(selection,), project=own.project)
        search = CulpritSearch(request=request, ledger=ledger, context=context, budget_seconds=3600)
        good = read_lock(place).lock.digest
        ledger.record(certificate_row(stack="s", base=BASE, lock_digest=good))
        search.keep_locks([step_row("certify", stack="s", base=BASE)])
        # The next night's lock takes its place, and its image is refused.
        shutil.rmtree(place)
        shutil.copytree(own.project / "bad", place)
        bad = read_lock(place).lock.digest
        error = StepError(fault="check", kind="CheckRefusedError", exit_code=5, what="1 module does not import")
        failed = step_row("image", night="n2", stack="s", base=BASE, state="failed", lock_digest=bad, error=error)
        (step,) = search.run([failed])
        assert (step.name, step.state, step.night) == ("bisect", "done", "n2")
        assert step.note == f"broken by {names[2]} 1.0 -> 2.0"
        (actual,) = ledger.rows(BisectRow)
        assert (actual.component, actual.before, actual.after) == (names[2], "1.0", "2.0")
        assert (actual.good, actual.bad, actual.night) == (good, bad, "n2")
        assert search.run([failed]) == (), "it is done once"
        by_digest = bisect(own, Path(good), place)
        assert [entry["packages"][0]["name"] for entry in by_digest["culprits"]] == [names[2]]
        assert by_digest["runs"] == 0, "the night's trials are known"
        another = failed.model_copy(update={"lock_digest": digest("another")})
        assert search.run([another]) != ()
        of_machine = another.model_copy(update={"error": error.model_copy(update={"fault": "infrastructure"})})
        assert search.run([of_machine]) == ()
        (context.store.find(CERTIFIED_LOCKS, good) / "stack.lock.toml").write_text("damaged")
        (lost,) = search.run([another])
        assert lost.state == "skipped"
        assert lost.note.endswith("is not in the store")


@pytest.mark.slow
def test_of_a_package_from_git_the_commit_is_found(nemo: Any, upstream: Upstream, wheel: Callable[..., Path]) -> None:
    write_base(nemo.project, glibc="2.17")
    wheel("app", "1.0", module="import megatron.core\nassert megatron.core.V < 5, 'megatron is too new'\n")
    components = {
        "app": {"modules": ["app"]},
        "megatron-core": {"git": MCORE_URL, "ref": "main", "modules": ["megatron.core"]},
    }
    commits = []
    for number in range(9):
        files = project_files("megatron-core", "0.20.0", "megatron.core")
        files["megatron/core/__init__.py"] = f"V = {number}\n"
        if number == 4:
            files["pyproject.toml"] = "this is no TOML\n"
        commits.append(upstream.megatron.commit("main", f"2025-04-{10 + number}T00:00:00Z", files))
    ends = [
        lock(nemo, components, name, day, requirements={"setuptools": SETUPTOOLS})
        for name, day in (("good", "2025-04-10"), ("bad", "2025-05-01"))
    ]
    (only,) = bisect(nemo, *ends)["culprits"]
    # The commit before it does not build: which of the two it is cannot be told.
    assert only["commits"] == [commits[4], commits[5]]
    assert only["git"] == MCORE_URL
    assert only["packages"][0]["from_commit"] == commits[0]
