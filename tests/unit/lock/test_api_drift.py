"""The API check of a lock: it refuses what drifted, leaves out what the stack is not for, and reads wheels once."""

import json
import zipfile
from concurrent.futures import Future
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.locks import lock_context, resolved_package

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.stack import Component
from envbuild.core.digests import sha256_file
from envbuild.core.errors import NetworkError
from envbuild.drift import Finding, Moment, read_finding, worker
from envbuild.drift.__main__ import compare
from envbuild.drift.findings import FindingKind, Severity
from envbuild.git.refs import Commit, CommitKind
from envbuild.lock.checks import api_drift
from envbuild.lock.checks.api_drift import check_api
from envbuild.lock.components.models import Chosen, DecidedBy
from envbuild.lock.context import LockContext
from envbuild.lock.project.pyproject import Project
from envbuild.lock.uv.resolution import Packages

BASE = Catalog.open(data_root()).base("debian12")
ASKS = "from lib.core import gone\n"


def wheel(folder, name, files, version="1.0"):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
        for file, text in files.items():
            archive.writestr(file, text)
    return {"path": path.name, "hash": sha256_file(path)}


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """Sources are read in this process; that another one reads the same is in ``drift.test_worker``."""

    def read(argv, *, what, options):
        Path(argv[-1]).write_text(json.dumps(compare(json.loads(options.stdin))))

    monkeypatch.setattr(worker, "run", read)


@pytest.fixture
def work(tmp_path) -> LockContext:
    return lock_context(tmp_path)


@pytest.fixture
def packages(tmp_path):
    return {
        "app": {"name": "app", "version": "1.0", "wheels": [wheel(tmp_path, "app", {"app/__init__.py": ASKS})]},
        "lib": {
            "name": "lib",
            "version": "1.0",
            "wheels": [wheel(tmp_path, "lib", {"lib/__init__.py": "", "lib/core/__init__.py": "here = 1\n"})],
        },
    }


def resolved(packages):
    return {name: resolved_package(table) for name, table in packages.items()}


def project(commit=None, pinned_by="", release_of=None, **spec):
    chosen = {
        "app": SimpleNamespace(spec=Component(uses=("lib",), **spec), commit=commit, git="https://x/app"),
        "lib": Chosen(
            name="lib",
            spec=Component(),
            asked="1.0",
            origin=DecidedBy.UPSTREAM,
            because="b",
            pinned_by=pinned_by,
            release_of=release_of,
        ),
    }
    return Project(name="s", base=BASE, torch_build="index", as_of="2026-01-02T00:00:00Z", chosen=chosen)


def read_ahead(packages, work, **spec):
    files: Future[Packages] = Future()
    files.set_result(resolved(packages))
    with api_drift.reading_ahead(project(**spec), files, work) as reading:
        reading.result()


def check(packages, work, **spec):
    return list(check_api(project(**spec), resolved(packages), work))


def test_what_is_gone_is_a_finding_with_file_and_line(packages, work):
    (finding,) = check(packages, work)
    assert finding.code == "api-drift"
    assert finding.what.startswith("app 1.0, app/__init__.py:1: ")
    assert "gone" in finding.what


def test_folders_and_files_that_the_stack_is_not_for_are_left_out(packages, work):
    assert check(packages, work, unused=("app",)) == []
    assert check(packages, work, unused=("app/__init__.py",)) == []
    assert check(packages, work, unused=("ap",)) != []


@pytest.mark.parametrize(("brings", "warning"), [("nvidia-modelopt", False), ("model", True)])
def test_code_that_needs_a_module_which_nothing_brings_warns(packages, work, tmp_path, brings, warning):
    text = "try:\n    import modelopt\n    HAVE = True\nexcept ImportError:\n    HAVE = False\nif HAVE:\n    " + ASKS
    packages["app"]["wheels"] = [wheel(tmp_path, "app", {"app/__init__.py": text}, "1.1")]
    packages[brings] = {"name": brings, "version": "1.0"}
    (finding,) = check(packages, work)
    assert finding.warning is warning
    assert ("runs only with modelopt, which no package of the lock brings" in finding.what) is warning


def test_id_stays_where_lines_and_versions_change(packages, work, tmp_path):
    (first,) = check(packages, work)
    packages["app"]["wheels"] = [wheel(tmp_path, "app", {"app/__init__.py": f"\n\n{ASKS}import lib.core.off\n"}, "1.1")]
    packages["app"]["version"] = "1.1"
    same, other = check(packages, work)
    assert (first.what != same.what, first.id == same.id, first.id != other.id) == (True, True, True)
    assert first.packages == ("lib", "app")


@pytest.mark.parametrize(("imports", "warning"), [("import app", True), ("import app.other", False)])
def test_component_that_another_uses_is_reached_through_it(packages, work, tmp_path, imports, warning):
    files = {"app/__init__.py": "", "app/other.py": ASKS}
    packages["app"]["wheels"] = [wheel(tmp_path, "app", files, "1.1")]
    packages["top"] = {
        "name": "top",
        "version": "1.0",
        "wheels": [wheel(tmp_path, "top", {"top/__init__.py": imports})],
    }
    whole = project()
    whole.chosen["top"] = SimpleNamespace(spec=Component(uses=("app",), modules=("top",)), commit=None)
    (finding,) = check_api(whole, resolved(packages), work)
    assert finding.warning is warning
    # A user that cannot be read may use anything.
    packages["top"]["wheels"] = []
    (finding,) = check_api(whole, resolved(packages), work)
    assert not finding.warning


@pytest.mark.parametrize(
    ("code", "pinned_by", "warning"),
    [
        ("import lib.core\n\ndef use():\n    return lib.core.gone()\n\nuse()\n", "app", True),
        ("import lib.core\n\ndef use():\n    return lib.core.gone()\n\nuse()\n", "other", False),
        # That would fail for upstream, too: then it is not what upstream has.
        (ASKS, "app", False),
    ],
)
def test_what_upstreams_own_commit_lacks_when_called_warns(packages, work, tmp_path, code, pinned_by, warning):
    packages["app"]["wheels"] = [wheel(tmp_path, "app", {"app/__init__.py": code}, "1.1")]
    (finding,) = check(packages, work, pinned_by=pinned_by)
    assert finding.warning is warning
    assert ("(upstream's own: app pins this commit of lib)" in finding.what) is warning


@pytest.mark.parametrize(
    ("code", "at_commit", "warning"),
    [
        ("import lib.core\n\ndef use():\n    return lib.core.gone()\n\nuse()\n", "", True),
        ("import lib.core\n\ndef use():\n    return lib.core.gone()\n\nuse()\n", "def gone(): pass\n", False),
        (ASKS, "", False),
    ],
)
def test_what_the_pinned_commit_lacks_like_the_release_warns(
    packages, work, tmp_path, monkeypatch, code, at_commit, warning
):
    """As Transformer Engine, of which upstream pins commits and a release is taken."""
    packages["app"]["wheels"] = [wheel(tmp_path, "app", {"app/__init__.py": code}, "1.1")]
    file = wheel(tmp_path, "lib", {"lib/__init__.py": "", "lib/core/__init__.py": at_commit}, "0.9")
    monkeypatch.setattr(api_drift._Sources, "_of_tree", lambda sources, tree: tmp_path / file["path"])
    commit = Commit(
        sha="c" * 40, committed_at=datetime(2025, 1, 1, tzinfo=timezone.utc), kind=CommitKind.COMMIT, name="c"
    )
    (finding,) = check(packages, work, release_of=("https://x/lib", commit))
    assert finding.warning is warning
    assert ("(the commit of lib that upstream pins lacks it, too)" in finding.what) is warning


def test_component_without_a_wheel_for_the_base_is_not_checked(packages, work):
    packages["lib"]["wheels"][0]["path"] = "lib-1.0-cp311-cp311-win_amd64.whl"
    assert check(packages, work) == []


def test_a_pair_of_wheels_is_compared_once(packages, work, monkeypatch):
    first = check(packages, work)
    monkeypatch.setattr(api_drift, "find_drift_apart", lambda *asked: pytest.fail("compared again"))
    assert check(packages, work) == first


def test_another_wheel_is_compared_anew(packages, work, tmp_path):
    assert check(packages, work) != []
    files = {"lib/__init__.py": "", "lib/core/__init__.py": "gone = 1\n"}
    packages["lib"]["wheels"] = [wheel(tmp_path, "lib", files, "1.1")]
    assert check(packages, work) == []


def test_another_check_compares_anew(packages, work, monkeypatch):
    check(packages, work)
    monkeypatch.setattr(api_drift, "_code_digest", lambda: "sha256:other")
    monkeypatch.setattr(api_drift, "find_drift_apart", lambda wheels, asked, folder: {pair: [] for pair in asked.pairs})
    assert check(packages, work) == []


def test_reading_ahead_leaves_the_answer_in_the_store(packages, work, monkeypatch):
    assert project().released_users() == ["app", "lib"]
    read_ahead(packages, work)
    monkeypatch.setattr(api_drift, "find_drift_apart", lambda *asked: pytest.fail("compared again"))
    assert len(check(packages, work)) == 1


def test_commits_are_read_ahead_too(packages, work, monkeypatch, tmp_path):
    at_commit = tmp_path / packages.pop("app")["wheels"][0]["path"]
    monkeypatch.setattr(api_drift._Sources, "_of_tree", lambda sources, tree: at_commit)
    spec = {"commit": SimpleNamespace(sha="c" * 40), "modules": ("app",)}
    read_ahead(packages, work, **spec)
    monkeypatch.setattr(api_drift, "find_drift_apart", lambda *asked: pytest.fail("compared again"))
    assert len(check(packages, work, **spec)) == 1


def test_failed_reading_ahead_leaves_the_failure_to_the_check(packages, work, monkeypatch):
    def unreachable(*arguments):
        raise NetworkError("no index", why="w", fix="f")

    with monkeypatch.context() as offline:
        offline.setattr(api_drift, "fetch_file", unreachable)
        read_ahead(packages, work)
    assert len(check(packages, work)) == 1


def test_finding_comes_back_from_json_as_it_was():
    fields = {"consumer": "a 1", "provider": "b 2", "file": "a.py", "line": 3, "name": "b.c", "detail": "d", "why": "w"}
    finding = Finding(
        kind=FindingKind.MISSING_NAME, severity=Severity.GUARDED, at=Moment.FUNCTION, lost=("x", "y"), **fields
    )
    assert read_finding(json.loads(json.dumps(asdict(finding)))) == finding
