"""Whether committed locks are still what their inputs give."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.fake_git import TIP, FakeRepositories
from helpers.locks import lock_context, make_lock
from helpers.processes import wait_until
from helpers.stack_files import BASE, write_base, write_stack

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.data import data_root
from envbuild.cli.main import run
from envbuild.core.errors import EnvbuildError, NetworkError, UsageError
from envbuild.core.process import run as run_program
from envbuild.core.progress import SilentReporter
from envbuild.lock.inputs.pins import foreign_pins, variant_name
from envbuild.lock.inputs.request import LockRequest, inputs_digest
from envbuild.lock.lock import LockResult
from envbuild.lock.models import Inputs, LockedBase, LockedComponent
from envbuild.lock.project_locks import check_one, committed, every_selection, lock_all

URL = "https://x/lib"


@pytest.fixture
def project(tmp_path) -> Path:
    write_base(tmp_path)
    write_stack(tmp_path, "s", {"lib": {"git": URL, "ref": "main"}}, anchor="lib")
    return tmp_path


def lock(project: Path, *, commit: str | None = None, pins: dict | None = None, name: str = "s") -> Path:
    selection = Selection(Catalog.open(project), "s", BASE, "cpu")
    path = project / "lockfiles" / name / BASE
    sha = "sha256:" + "0" * 64
    request = LockRequest(pins=pins or {})
    inputs = Inputs(
        digest=inputs_digest(selection, request), stack_digest=sha, base_digest=sha, torch_build="cpu", uv="0",
        as_of="2026-01-02T03:04:05Z", pins=request.pins,
    )  # fmt: skip
    made = make_lock(path)
    component = made.components["torch"].model_dump()
    if commit:
        component |= {"git": URL, "commit": commit, "ref_kind": "branch", "follows": True, "asked": "git:2.3"}
    base = LockedBase(**(made.base.model_dump() | {"name": BASE}))
    make_lock(
        path, stack="s", inputs=inputs, base=base, components=made.components | {"torch": LockedComponent(**component)},
        **_digest(made, base, LockedComponent(**component)),
    )  # fmt: skip
    return path


def _digest(made, base, component) -> dict:
    from envbuild.lock.lockfile import content_digest

    components = made.components | {"torch": component}
    return {"digest": content_digest(base.definition_digest, made.torch, components, made.phases)}


def problem(path: Path, project: Path, repositories: object = None) -> str:
    context = lock_context(project, repositories or FakeRepositories())
    return check_one(path, Catalog.open(project), context).problem


def test_a_lock_that_is_what_its_inputs_give(project):
    assert problem(lock(project), project) == ""
    assert problem(lock(project, pins={"lib": "1.0"}, name="variant"), project) == ""
    assert committed(project) == [project / "lockfiles/s" / BASE, project / "lockfiles/variant" / BASE]


def test_a_lock_whose_stack_changed(project):
    path = lock(project)
    write_stack(project, "s", {"lib": {"version": ">=2"}})
    assert "changed since it was made" in problem(path, project)


def test_a_lock_whose_stack_or_base_is_gone(project):
    path = lock(project)
    write_base(project, "another")
    write_stack(project, "s", {"lib": {}}, base="another")
    assert problem(path, project) == f"stack s is not meant for base {BASE} any more"
    (project / "envs/stacks/s.toml").unlink()
    assert "there is no stack 's'" in problem(path, project)


def test_a_lock_changed_by_hand(project):
    path = lock(project)
    (path / "main.txt").write_text("lib==666\n")
    assert "main.txt" in problem(path, project)


def test_a_branch_that_moved(project):
    assert problem(lock(project, commit=TIP), project) == ""
    assert problem(lock(project, commit="b" * 40), project) == (
        "torch: branch git:2.3 moved from bbbbbbbbbbbb to aaaaaaaaaaaa"
    )


def test_the_branch_is_asked_for_by_its_name(project):
    repositories = FakeRepositories()
    problem(lock(project, commit=TIP), project, repositories)
    assert repositories.open(URL).asked_for == ["2.3"]
    assert repositories.open(URL).resolved == [], "nothing is fetched for it"


def test_unreachable_repository_is_a_network_error_of_the_check(project):
    class Unreachable:
        def open(self, url):
            raise NetworkError(f"cannot reach {url}")

    with pytest.raises(NetworkError):
        problem(lock(project, commit=TIP), project, Unreachable())


def test_every_stack_on_every_base_once(project, monkeypatch):
    write_base(project, "another")
    builds = [{"target": "cpu", "bases": [BASE, "another"]}, {"target": "h100", "bases": [BASE]}]
    write_stack(project, "s", {"lib": {}}, builds=builds)
    actual = [
        (entry.stack_name, entry.base_name, entry.target_name) for entry in every_selection(Catalog.open(project))
    ]
    assert [entry for entry in actual if entry[0] == "s"] == [("s", BASE, "cpu"), ("s", "another", "cpu")]


def lock_all_of(project):
    """Lock the stacks of a project alone, without the shipped ones."""
    for kind in ("targets", "matrices"):
        shutil.copytree(data_root() / "envs" / kind, project / "envs" / kind)
    lock_all(Catalog((project / "envs",)), project, lock_context(project), lambda _: SilentReporter(), upgrade=False)


def test_one_lock_that_fails_does_not_keep_the_others(project, monkeypatch):
    write_stack(project, "t", {"lib": {}})
    asked = []

    def lock_stack(selection, request, options, context):
        asked.append((selection.stack_name, options.path))
        if selection.stack_name == "s":
            raise NetworkError("no network", why="w")
        return LockResult(None, built=True)

    monkeypatch.setattr("envbuild.lock.project_locks.lock_stack", lock_stack)
    with pytest.raises(NetworkError, match="1 of 2 locks failed") as caught:
        lock_all_of(project)
    assert caught.value.why == f"s on {BASE}: no network\nw"
    assert sorted(asked) == [(name, project / "lockfiles" / name / BASE) for name in "st"]


def test_interruption_ends_the_programs_of_the_locks(project, monkeypatch):
    ended = []

    def lock_stack(*_):
        try:
            run_program(["sh", "-c", f"touch {project}/began; exec sleep 5"], what="sleep")
        except EnvbuildError as error:
            ended.append(error.what)
            raise

    class Interrupted(ThreadPoolExecutor):
        def map(self, *work):
            super().map(*work)
            wait_until((project / "began").exists)
            raise KeyboardInterrupt

    monkeypatch.setattr("envbuild.lock.project_locks.lock_stack", lock_stack)
    monkeypatch.setattr("envbuild.core.background.ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock_all_of(project)
    assert ended == ["cannot sleep: sh was ended by SIGTERM"]


def stack(project):
    return Catalog.open(project).stack("s")


def test_pins_equal_to_the_stack_are_ignored(project):
    write_stack(project, "s", {"my-lib": {"git": URL, "ref": "main"}, "dep": {"version": "==1.0"}})
    assert foreign_pins(stack(project), {"My_Lib": "main", "dep": "1.0"}) == {}
    pins = foreign_pins(stack(project), {"My_Lib": "v1", "dep": "1.1", "Unknown": "2"})
    assert pins == {"my-lib": "v1", "dep": "1.1", "Unknown": "2"}


def test_pin_equal_to_the_stack_counts_next_to_another_pin(project):
    components = {"my-lib": {"git": URL, "ref": "main"}, "dep": {"version": "==1.0"}, "other": {}}
    write_stack(project, "s", components, anchor="my-lib")
    # What the pinned one declares of dep would win over the stack's file, and the user said more.
    assert foreign_pins(stack(project), {"other": "2", "dep": "1.0"}) == {"other": "2", "dep": "1.0"}
    # A pin of the anchor says as of when, too.
    assert foreign_pins(stack(project), {"other": "2", "my-lib": "main"}) == {"other": "2"}


@pytest.mark.parametrize(
    ("pins", "name", "expected"),
    [
        ({}, None, "s"),
        ({"lib": "v2.3.0"}, None, "s-v2.3.0"),
        ({"lib": "Feature/X y"}, None, "s-feature-x-y"),
        ({"lib": ">=2,<3"}, None, "s-2-3"),
        ({"lib": "v1", "dep": "2"}, "mine", "mine"),
        ({}, "mine", "mine"),
    ],
)
def test_name_of_a_variant(project, pins, name, expected):
    assert variant_name("s", stack(project), pins, name) == expected


def test_other_pins_need_a_name(project):
    with pytest.raises(UsageError, match="pins need a name"):
        variant_name("s", stack(project), {"dep": "1"}, None)
    with pytest.raises(UsageError, match="not a valid name of a lock"):
        variant_name("s", stack(project), {}, "../x")


# ---- what `lock --check` says


def checked(project, monkeypatch, capsys):
    """The error of `lock --check` in a project."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(project / "cache"))
    assert run(["lock", "--check", "--json", "--quiet"]) == 5
    return json.loads(capsys.readouterr().out)["error"]


def test_check_of_a_changed_lock_advises_upgrade(project, monkeypatch, capsys):
    path = lock(project)
    (path / "main.txt").write_text("changed==1\n")
    fix = checked(project, monkeypatch, capsys)["fix"]
    assert f"Changed or damaged after it was made: lockfiles/s/{BASE}. Restore it" in fix
    assert "with --upgrade" in fix
    assert "Lock them again" not in fix
    lock(project, name="other")
    write_stack(project, "s", {"lib": {"version": "==1.0"}}, anchor="lib")
    fix = checked(project, monkeypatch, capsys)["fix"].splitlines()
    assert [line.split(" ")[0] for line in fix] == ["Lock", "Changed"]


@pytest.mark.parametrize(
    "words", [("--check", "--all"), ("--check", "--diff"), ("--torch-build", ""), ("--out", "x", "--name", "y")]
)
def test_exclusive_options_are_refused_with_the_reason(project, monkeypatch, capsys, words):
    monkeypatch.chdir(project)
    assert run(["lock", *words, "--json", "--quiet"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["why"]
    assert error["fix"]
