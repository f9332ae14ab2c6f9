"""The API check of a lock: it refuses what drifted, leaves out what the stack is not for, and reads wheels once."""

import zipfile
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from helpers.fake_git import FakeRepositories

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.models import Component
from envbuild.catalog.site import load_site
from envbuild.core.digests import sha256_file
from envbuild.core.errors import NetworkError
from envbuild.core.progress import SilentReporter
from envbuild.drift import Finding, FindingKind, Moment, Severity, read_finding
from envbuild.lock.checks import api_drift
from envbuild.lock.checks.api_drift import check_api
from envbuild.lock.context import LockContext, Repositories
from envbuild.store.local import LocalStore

BASE = Catalog.open(data_root()).base("debian12")
ASKS = "from lib.core import gone\n"


def wheel(folder, name, files, version="1.0"):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
        for file, text in files.items():
            archive.writestr(file, text)
    return {"path": path.name, "hash": sha256_file(path)}


@pytest.fixture
def work(tmp_path) -> LockContext:
    store = LocalStore(tmp_path / "store", SilentReporter())
    return LockContext(
        folder=tmp_path,
        log=tmp_path / "log",
        site=load_site(),
        store=store,
        reporter=SilentReporter(),
        repositories=Repositories(store, SilentReporter()),
    )


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


def chosen(**spec):
    return {
        "app": SimpleNamespace(spec=Component(uses=("lib",), **spec), commit=None),
        "lib": SimpleNamespace(spec=Component(), commit=None),
    }


def check(packages, work, **spec):
    return list(check_api(chosen(**spec), packages, BASE, work, FakeRepositories()))


def test_what_is_gone_is_a_finding_with_file_and_line(packages, work):
    (finding,) = check(packages, work)
    assert finding.code == "api-drift"
    assert finding.what.startswith("app 1.0, app/__init__.py:1: ")
    assert "gone" in finding.what


def test_folders_and_files_that_the_stack_is_not_for_are_left_out(packages, work):
    assert check(packages, work, unused=("app",)) == []
    assert check(packages, work, unused=("app/__init__.py",)) == []
    assert check(packages, work, unused=("ap",)) != []


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
    monkeypatch.setattr(api_drift, "find_drift_apart", lambda wheels, pairs, folder: {pair: [] for pair in pairs})
    assert check(packages, work) == []


def test_reading_ahead_leaves_the_answer_in_the_store(packages, work, monkeypatch):
    project = SimpleNamespace(chosen=chosen(), base=BASE)
    assert api_drift.read_names(project) == ["app", "lib"]
    api_drift.read_ahead(project, packages, work, FakeRepositories())
    monkeypatch.setattr(api_drift, "find_drift_apart", lambda *asked: pytest.fail("compared again"))
    assert len(check(packages, work)) == 1


def test_reading_ahead_says_nothing_of_what_fails(packages, work, monkeypatch):
    def unreachable(*arguments):
        raise NetworkError("no index", why="w", fix="f")

    monkeypatch.setattr(api_drift, "fetch_file", unreachable)
    api_drift.read_ahead(SimpleNamespace(chosen=chosen(), base=BASE), packages, work, FakeRepositories())


def test_finding_comes_back_from_json_as_it_was():
    finding = Finding(
        kind=FindingKind.MISSING_NAME,
        consumer="a 1",
        provider="b 2",
        file="a.py",
        line=3,
        name="b.c",
        detail="d",
        severity=Severity.GUARDED,
        why="w",
        at=Moment.FUNCTION,
        lost=("x", "y"),
    )
    assert read_finding({**asdict(finding), "lost": ["x", "y"], "kind": "missing-name"}) == finding
