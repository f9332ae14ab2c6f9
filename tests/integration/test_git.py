"""Refs become commits with the real git: file:// repositories, a URL rewrite, and a git daemon that fails."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from helpers.git_repos import GitServer, History, Submodule, Symlink, git, git_server, git_settings
from helpers.notes import Notes
from helpers.processes import wait_until

import envbuild
from envbuild.core.errors import ConfigurationError, MachineError, NetworkError
from envbuild.core.locks import exclusive
from envbuild.git.client import GitSettings
from envbuild.git.refs import Commit, CommitKind, GitRef
from envbuild.git.repository import GitRepository
from envbuild.store.local import LocalStore

PUBLIC = "https://git.example.invalid/nemo"
# Longer than a list of refs or a greeting of these small repositories, shorter than a pack of `long_history`.
INSIDE_A_PACK = 3000


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


def again(repository: GitRepository, reporter: Notes | None = None) -> GitRepository:
    """The same repository as another run sees it."""
    return opened(repository.url, repository._mirror._store, reporter or Notes())


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
    assert reporter.lines == []


def test_as_of_is_the_last_first_parent_commit_until_the_end_of_a_day_or_a_moment(history, repository):
    """`git log --before` without --first-parent gives the side's commit."""
    first = history.commit("main", "2025-07-27T12:00:00Z")
    side = history.commit("side", "2025-07-28T13:00:00Z", {"a": "1"}, parents=(first,))
    last_of_day = history.commit("main", "2025-07-28T23:59:58Z", authored="2025-08-05T00:00:00Z")
    side = history.commit("side", "2025-07-28T23:59:59Z", {"a": "2"})
    merge = history.commit("main", "2025-07-29T00:00:00Z", {"a": "2"}, parents=(last_of_day, side))
    tip = history.commit("main", "2025-07-30T00:00:00Z", authored="2025-07-01T00:00:00Z")
    days = {27: first, 28: last_of_day, 29: merge, 30: tip, 31: tip}
    assert {day: repository.resolve(GitRef("main"), date(2025, 7, day)).sha for day in days} == days
    moment = utc("2025-07-28T23:59:58")
    for zone in (timezone(timedelta(hours=hours)) for hours in (-9, 0, 9)):
        assert repository.resolve(GitRef("main"), moment.astimezone(zone)).sha == last_of_day
        before = moment - timedelta(seconds=1)
        assert repository.resolve(GitRef("main"), before.astimezone(zone)).sha == first
    with pytest.raises(ConfigurationError, match="no commit as old as 2025-07-26 23:59:59 UTC") as caught:
        repository.resolve(GitRef("main"), date(2025, 7, 26))
    assert first in caught.value.why
    assert "2025-07-27 12:00:00" in caught.value.why
    # The same on another day, when the branch has moved.
    later = history.commit("main", "2025-08-10T10:00:00Z")
    assert again(repository).resolve(GitRef("main"), date(2025, 7, 29)).sha == merge
    assert again(repository).resolve(GitRef("main")).sha == later


def test_tags_and_commits_are_what_they_are_whatever_as_of_says(history, repository):
    wanted = history.commit("main", "2025-07-28T10:00:00Z")
    side = history.commit("side/branch", "2025-08-28T10:00:00Z")
    gone = history.commit("gone", "2025-07-28T10:00:00Z", {"a": "1"})
    history.branch("gone", None)
    history.commit("main", "2025-08-28T10:00:00Z")
    history.tag("light", wanted)
    history.tag("annotated", wanted, annotated=True)
    for name in ("light", "annotated"):
        commit = repository.resolve(GitRef(name), date(2020, 1, 1))
        assert (commit.sha, commit.kind, commit.name) == (wanted, CommitKind.TAG, name)
    tag_object = git(history.path, "rev-parse", "refs/tags/annotated")
    # Of any branch, of none, and of a tag's own object.
    full = {wanted: wanted, wanted.upper(): wanted, side: side, gone: gone, tag_object: wanted}
    for digits, sha in (full | {wanted[:7]: wanted, wanted[:12].upper(): wanted, side[:8]: side}).items():
        commit = again(repository).resolve(GitRef(digits), date(2020, 1, 1))
        assert (commit.sha, commit.kind, commit.name) == (sha, CommitKind.COMMIT, digits)


def test_tag_of_a_file_is_refused(history, repository):
    history.commit("main", "2025-07-28T10:00:00Z", {"key": "a public key"})
    history.tag("key", git(history.path, "rev-parse", "main:key"))
    with pytest.raises(ConfigurationError, match="is not a commit") as caught:
        repository.resolve(GitRef("key"))
    assert "blob" in caught.value.why


@pytest.mark.parametrize("fetched", [False, True])
def test_short_commit_that_is_not_the_only_one(history, repository, fetched):
    one, two = history.colliding("commit", "commit")
    history.branch("one", one)
    history.branch("two", two)
    if fetched:
        repository.resolve(GitRef("one"))
    with pytest.raises(ConfigurationError, match="is the beginning of 2 commits") as caught:
        again(repository).resolve(GitRef(one[:7]))
    assert one in caught.value.why
    assert two in caught.value.why
    assert repository.resolve(GitRef(one[:16])).sha == one


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


def test_a_pull_requests_ref_is_a_branch_of_the_host(history, repository):
    history.commit("main", "2025-07-28T10:00:00Z")
    first = history.commit("work", "2025-07-29T10:00:00Z")
    tip = history.commit("work", "2025-07-30T10:00:00Z")
    git(history.path, "update-ref", "refs/pull/7/head", tip)
    history.branch("work", None)
    ref = GitRef("refs/pull/7/head")
    commit = repository.resolve(ref)
    assert (commit.sha, commit.kind, commit.name) == (tip, CommitKind.BRANCH, ref.name)
    assert repository.resolve(ref, date(2025, 7, 29)).sha == first
    assert repository.tips([ref.name, "main", "refs/pull/8/head"]).keys() == {ref.name, "main"}
    # One object sees one state; the next one sees that it moved.
    git(history.path, "update-ref", ref.name, first)
    assert repository.resolve(ref).sha == tip
    assert again(repository).resolve(ref).sha == first
    with pytest.raises(ConfigurationError, match="has no branch or tag 'refs/pull/8/head'") as caught:
        repository.resolve(GitRef("refs/pull/8/head"))
    assert f"git ls-remote {PUBLIC} 'refs/pull/*'" in caught.value.fix
    with pytest.raises(ConfigurationError, match="has no branch or tag 'pull/7/head'") as caught:
        repository.resolve(GitRef("pull/7/head"))
    assert caught.value.fix == "Write refs/pull/7/head."


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
    for digits in ("deadbee", "1234567", "0123456789" * 4):
        with pytest.raises(ConfigurationError, match=f"has no commit '{digits}'") as caught:
            repository.resolve(GitRef(digits))
        assert ("version:" in caught.value.fix) is (digits == "1234567")
    for digits, short in (("dead1", True), ("faced", False)):
        with pytest.raises(ConfigurationError) as caught:
            repository.resolve(GitRef(digits))
        assert ("write at least 7 of its digits" in caught.value.fix) is short


def test_branch_that_became_a_folder_or_was_rewritten(history, repository):
    first = history.commit("work", "2025-07-01T00:00:00Z")
    assert repository.resolve(GitRef("work")).sha == first
    history.branch("work", None)
    below = history.commit("work/part", "2025-07-02T00:00:00Z")
    assert again(repository).resolve(GitRef("work/part")).sha == below
    other = history.commit("work/part", "2025-07-03T00:00:00Z", parents=())
    assert again(repository).resolve(GitRef("work/part")).sha == other


def test_evil_branch_names_and_one_state_for_each_object(history, repository):
    names = ["arbeit/übung", "with'quote", "a$(b)", "semi;colon", "100%"]
    tips = {name: history.commit(name, "2025-07-01T00:00:00Z", {"name": name}) for name in names}
    assert {name: repository.resolve(GitRef(name)).sha for name in names} == tips
    second = history.commit(names[0], "2025-07-02T00:00:00Z")
    assert repository.resolve(GitRef(names[0])).sha == tips[names[0]]
    assert again(repository).resolve(GitRef(names[0])).sha == second


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


def test_files_with_evil_names_and_any_text(history, repository):
    texts = {"crlf": "a\r\nb", "empty": "", "nul": "a\x00b\n", "long": "ä" * 70000, "warning": "warning: x\n"}
    texts |= {path: f"text of {path}" for path in EVIL_PATHS}
    history.commit("main", "2025-07-01T00:00:00Z", {**texts, "stir": "no", "latin1": b"\xe4"})
    commit = repository.resolve(GitRef("main"))
    assert repository.read_files(commit, texts) == texts
    assert repository.read_file(commit, "latin1") == "\ufffd"
    assert repository.list_tree(commit) == sorted({path.partition("/")[0] for path in [*texts, "stir", "latin1"]})
    assert repository.list_tree(commit, recursive=True) == sorted([*texts, "stir", "latin1"])


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


def test_read_file_follows_links_inside_the_tree_and_reads_files_alone(history, repository):
    links = {
        "a/link": Symlink("../b/second"),
        "b/second": Symlink("file"),
        "out": Symlink("../../etc/passwd"),
        "absolute": Symlink("/etc/passwd"),
        "round": Symlink("round"),
    }
    history.commit("main", "2025-07-01T00:00:00Z", {"b/file": "x", "sub": Submodule("1" * 40), **links})
    commit = repository.resolve(GitRef("main"))
    for path in ("a/link", "b/file", "b/../b//file"):
        assert repository.read_file(commit, path) == "x"
    no_files = [
        "out",
        "absolute",
        "round",
        "b",
        "sub",
        "nothing",
        "",
        ".",
        "..",
        "../b/file",
        "/b/file",
        "b/file/below",
    ]
    assert repository.read_files(commit, no_files) == dict.fromkeys(no_files)


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
    assert reporter.lines == []


def test_the_server_is_asked_once(history, server, store, reporter):
    wanted = history.commit("main", "2025-07-01T00:00:00Z", {f"{number}": f"text {number}" for number in range(20)})
    repository = opened(server.url("nemo"), store, reporter)
    commit = repository.resolve(GitRef("main"))
    assert server.connections == 2
    for _ in range(2):
        assert len(repository.read_files(commit, [str(number) for number in range(20)])) == 20
        assert server.connections == 3, "one fetch for all files"
    later = again(repository)
    assert later.read_file(later.resolve(GitRef(wanted)), "0") == "text 0"
    assert server.connections == 3, "a full commit that is here needs no server"
    again(repository).resolve(GitRef("main"))
    assert server.connections == 4, "a branch that has not moved is listed, not fetched"


@pytest.mark.parametrize("refuses", [False, True])
def test_server_without_partial_fetches(served, store, reporter, monkeypatch, refuses):
    """One that does not offer filters, and one that offers and then refuses them."""
    history = History(served / "old", filters=refuses)
    git(history.path, "config", "uploadpackfilter.allow", "false")
    wanted = history.commit("main", "2025-07-01T00:00:00Z", {"file": "x", "other": "y"})
    tip = history.commit("main", "2025-07-02T00:00:00Z")
    repository = opened(f"file://{history.path}", store, reporter)
    assert repository.resolve(GitRef("main")).sha == tip
    (note,) = reporter.lines
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


def test_cut_line_is_tried_again_and_then_an_error(history, server, store, reporter):
    tip = long_history(history)
    repository = opened(server.url("nemo"), store, reporter)
    server.cut_after = INSIDE_A_PACK
    with pytest.raises(NetworkError, match="cannot fetch branch main") as caught:
        repository.resolve(GitRef("main"))
    assert "Tried 2 times" in caught.value.why
    assert server.connections == 3
    server.cut_only = 5
    assert again(repository).resolve(GitRef("main")).sha == tip
    assert server.connections == 6


@pytest.mark.slow
def test_server_that_falls_silent_ends_in_time(history, server, store, reporter):
    long_history(history)
    server.stall_after = INSIDE_A_PACK
    repository = opened(server.url("nemo"), store, reporter, fetch_seconds=1.0)
    with pytest.raises(NetworkError) as caught:
        repository.resolve(GitRef("main"))
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


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_killed_while_fetching(history, server, store, reporter, how):
    tip = long_history(history)
    server.stall_after = INSIDE_A_PACK
    env = {**os.environ, "PYTHONPATH": str(Path(envbuild.__file__).parents[1])}
    command = [sys.executable, "-c", RESOLVE, server.url("nemo"), str(store.root)]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as child:
        assert server.stalled.wait(300)
        child.send_signal(how)
        assert child.wait(300) != 0
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
    listed: list[str] = []

    def resolve() -> None:
        listed.append(opened(server.url("nemo"), store, reporter).resolve(GitRef("main")).sha)

    threads = [threading.Thread(target=resolve) for _ in range(3)]
    key = opened(server.url("nemo"), store, reporter)._mirror.path.name
    with exclusive(store.root / "locks" / f"git-{key}.lock"):
        for thread in threads:
            thread.start()
        wait_until(lambda: len(reporter.lines) == 3, 30)
        assert all("waiting for another fetch" in note for note in reporter.lines)
    for thread in threads:
        thread.join(30)
    assert listed == [tip] * 3
    assert server.connections == 3 + 1


def test_a_fetch_of_the_same_command_is_waited_for_in_silence(history, server, store, reporter, monkeypatch):
    history.commit("main", "2025-07-01T00:00:00Z")
    first, second = (opened(server.url("nemo"), store, reporter) for _ in range(2))
    other = threading.Thread(target=lambda: second.resolve(GitRef("main")))
    waits = threading.Event()

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            waits.set()
        real_flock(descriptor, operation)

    def fetch(*arguments: Any, **more: Any) -> bool:
        other.start()
        assert waits.wait(300)
        return real_fetch(*arguments, **more)

    real_flock, real_fetch = fcntl.flock, first._mirror._fetch
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(first._mirror, "_fetch", fetch)
    first.resolve(GitRef("main"))
    other.join()
    assert reporter.lines == []


def test_a_mirror_that_is_gone_when_its_fetch_begins_is_an_error(history, server, store, reporter):
    history.commit("main", "2025-07-01T00:00:00Z")
    repository = opened(server.url("nemo"), store, reporter)
    mirror = repository._mirror.path
    ended: list[Exception] = []

    def resolve() -> None:
        try:
            repository.resolve(GitRef("main"))
        except MachineError as error:
            ended.append(error)

    with exclusive(store.root / "locks" / f"git-{mirror.name}.lock"):
        threading.Thread(target=resolve, daemon=True).start()
        wait_until(lambda: reporter.lines, 30)
        shutil.rmtree(mirror)
    wait_until(lambda: ended, 30)
    assert not mirror.exists()


def test_variables_about_another_repository_are_not_followed(history, repository, tmp_path, monkeypatch):
    """As when envbuild is called from a git hook."""
    tip = history.commit("main", "2025-07-01T00:00:00Z", {"file": "x"})
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_NAMESPACE", "elsewhere")
    commit = repository.resolve(GitRef("main"))
    assert commit.sha == tip
    assert repository.read_file(commit, "file") == "x"


def test_git_settings_of_the_user_do_not_interfere(history, repository, tmp_path, monkeypatch):
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
