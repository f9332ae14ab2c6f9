"""Refs become commits with the real git: file:// repositories, a URL rewrite, and a git daemon that fails."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from helpers.git_repos import GitServer, History, Submodule, Symlink, git, git_server, git_settings
from helpers.processes import wait_until

import envbuild
from envbuild.core.errors import ConfigurationError, InternalError, MachineError, NetworkError
from envbuild.core.locks import exclusive
from envbuild.git.client import GitSettings
from envbuild.git.commit import Commit, CommitKind
from envbuild.git.refs import GitRef
from envbuild.git.repository import GitRepository, last_second
from envbuild.store.local import LocalStore

PUBLIC = "https://git.example.invalid/nemo"
# Longer than a list of refs or a greeting of these small repositories, shorter than a pack of `long_history`.
INSIDE_A_PACK = 3000


class Notes:
    """A reporter that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def update(self, text: str) -> None:
        pass

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        yield


@pytest.fixture(autouse=True)
def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git without this machine's settings."""
    for name in os.environ:
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def reporter() -> Notes:
    return Notes()


@pytest.fixture
def store(tmp_path: Path, reporter: Notes) -> LocalStore:
    return LocalStore(tmp_path / "cache", reporter)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


@pytest.fixture
def history(served: Path) -> History:
    return History(served / "nemo")


@pytest.fixture
def server(served: Path) -> Iterator[GitServer]:
    with git_server(served) as running:
        yield running


@pytest.fixture
def repository(history: History, store: LocalStore, reporter: Notes, monkeypatch: pytest.MonkeyPatch) -> GitRepository:
    """The history behind a public address that only git's settings lead to."""
    git_settings(monkeypatch, {f"url.file://{history.path}.insteadOf": PUBLIC})
    return opened(PUBLIC, store, reporter)


def opened(url: str, store: LocalStore, reporter: Notes, **settings: Any) -> GitRepository:
    """A repository, without a pause before the second attempt."""
    return GitRepository(url, store, reporter, GitSettings(pause_seconds=0.0, **settings))


def again(repository: GitRepository, reporter: Notes | None = None, *, offline: bool = False) -> GitRepository:
    """The same repository as another run sees it."""
    return opened(repository.url, repository._store, reporter or Notes(), offline=offline)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


def long_history(history: History, commits: int = 30) -> str:
    """A branch main whose directories alone make some kilobytes."""
    for number in range(commits):
        history.commit("main", f"2025-01-01T00:00:{number:02}Z", {f"file-{os.urandom(60).hex()}": os.urandom(2000)})
    return git(history.path, "rev-parse", "main")


def blobs_here(store: LocalStore) -> int:
    (folder,) = (store.root / "git").iterdir()
    listing = git(folder, "cat-file", "--batch-check", "--batch-all-objects")
    return sum(" blob " in line for line in listing.splitlines())


# ---- what a ref means


def test_branch_is_its_tip_with_the_committers_date_in_utc(history, repository, reporter):
    history.commit("main", "2025-07-01T00:00:00Z")
    tip = history.commit("main", "2025-07-02T08:30:00+09:00", authored="2020-01-01T00:00:00Z")
    assert repository.resolve(GitRef("main")) == Commit(
        sha=tip, committed_at=utc("2025-07-01T23:30:00"), kind=CommitKind.BRANCH, name="main"
    )
    assert repository.resolve(GitRef("main")).committed_at.utcoffset() == timedelta(0)
    assert reporter.notes == []


def test_as_of_a_day_is_the_last_first_parent_commit_until_its_end(history, repository):
    first = history.commit("main", "2025-07-27T12:00:00Z")
    side = history.commit("side", "2025-07-28T13:00:00Z", {"a": "1"}, parents=(first,))
    last_of_day = history.commit("main", "2025-07-28T23:59:59Z", authored="2025-08-05T00:00:00Z")
    side = history.commit("side", "2025-07-28T23:59:59Z", {"a": "2"})
    merge = history.commit("main", "2025-07-29T00:00:00Z", {"a": "2"}, parents=(last_of_day, side))
    tip = history.commit("main", "2025-07-30T00:00:00Z", authored="2025-07-01T00:00:00Z")
    as_of = {day: repository.resolve(GitRef("main"), date(2025, 7, day)).sha for day in (27, 28, 29, 30, 31)}
    assert as_of == {27: first, 28: last_of_day, 29: merge, 30: tip, 31: tip}


def test_as_of_skips_a_merged_branch_that_is_younger_than_the_first_parent(history, repository):
    """`git log --before` without --first-parent gives the side's commit."""
    first = history.commit("main", "2025-07-01T00:00:00Z")
    side = history.commit("side", "2025-07-10T00:00:00Z", {"a": "1"}, parents=(first,))
    history.commit("main", "2025-07-20T00:00:00Z", {"a": "1"}, parents=(first, side))
    assert repository.resolve(GitRef("main"), date(2025, 7, 15)).sha == first


def test_as_of_a_moment_is_inclusive_and_in_any_zone(history, repository):
    first = history.commit("main", "2025-07-28T10:00:00Z")
    second = history.commit("main", "2025-07-28T12:00:00Z")
    noon = utc("2025-07-28T12:00:00")
    assert repository.resolve(GitRef("main"), noon).sha == second
    assert repository.resolve(GitRef("main"), noon - timedelta(seconds=1)).sha == first
    for hours in (-9, 9):
        zone = timezone(timedelta(hours=hours))
        assert repository.resolve(GitRef("main"), noon.astimezone(zone)).sha == second
        assert repository.resolve(GitRef("main"), (noon - timedelta(seconds=1)).astimezone(zone)).sha == first


def test_as_of_gives_the_same_commit_on_another_day(history, repository):
    wanted = history.commit("main", "2025-07-28T10:00:00Z")
    history.commit("main", "2025-07-29T10:00:00Z")
    before = repository.resolve(GitRef("main"), date(2025, 7, 28))
    tip = history.commit("main", "2025-08-10T10:00:00Z")
    assert again(repository).resolve(GitRef("main"), date(2025, 7, 28)) == before
    assert before.sha == wanted
    assert again(repository).resolve(GitRef("main")).sha == tip


def test_as_of_before_the_branch_began(history, repository):
    first = history.commit("main", "2025-07-28T10:00:00Z")
    history.commit("main", "2025-07-29T10:00:00Z")
    with pytest.raises(ConfigurationError, match="no commit as old as 2025-07-27 23:59:59 UTC") as caught:
        repository.resolve(GitRef("main"), date(2025, 7, 27))
    assert first in caught.value.why
    assert "2025-07-28 10:00:00" in caught.value.why


def test_last_second_refuses_a_moment_without_a_zone():
    with pytest.raises(InternalError):
        last_second(datetime(2025, 7, 28))  # noqa: DTZ001
    assert last_second(date(2024, 12, 31)) == utc("2024-12-31T23:59:59")


@pytest.mark.parametrize("annotated", [False, True])
def test_tag_is_its_commit_whatever_as_of_says(history, repository, annotated):
    wanted = history.commit("main", "2025-07-28T10:00:00Z")
    history.commit("main", "2025-08-28T10:00:00Z")
    history.tag("core_v0.19.0", wanted, annotated=annotated)
    commit = repository.resolve(GitRef("core_v0.19.0"), date(2020, 1, 1))
    assert (commit.sha, commit.kind, commit.name) == (wanted, CommitKind.TAG, "core_v0.19.0")
    assert commit.describe == "core_v0.19.0"


def test_full_and_short_commits(history, repository):
    wanted = history.commit("main", "2025-07-28T10:00:00Z")
    history.commit("side/branch", "2025-08-28T10:00:00Z")
    history.commit("main", "2025-08-28T10:00:00Z")
    for digits in (wanted, wanted.upper(), wanted[:7], wanted[:12].upper()):
        commit = again(repository).resolve(GitRef(digits), date(2020, 1, 1))
        assert (commit.sha, commit.kind, commit.name) == (wanted, CommitKind.COMMIT, digits)


def test_short_commit_may_be_on_any_branch(history, repository):
    history.commit("main", "2025-07-28T10:00:00Z")
    repository.resolve(GitRef("main"))
    wanted = history.commit("side/branch", "2025-08-28T10:00:00Z")
    assert again(repository).resolve(GitRef(wanted[:8])).sha == wanted


def test_full_commit_that_no_ref_points_at(history, repository):
    wanted = history.commit("gone", "2025-07-28T10:00:00Z")
    history.commit("main", "2025-07-28T10:00:00Z")
    history.branch("gone", None)
    assert repository.resolve(GitRef(wanted)).sha == wanted


def test_full_hash_of_a_tag_object_is_its_commit(history, repository):
    wanted = history.commit("main", "2025-07-28T10:00:00Z")
    history.tag("v1", wanted, annotated=True)
    commit = repository.resolve(GitRef(git(history.path, "rev-parse", "refs/tags/v1")))
    assert (commit.sha, commit.kind) == (wanted, CommitKind.COMMIT)


def test_tag_of_a_file_is_refused(history, repository):
    history.commit("main", "2025-07-28T10:00:00Z", {"key": "a public key"})
    history.tag("key", git(history.path, "rev-parse", "main:key"))
    with pytest.raises(ConfigurationError, match="is not a commit") as caught:
        repository.resolve(GitRef("key"))
    assert "blob" in caught.value.why


def test_short_commit_that_is_not_the_only_one(history, repository):
    one, two = history.colliding("commit", "commit")
    history.branch("one", one)
    history.branch("two", two)
    with pytest.raises(ConfigurationError, match="is the beginning of 2 commits") as caught:
        repository.resolve(GitRef(one[:7]))
    assert one in caught.value.why
    assert two in caught.value.why
    assert repository.resolve(GitRef(one[:16])).sha == one


def test_short_commit_does_not_depend_on_what_was_fetched_before(history, repository):
    one, two = history.colliding("commit", "commit")
    history.branch("one", one)
    history.branch("two", two)
    repository.resolve(GitRef("one"))
    with pytest.raises(ConfigurationError, match="is the beginning of 2 commits"):
        again(repository).resolve(GitRef(one[:7]))


def test_short_commit_is_not_ambiguous_with_a_directory(history, repository):
    commit, tree = history.colliding("commit", "tree")
    history.branch("one", commit)
    who = "A <a@x> 1700000000 +0000"
    body = f"tree {tree}\nauthor {who}\ncommitter {who}\n\nx\n"
    history.branch("two", git(history.path, "hash-object", "-t", "commit", "-w", "--stdin", stdin=body.encode()))
    assert repository.resolve(GitRef(commit[:7])).sha == commit


def test_branch_of_hex_digits_wins_over_a_short_commit(history, repository):
    first = history.commit("main", "2025-07-28T10:00:00Z")
    tip = history.commit(first[:7], "2025-07-29T10:00:00Z")
    assert repository.resolve(GitRef(first[:7])).sha == tip
    assert repository.resolve(GitRef(first[:8])).sha == first


def test_name_of_a_branch_and_a_tag_is_refused_until_it_says_which(history, repository):
    tagged = history.commit("main", "2025-07-28T10:00:00Z")
    tip = history.commit("v1", "2025-07-29T10:00:00Z", parents=(tagged,))
    history.tag("v1", tagged)
    with pytest.raises(ConfigurationError, match="both a branch and a tag") as caught:
        repository.resolve(GitRef("v1"))
    assert tagged in caught.value.why
    assert "refs/heads/v1 or refs/tags/v1" in caught.value.fix
    assert repository.resolve(GitRef("refs/tags/v1")).sha == tagged
    branch = repository.resolve(GitRef("refs/heads/v1"))
    assert (branch.sha, branch.kind, branch.name) == (tip, CommitKind.BRANCH, "v1")


def test_unknown_ref_lists_at_most_five_near_ones(history, repository):
    commit = history.commit("main", "2025-07-28T10:00:00Z")
    for name in ("v2.3.0", "v2.3.1", "v2.3.2", "v2.3.3", "v2.3.4", "v2.3.5"):
        history.tag(name, commit)
    with pytest.raises(ConfigurationError, match=r"has no branch or tag 'v2\.3\.9'") as caught:
        repository.resolve(GitRef("v2.3.9"))
    assert caught.value.exit_code == 3
    assert caught.value.fix.count("v2.3.") == 5
    assert "1 branches and 6 tags" in caught.value.why
    with pytest.raises(ConfigurationError) as caught:
        repository.resolve(GitRef("refs/heads/mian"))
    assert "Similar names: main." in caught.value.fix


@pytest.mark.parametrize("digits", ["deadbee", "1234567", "0123456789" * 4])
def test_unknown_commit(history, repository, digits):
    history.commit("main", "2025-07-28T10:00:00Z")
    with pytest.raises(ConfigurationError, match=f"has no commit '{digits}'") as caught:
        repository.resolve(GitRef(digits))
    assert ("version:" in caught.value.fix) is (digits == "1234567")


def test_nearest_tag_is_the_fewest_steps_away(history, repository):
    old = history.commit("main", "2025-07-01T00:00:00Z")
    history.tag("v1", old, annotated=True)
    middle = history.commit("main", "2025-07-02T00:00:00Z")
    side = history.commit("side", "2025-07-03T00:00:00Z", {"a": "1"}, parents=(old,))
    history.tag("v2rc1", side)
    history.tag("v2", side)
    merge = history.commit("main", "2025-07-04T00:00:00Z", {"a": "1"}, parents=(middle, side))
    foreign = history.commit("other", "2025-07-05T00:00:00Z", parents=(merge,))
    history.tag("v3", foreign)
    commit = repository.resolve(GitRef("main"))
    assert (commit.nearest_tag, commit.commits_since_tag) == ("v2", 2)
    assert commit.describe == f"v2-2-g{merge[:10]}"
    assert repository.resolve(GitRef("main"), date(2025, 7, 2)).describe == f"v1-1-g{middle[:10]}"
    later = history.commit("main", "2025-07-06T00:00:00Z", parents=(side, middle))
    assert again(repository).resolve(GitRef("main")).describe == f"v2-2-g{later[:10]}"


def test_branch_that_became_a_folder_or_was_rewritten(history, repository):
    first = history.commit("work", "2025-07-01T00:00:00Z")
    assert repository.resolve(GitRef("work")).sha == first
    history.branch("work", None)
    below = history.commit("work/part", "2025-07-02T00:00:00Z")
    assert again(repository).resolve(GitRef("work/part")).sha == below
    other = history.commit("work/part", "2025-07-03T00:00:00Z", parents=())
    assert again(repository).resolve(GitRef("work/part")).sha == other


def test_one_object_sees_one_state(history, repository):
    first = history.commit("main", "2025-07-01T00:00:00Z")
    assert repository.resolve(GitRef("main")).sha == first
    second = history.commit("main", "2025-07-02T00:00:00Z")
    assert repository.resolve(GitRef("main")).sha == first
    assert again(repository).resolve(GitRef("main")).sha == second


@pytest.mark.parametrize("name", ["arbeit/übung", "with'quote", "a$(b)", "semi;colon", "100%"])
def test_evil_branch_names(history, repository, name):
    tip = history.commit(name, "2025-07-01T00:00:00Z")
    assert repository.resolve(GitRef(name)).sha == tip


# ---- what is in a commit

EVIL_PATHS = [
    "with space",
    "naïve/ünïcode.txt",
    "-dash",
    ":(glob)x",
    "st*r",
    "tab\tnew\nline",
    'quo"te',
    "back\\slash",
    "#x",
]


def test_files_with_evil_names(history, repository):
    history.commit("main", "2025-07-01T00:00:00Z", {path: f"text of {path}" for path in EVIL_PATHS} | {"stir": "no"})
    commit = repository.resolve(GitRef("main"))
    assert repository.read_files(commit, EVIL_PATHS) == {path: f"text of {path}" for path in EVIL_PATHS}
    assert repository.list_tree(commit) == sorted({path.partition("/")[0] for path in EVIL_PATHS} | {"stir"})
    assert repository.list_tree(commit, recursive=True) == sorted([*EVIL_PATHS, "stir"])


def test_read_file_gives_the_text_as_it_is(history, repository):
    texts = {"crlf": "a\r\nb", "empty": "", "nul": "a\x00b\n", "long": "ä" * 70000, "warning": "warning: x\n"}
    history.commit("main", "2025-07-01T00:00:00Z", {**texts, "latin1": b"\xe4"})
    commit = repository.resolve(GitRef("main"))
    assert repository.read_files(commit, texts) == texts
    assert repository.read_file(commit, "latin1") == "\ufffd"


def test_read_file_of_its_own_commit(history, repository):
    old = history.commit("main", "2025-07-01T00:00:00Z", {"manifest.json": "1"})
    history.commit("main", "2025-07-02T00:00:00Z", {"manifest.json": "2"})
    history.commit("main", "2025-07-03T00:00:00Z", {"manifest.json": None})
    texts = [
        repository.read_file(commit, "manifest.json")
        for commit in (
            repository.resolve(GitRef("main")),
            repository.resolve(GitRef("main"), date(2025, 7, 2)),
            repository.resolve(GitRef(old)),
        )
    ]
    assert texts == [None, "2", "1"]


def test_read_file_of_what_is_no_file(history, repository):
    history.commit("main", "2025-07-01T00:00:00Z", {"folder/file": "x", "sub": Submodule("1" * 40)})
    commit = repository.resolve(GitRef("main"))
    for path in ("folder", "sub", "nothing", "", ".", "..", "../folder/file", "/folder/file", "folder/file/below"):
        assert repository.read_file(commit, path) is None
    assert repository.read_file(commit, "folder/../folder//file") == "x"


def test_read_file_follows_links_inside_the_tree(history, repository):
    links = {
        "a/link": Symlink("../b/second"),
        "b/second": Symlink("file"),
        "out": Symlink("../../etc/passwd"),
        "absolute": Symlink("/etc/passwd"),
        "round": Symlink("round"),
    }
    history.commit("main", "2025-07-01T00:00:00Z", {"b/file": "x", **links})
    commit = repository.resolve(GitRef("main"))
    assert repository.read_file(commit, "a/link") == "x"
    for path in ("out", "absolute", "round"):
        assert repository.read_file(commit, path) is None


def test_list_tree(history, repository):
    history.commit("main", "2025-07-01T00:00:00Z", {"nemo/llm/a.py": "", "nemo/b.py": "", "nemo-x/c": "", "d": ""})
    commit = repository.resolve(GitRef("main"))
    assert repository.list_tree(commit) == ["d", "nemo", "nemo-x"]
    assert repository.list_tree(commit, "nemo") == repository.list_tree(commit, "nemo/") == ["b.py", "llm"]
    assert repository.list_tree(commit, "nemo", recursive=True) == ["b.py", "llm/a.py"]
    for path in ("d", "nothing", "..", "/nemo"):
        assert repository.list_tree(commit, path) == []


GITMODULES = """\
[submodule "Megatron"]
\tpath = 3rdparty/Megatron-LM
\turl = https://git.example.invalid/Megatron-LM.git
[submodule "beside"]
\turl = ../beside.git
\tpath = "with space"
[submodule "no address"]
\tpath = nowhere
"""


def test_submodules(history, repository):
    pinned = "0123456789" * 4
    files = {"3rdparty/Megatron-LM": Submodule(pinned), "with space": Submodule("1" * 40), ".gitmodules": GITMODULES}
    history.commit("main", "2025-07-01T00:00:00Z", {**files, "file": "x"})
    commit = repository.resolve(GitRef("main"))
    assert repository.submodule_commit(commit, "3rdparty/Megatron-LM") == pinned
    assert repository.submodule_url(commit, "3rdparty/Megatron-LM/") == "https://git.example.invalid/Megatron-LM.git"
    assert repository.submodule_url(commit, "with space") == "https://git.example.invalid/beside.git"
    for path in ("file", "3rdparty", "nothing", "..", ""):
        assert repository.submodule_commit(commit, path) is None
        assert repository.submodule_url(commit, path) is None
    assert repository.submodule_url(commit, "nowhere") is None


def test_submodule_url_without_gitmodules(history, repository):
    history.commit("main", "2025-07-01T00:00:00Z", {"sub": Submodule("1" * 40)})
    assert repository.submodule_url(repository.resolve(GitRef("main")), "sub") is None


@pytest.mark.parametrize(
    ("base", "url", "absolute"),
    [
        ("https://h/o/r", "../s.git", "https://h/o/s.git"),
        ("https://h/o/r/", "../../p/s", "https://h/p/s"),
        ("https://h/o/r", "./s", "https://h/o/r/s"),
        ("git@h:o/r.git", "../s.git", "git@h:o/s.git"),
        ("git@h:r.git", "../s.git", "git@h:s.git"),
        ("https://h/o/r", "ssh://x/y", "ssh://x/y"),
    ],
)
def test_submodule_url_relative(history, store, monkeypatch, base, url, absolute):
    git_settings(monkeypatch, {f"url.file://{history.path}.insteadOf": base})
    repository = opened(base, store, Notes())
    history.commit("main", "2025-07-01T00:00:00Z", {".gitmodules": f'[submodule "s"]\npath = s\nurl = {url}\n'})
    assert repository.submodule_url(repository.resolve(GitRef("main")), "s") == absolute


# ---- what is fetched


def test_only_the_files_read_are_fetched(history, repository, store, reporter):
    files = {f"{'folder/' * (number % 2)}{number}": f"text {number}" for number in range(20)}
    history.commit("main", "2025-07-01T00:00:00Z", {**files, "manifest.json": "{}"})
    commit = repository.resolve(GitRef("main"))
    assert blobs_here(store) == 0
    assert repository.read_file(commit, "manifest.json") == "{}"
    assert blobs_here(store) == 1
    repository.read_files(commit, list(files)[:5])
    assert blobs_here(store) == 6
    assert reporter.notes == []


def test_several_files_are_one_fetch(history, server, store, reporter):
    history.commit("main", "2025-07-01T00:00:00Z", {f"{number}": f"text {number}" for number in range(20)})
    repository = opened(server.url("nemo"), store, reporter)
    commit = repository.resolve(GitRef("main"))
    before = server.connections
    assert len(repository.read_files(commit, [str(number) for number in range(20)])) == 20
    assert server.connections == before + 1
    repository.read_files(commit, [str(number) for number in range(20)])
    assert server.connections == before + 1


def test_nothing_is_asked_for_a_full_commit_that_is_here(history, server, store, reporter):
    wanted = history.commit("main", "2025-07-01T00:00:00Z", {"file": "x"})
    history.commit("main", "2025-07-02T00:00:00Z")
    repository = opened(server.url("nemo"), store, reporter)
    repository.read_file(repository.resolve(GitRef("main")), "file")
    before = server.connections
    repository = again(repository)
    commit = repository.resolve(GitRef(wanted))
    assert repository.read_file(commit, "file") == "x"
    assert server.connections == before


def test_a_branch_that_has_not_moved_is_only_asked_for(history, server, store, reporter):
    history.commit("main", "2025-07-01T00:00:00Z")
    repository = opened(server.url("nemo"), store, reporter)
    repository.resolve(GitRef("main"))
    assert server.connections == 2
    again(repository).resolve(GitRef("main"))
    assert server.connections == 3


def test_offline_gives_what_was_seen_last(history, server, store, reporter):
    history.commit("main", "2025-07-01T00:00:00Z", {"file": "x", "other": "y"})
    repository = opened(server.url("nemo"), store, reporter)
    seen = repository.resolve(GitRef("main"))
    repository.read_file(seen, "file")
    history.commit("main", "2025-07-02T00:00:00Z")
    side = history.commit("side", "2025-07-02T00:00:00Z")
    before = server.connections
    offline = again(repository, reporter, offline=True)
    assert offline.resolve(GitRef("main")) == seen
    assert offline.resolve(GitRef(seen.sha[:9])).sha == seen.sha
    assert offline.read_file(seen, "file") == "x"
    assert reporter.notes[-1].startswith("offline: branches and tags of ")
    for ask in (lambda: offline.resolve(GitRef(side)), lambda: offline.read_file(seen, "other")):
        with pytest.raises(NetworkError, match="working offline"):
            ask()
    assert server.connections == before


def test_offline_short_commit_needs_the_whole_history(history, server, store, reporter):
    wanted = history.commit("main", "2025-07-01T00:00:00Z")
    history.commit("side", "2025-07-02T00:00:00Z")
    repository = opened(server.url("nemo"), store, reporter)
    repository.resolve(GitRef("main"))
    with pytest.raises(NetworkError, match="working offline"):
        again(repository, offline=True).resolve(GitRef(wanted[:9]))


def test_offline_without_an_earlier_run(history, repository):
    with pytest.raises(NetworkError, match="working offline") as caught:
        again(repository, offline=True).resolve(GitRef("main"))
    assert PUBLIC in caught.value.why


@pytest.mark.parametrize("refuses", [False, True])
def test_server_without_partial_fetches(served, store, reporter, monkeypatch, refuses):
    """One that does not offer filters, and one that offers and then refuses them."""
    history = History(served / "old", filters=refuses)
    git(history.path, "config", "uploadpackfilter.allow", "false")
    wanted = history.commit("main", "2025-07-01T00:00:00Z", {"file": "x", "other": "y"})
    tip = history.commit("main", "2025-07-02T00:00:00Z")
    repository = opened(f"file://{history.path}", store, reporter)
    assert repository.resolve(GitRef("main")).sha == tip
    (note,) = reporter.notes
    assert "partial fetch" in note
    assert repository.read_file(repository.resolve(GitRef(wanted)), "file") == "x"
    newer = history.commit("main", "2025-07-03T00:00:00Z", {"file": "z"})
    assert again(repository).read_file(again(repository).resolve(GitRef("main")), "file") == "z"
    assert again(repository).resolve(GitRef(newer[:9])).sha == newer


# ---- what can go wrong


def test_unreachable_names_the_address_what_git_made_of_it_and_what_was_tried(store, reporter, monkeypatch):
    with socket.socket() as taken:  # bound and not listening: refused, and nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        git_settings(monkeypatch, {f"url.http://me:s3cret@{host}/.insteadOf": "https://git.example.invalid/"})
        with pytest.raises(NetworkError) as caught:
            opened(PUBLIC, store, reporter).resolve(GitRef("main"))
    error = caught.value
    assert error.exit_code == 10
    assert PUBLIC in error.why
    assert f"http://***@{host}/nemo" in error.why
    assert "Tried 2 times" in error.why
    assert "unable to access" in error.why
    assert f"git ls-remote {PUBLIC}" in error.fix
    assert "s3cret" not in f"{error} {error.as_json()}"


def test_repository_that_is_not_there(server, store, reporter):
    with pytest.raises(NetworkError) as caught:
        opened(server.url("nothing"), store, reporter).resolve(GitRef("main"))
    assert server.url("nothing") in caught.value.why


def test_cut_line_is_an_error_and_the_next_run_works(history, server, store, reporter):
    tip = long_history(history)
    repository = opened(server.url("nemo"), store, reporter)
    server.cut_after = INSIDE_A_PACK
    with pytest.raises(NetworkError, match="cannot fetch branch main") as caught:
        repository.resolve(GitRef("main"))
    assert "Tried 2 times" in caught.value.why
    assert server.connections == 3
    server.cut_after = None
    assert again(repository).resolve(GitRef("main")).sha == tip


def test_line_cut_once_is_tried_again(history, server, store, reporter):
    tip = long_history(history)
    server.cut_after, server.cut_only = INSIDE_A_PACK, 2
    assert opened(server.url("nemo"), store, reporter).resolve(GitRef("main")).sha == tip
    assert server.connections == 3


def test_server_that_falls_silent_ends_in_time(history, server, store, reporter):
    long_history(history)
    server.stall_after = INSIDE_A_PACK
    repository = opened(server.url("nemo"), store, reporter, fetch_seconds=1.0)
    started = time.monotonic()
    with pytest.raises(NetworkError) as caught:
        repository.resolve(GitRef("main"))
    assert time.monotonic() - started < 20
    assert "longer than 1 s" in caught.value.why
    server.stall_after = 1
    repository = opened(server.url("nemo"), store, reporter, answer_seconds=1.0)
    with pytest.raises(NetworkError, match="cannot list the refs"):
        repository.resolve(GitRef("main"))


RESOLVE = """\
import sys
from pathlib import Path
from envbuild.core.progress import SilentReporter
from envbuild.git.repository import GitRepository
from envbuild.git.refs import GitRef
from envbuild.store.local import LocalStore
url, root = sys.argv[1:]
GitRepository(url, LocalStore(Path(root), SilentReporter()), SilentReporter()).resolve(GitRef("main"))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_while_fetching(history, server, store, reporter, how):
    tip = long_history(history)
    server.stall_after = INSIDE_A_PACK
    env = {**os.environ, "PYTHONPATH": str(Path(envbuild.__file__).parents[1])}
    command = [sys.executable, "-c", RESOLVE, server.url("nemo"), str(store.root)]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as child:
        assert server.stalled.wait(30)
        child.send_signal(how)
        assert child.wait(20) != 0
    server.stall_after = None
    assert opened(server.url("nemo"), store, reporter).resolve(GitRef("main")).sha == tip


def test_leftovers_of_a_killed_git_are_removed(history, repository, store):
    history.commit("main", "2025-07-01T00:00:00Z")
    repository.resolve(GitRef("main"))
    tip = history.commit("main", "2025-07-02T00:00:00Z")
    (folder,) = (store.root / "git").iterdir()
    names = [
        f"refs/tips/{tip}.lock",
        "packed-refs.lock",
        "config.lock",
        "objects/pack/tmp_pack_x",
        "objects/pack/x.keep",
    ]
    for name in names:
        (folder / name).touch()
    assert again(repository).resolve(GitRef("main")).sha == tip
    assert [name for name in names if (folder / name).exists()] == []


def test_two_runs_at_once_fetch_once(history, server, store, reporter):
    tip = long_history(history)
    found: list[str] = []

    def resolve() -> None:
        found.append(opened(server.url("nemo"), store, reporter).resolve(GitRef("main")).sha)

    threads = [threading.Thread(target=resolve) for _ in range(3)]
    key = opened(server.url("nemo"), store, reporter)._mirror.path.name
    with exclusive(store.root / "locks" / f"git-{key}.lock"):
        for thread in threads:
            thread.start()
        wait_until(lambda: len(reporter.notes) == 3, 30)
        assert all("another envbuild is fetching" in note for note in reporter.notes)
    for thread in threads:
        thread.join(30)
    assert found == [tip] * 3
    assert server.connections == 3 + 1


def test_variables_about_another_repository_are_not_followed(history, repository, tmp_path, monkeypatch):
    """As when envbuild is called from a git hook."""
    tip = history.commit("main", "2025-07-01T00:00:00Z", {"file": "x"})
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_NAMESPACE", "elsewhere")
    commit = repository.resolve(GitRef("main"))
    assert commit.sha == tip
    assert repository.read_file(commit, "file") == "x"


def test_settings_of_the_user_do_no_harm(history, repository, tmp_path, monkeypatch):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "reference-transaction").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "reference-transaction").chmod(0o755)
    settings = tmp_path / "gitconfig"
    settings.write_text(
        f"[core]\nhooksPath = {hooks}\nquotePath = true\n[log]\nshowSignature = true\n"
        "[fetch]\nprune = true\npruneTags = true\nwriteCommitGraph = true\nrecurseSubmodules = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_TRACE", "1")
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    history.commit("main", "2025-07-01T00:00:00Z", {"näme": "x"})
    repository.resolve(GitRef("main"))
    tip = history.commit("main", "2025-07-02T00:00:00Z", {"näme": "y"})
    later = again(repository)
    commit = later.resolve(GitRef("main"))
    assert commit.sha == tip
    assert later.read_file(commit, "näme") == "y"


@pytest.mark.parametrize(
    "url",
    ["", "--upload-pack=touch x", "https://h/a\nb", "https://me:pw@h/o/r", "https://token@h/o/r", "ssh://me:pw@h/r"],
)
def test_address_that_is_refused(store, reporter, url):
    with pytest.raises(ConfigurationError) as caught:
        opened(url, store, reporter)
    assert "pw" not in f"{caught.value} {caught.value.as_json()}"
    assert "token" not in f"{caught.value} {caught.value.as_json()}"


def test_address_with_the_user_of_ssh_is_taken(store, reporter):
    assert opened("ssh://git@h/o/r", store, reporter).url == "ssh://git@h/o/r"
    assert opened("git@h:o/r", store, reporter).url == "git@h:o/r"


def test_git_that_is_too_old(history, repository, tmp_path, monkeypatch):
    """The real git, asked for an option that it does not know."""
    history.commit("main", "2025-07-01T00:00:00Z")
    old = tmp_path / "bin" / "git"
    old.parent.mkdir()
    old.write_text(
        f'#!/bin/sh\ncase "$*" in *fetch*) set -- "$@" --of-tomorrow ;; esac\nexec {shutil.which("git")} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{os.environ['PATH']}")
    with pytest.raises(MachineError, match="this git is too old") as caught:
        repository.resolve(GitRef("main"))
    assert "2.29" in caught.value.fix
