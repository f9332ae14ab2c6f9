"""A lock whose pins do not work: other releases and added packages, with the real uv and git."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import OLD, error, lock_of, result
from helpers.stack_files import BASE, write_stack
from helpers.upstreams import MCORE_URL, NEMO_URL, SETUPTOOLS, Upstream, manifest, project_files

from envbuild.lock import attempt
from envbuild.lock.context import LockContext
from envbuild.lock.lockfile import read_lock
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.resolve.resolve import ResolvedPlan
from envbuild.lock.uv import resolution as uv_resolution
from envbuild.lock.uv.program import run_uv
from envbuild.sync import install_target

LATER = "2025-06-01T00:00:00Z"
HEAD_DAY = "2025-03-20T12:00:00Z"
LOCK = ("lock", "--stack", "nemo", "--json")


@pytest.fixture
def nemo(nemo: Any) -> Any:
    """The tool, which verifies its locks."""
    nemo.verifies = True
    return nemo


@pytest.fixture
def tip(upstream: Upstream) -> Callable[..., str]:
    """Commits to NeMo's main: what its package imports, and needs."""

    def commit(module: str, *needs: str, day: str = HEAD_DAY) -> str:
        files = project_files("nemo-toolkit", "2.3.0", "nemo", needs)
        files["nemo/__init__.py"] = module
        return upstream.nemo.commit("main", day, files)

    return commit


def test_release_that_came_after_the_commit_and_does_not_import_is_replaced(
    nemo: Any, tip: Callable[..., str], wheel: Callable[..., None]
) -> None:
    tip("import helper\nhelper.gone\n", "helper")
    wheel("helper", "1.0", module="gone = 1\n")
    wheel("helper", "2.0", LATER)
    done = result(nemo.run(*LOCK))
    assert done["verified"]["imported"] == ["nemo", "megatron.core", "packaging.version"]
    lock = lock_of(nemo, "nemo")
    (deviation,) = lock.deviations
    assert deviation.startswith("helper as of 2025-03-21T12:00:00Z instead of the newest release: ")
    assert "module 'helper' has no attribute 'gone'" in deviation
    assert lock.verified_in.startswith("this machine (glibc ")
    assert result(nemo.run(*LOCK))["built"] is False
    refused = error(nemo.run(*LOCK, "--exact", "--name", "exact", status=5))
    assert "[import:" in refused["why"]


@pytest.mark.slow
def test_diff_shows_what_a_lock_would_take_after_its_search(
    nemo: Any, tip: Callable[..., str], wheel: Callable[..., None]
) -> None:
    wheel("helper", "1.0", module="gone = 1\n")
    tip("import helper\nhelper.gone\n", "helper")
    digest = result(nemo.run(*LOCK))["digest"]
    wheel("helper", "2.0", LATER)
    diff = nemo.run("lock", "--stack", "nemo", "--diff").stdout
    assert "  deviation: helper as of 2025-03-21T12:00:00Z instead of the newest release: " in diff
    assert "~ helper" not in diff
    assert "~ helper 1.0 -> 2.0" in nemo.run("lock", "--stack", "nemo", "--diff", "--no-verify").stdout
    assert lock_of(nemo, "nemo").digest == digest


def test_package_that_is_imported_and_not_declared_is_added(
    nemo: Any, tip: Callable[..., str], wheel: Callable[..., None]
) -> None:
    tip("import undeclared\n")
    wheel("undeclared", "1.0")
    nemo.run(*LOCK)
    assert lock_of(nemo, "nemo").deviations == (
        "undeclared is added: something imports undeclared, and no package of the lock brings it",
    )


# Never ends; or ends the second time, when there is a mark.
BLOCKS = "import time\nwhile True:\n    time.sleep(60)\n"
BLOCKS_ONCE = (
    "import pathlib\nmark = pathlib.Path({!r})\nif not mark.exists():\n    mark.touch()\n    "
    + BLOCKS.replace("\n", "\n    ")
)


@pytest.fixture
def little_time(tip: Callable[..., str], wheel: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports have seconds, and there is an older helper, which needs none."""
    monkeypatch.setattr(install_target, "LIMIT_SECONDS", 4.0)
    tip("import helper\n", "helper")
    wheel("helper", "1.0")


@pytest.mark.slow
@pytest.mark.usefixtures("little_time")
def test_a_slow_import_changes_no_version(nemo: Any, wheel: Callable[..., None], tmp_path: Path) -> None:
    wheel("helper", "2.0", LATER, module=BLOCKS_ONCE.format(str(tmp_path / "mark")))
    nemo.run(*LOCK)
    assert (tmp_path / "mark").exists()
    assert lock_of(nemo, "nemo").deviations == ()
    assert read_lock(nemo.project / "lockfiles/nemo" / BASE).packages()["helper"] == "2.0"


@pytest.mark.slow
@pytest.mark.usefixtures("little_time")
def test_an_import_that_does_not_end_refuses_the_lock_and_is_not_remembered(
    nemo: Any, wheel: Callable[..., None]
) -> None:
    wheel("helper", "2.0", LATER, module=BLOCKS)
    refused = error(nemo.run(*LOCK, status=11))
    assert refused["what"] == "cannot import nemo of nemo-toolkit: it did not end within 12 s"
    assert "helper/__init__.py" in refused["why"]
    assert list(nemo.project.glob("lockfiles/nemo/*/stack.lock.toml")) == []
    assert not list((nemo.cache / "verifications").glob("*"))


@pytest.fixture
def needs_an_older_helper(tip: Callable[..., str], wheel: Callable[..., None]) -> None:
    """A search of two attempts: the newest helper does not import."""
    tip("import helper\nhelper.gone\n", "helper")
    wheel("helper", "1.0", module="gone = 1\n")
    wheel("helper", "2.0", LATER)


@pytest.mark.usefixtures("needs_an_older_helper")
def test_an_interrupted_search_leaves_nothing(nemo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve_plan(plan: LockPlan, files: Any, context: LockContext) -> ResolvedPlan:
        # Ctrl-C during the second attempt.
        if plan.inputs.deviations:
            raise KeyboardInterrupt
        return real(plan, files, context)

    real = attempt.resolve_plan
    monkeypatch.setattr(attempt, "resolve_plan", resolve_plan)
    nemo.run(*LOCK, status=130)
    assert not (nemo.project / "lockfiles").exists(), "nothing is half there"


@pytest.mark.usefixtures("needs_an_older_helper")
def test_where_no_pin_changed_there_is_no_new_search(
    nemo: Any, upstream: Upstream, wheel: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that touches the README takes one resolution, with every version and deviation of the lock."""
    nemo.run(*LOCK)
    first = lock_of(nemo, "nemo")
    assert [deviation.package for deviation in first.deviating] == ["helper"]
    wheel("helper", "3.0", LATER)
    nemo.env["UV_CACHE_DIR"] += "-new"
    head = upstream.nemo.commit("main", "2025-03-21T12:00:00Z", {"README.md": "more\n"})
    asked: list[Path] = []

    def run_and_note(words: Any, **more: Any) -> Any:
        asked.extend([more["cwd"]] if words[0] == "lock" and more["what"] == "resolve stack nemo on small" else [])
        return run_uv(words, **more)

    monkeypatch.setattr(uv_resolution, "run_uv", run_and_note)
    nemo.run(*LOCK)
    lock = lock_of(nemo, "nemo")
    assert lock.components["nemo-toolkit"].commit == head
    assert (lock.deviations, lock.deviating) == (first.deviations, first.deviating)
    assert read_lock(nemo.project / "lockfiles/nemo" / BASE).packages()["helper"] == "1.0"
    assert len(asked) == 1
    # What the commit needs besides, and what --upgrade asks for, is searched for as ever.
    nemo.run(*LOCK, "--upgrade")
    assert read_lock(nemo.project / "lockfiles/nemo" / BASE).packages()["helper"] == "1.0"
    assert len(asked) > 4


@pytest.mark.slow
def test_versions_stay_where_only_the_branch_moved(
    nemo: Any, tip: Callable[..., str], wheel: Callable[..., None]
) -> None:
    """Also where the index has newer ones by then; what does not fit any more moves, and --upgrade moves all."""

    def versions() -> list[str]:
        packages = read_lock(nemo.project / "lockfiles/nemo" / BASE).packages()
        return [packages["helper"], packages["other"]]

    wheel("helper", "1.0")
    wheel("other", "1.0")
    tip("", "helper", "other")
    nemo.run(*LOCK)
    wheel("helper", "2.0", LATER)
    wheel("other", "2.0", LATER)
    tip("", "helper", "other", day="2025-03-21T12:00:00Z")
    upgraded = nemo.run("lock", "--stack", "nemo", "--diff", "--upgrade").stdout
    assert "~ helper 1.0 -> 2.0" in upgraded
    assert "helper" not in nemo.run("lock", "--stack", "nemo", "--diff").stdout
    nemo.run(*LOCK)
    assert versions() == ["1.0", "1.0"]
    tip("", "helper", "other>1", day="2025-03-22T12:00:00Z")
    nemo.run(*LOCK)
    assert versions() == ["1.0", "2.0"]
    assert lock_of(nemo, "nemo").deviations == ()
    nemo.run(*LOCK, "--upgrade")
    assert versions() == ["2.0", "2.0"]


@pytest.fixture
def engine(nemo: Any, upstream: Upstream) -> Any:
    """Stack `nemo` with `engine`, of which NeMo's manifest pins a commit of a version that was never released."""
    commit = upstream.megatron.commit("engine", "2025-01-05T00:00:00Z", {"VERSION": "1.14.0\n"})
    components = {
        "nemo-toolkit": {"git": NEMO_URL, "ref": "main", "modules": ["nemo"]},
        "transformer-engine": {"git": MCORE_URL, "release_file": "VERSION", "modules": ["transformer_engine"]},
    }
    write_stack(
        nemo.project, "nemo", components, anchor="nemo-toolkit", as_of="now", requirements={"setuptools": SETUPTOOLS}
    )
    files = project_files("nemo-toolkit", "2.3.0", "nemo", ())
    entries = {"transformer_engine": {"repo": MCORE_URL, "ref": commit}}
    files["requirements/manifest.json"] = json.dumps({"vcs-dependencies": entries})
    upstream.nemo.commit("main", HEAD_DAY, files)
    return nemo


def test_of_two_ranges_that_exclude_each_other_the_upper_bound_gives_way(
    nemo: Any, tip: Callable[..., str], wheel: Callable[..., None]
) -> None:
    tip("import shared\nshared.new\n", "capped", "modern")
    wheel("capped", "1.0", requires=("shared<2",))
    wheel("modern", "1.0", requires=("shared>=2",))
    wheel("shared", "1.0")
    wheel("shared", "2.0", module="new = 1\n")
    nemo.run(*LOCK)
    lock = lock_of(nemo, "nemo")
    assert lock.deviations == (
        "shared >=2 instead of <2, which capped declares: modern needs it, and no release is in both ranges",
    )
    assert [text.partition(";")[0] for text in lock.overridden] == ["capped 1.0 declares shared<2"]


@pytest.mark.parametrize(
    ("later", "version"), [("", "2.0"), ("raise ImportError('symbol')\n", "1.13")], ids=["imports", "fails"]
)
def test_of_a_release_that_never_was_the_nearest_later_one_comes_first(
    engine: Any, wheel: Callable[..., None], later: str, version: str
) -> None:
    for release, module in (("1.12", ""), ("1.13", ""), ("2.0", later), ("2.1", later)):
        wheel("transformer_engine", release, OLD, module=module)
    engine.run(*LOCK)
    lock = lock_of(engine, "nemo")
    assert lock.components["transformer-engine"].version == version
    (deviation,) = lock.deviations
    assert deviation.startswith(f"transformer-engine =={version}.* instead of ")


@pytest.mark.slow
def test_what_the_lock_took_before_is_tried_first(engine: Any, upstream: Upstream, wheel: Callable[..., None]) -> None:
    """Where a commit touches a file with pins, and changes none; not where it pins another release."""
    for release, module in (("1.13", ""), ("2.0", "import gone\n"), ("2.1", "import gone\n")):
        wheel("transformer_engine", release, OLD, module=module)
    engine.run(*LOCK)
    first = lock_of(engine, "nemo")
    upstream.nemo.commit("main", "2025-03-21T12:00:00Z", {"setup.cfg": "# a comment\n"})
    again = engine.run(*LOCK).stderr
    assert again.count("trying ") == 1
    assert "trying what the existing lock takes" in again
    assert lock_of(engine, "nemo").deviating == first.deviating
    released = upstream.megatron.commit("engine", "2025-01-06T00:00:00Z", {"VERSION": "1.13.0\n"})
    manifest = {"vcs-dependencies": {"transformer_engine": {"repo": MCORE_URL, "ref": released}}}
    upstream.nemo.commit("main", "2025-03-22T12:00:00Z", {"requirements/manifest.json": json.dumps(manifest)})
    assert "the existing lock takes" not in engine.run(*LOCK).stderr
    assert lock_of(engine, "nemo").deviating == ()


def test_no_other_release_is_tried_against_syntax(engine: Any, upstream: Upstream, wheel: Callable[..., None]) -> None:
    """As of NeMo's tree of April 2025 on a base with Python 3.10: another base, or another day."""
    for release in ("1.12", "1.13", "2.0", "2.1"):
        wheel("transformer_engine", release, OLD)
    files = project_files("nemo-toolkit", "2.4.0", "nemo", ())
    files["nemo/__init__.py"] = "def f(:\n"
    upstream.nemo.commit("main", "2025-03-21T12:00:00Z", files)
    done = engine.run(*LOCK, status=5)
    assert done.stderr.count("trying transformer-engine") == 1
    assert "nemo of nemo-toolkit does not import: SyntaxError: invalid syntax" in error(done)["why"]


CONFLICT = (
    'summary = "x"\npackages = { helper = ">=2", packaging = ">=1" }\nevidence = "seen"\nfix = "Take helper<2."\n'
)


@pytest.mark.parametrize("named", ["", "--pin"], ids=["branch", "commit"])
def test_what_no_other_release_cures_is_not_met_with_other_releases(
    nemo: Any, tip: Callable[..., str], wheel: Callable[..., None], named: str
) -> None:
    """The tip calls what the pinned megatron-core lacks: of helper, which fails too, nothing else is tried."""
    wheel("helper", "1.0")
    wheel("helper", "2.0")
    (nemo.project / "envs/conflicts").mkdir(parents=True)
    (nemo.project / "envs/conflicts/helper.toml").write_text(CONFLICT)
    head = tip("import megatron.core.later\n", "helper")
    pins = ("--pin", "megatron-core=core_v0.12.0", "--name", "x")
    more = ("--pin", f"nemo-toolkit={head}") if named else ()
    done = nemo.run(*LOCK, *pins, *more, status=5)
    assert "there is no module megatron.core.later" in error(done)["why"]
    assert "trying helper" not in done.stderr
    assert done.stderr.count("* resolve nemo on") == 1


def test_failure_that_nothing_cures_says_what_was_tried(nemo: Any, upstream: Upstream) -> None:
    files = project_files("nemo-toolkit", "2.3.0", "nemo", ())
    files["nemo/__init__.py"] = "import nobody_has_this\n"
    files["requirements/manifest.json"] = manifest(upstream.commits["m2"])
    upstream.nemo.commit("lonely", HEAD_DAY, files)
    refused = error(nemo.run(*LOCK, "--pin", "nemo-toolkit=lonely", status=5))
    assert "No module named 'nobody_has_this'" in refused["why"]
    assert "Tried 2 times" in refused["why"]
    assert not (nemo.project / "lockfiles").exists()
