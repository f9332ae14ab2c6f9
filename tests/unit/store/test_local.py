"""Entries are complete or absent, whoever raises, dies or comes at the same moment."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.notes import Notes
from helpers.processes import forked, in_child, wait_until

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import MachineError
from envbuild.core.progress import SilentReporter
from envbuild.store.local import COMPLETE, LocalStore

KEY = sha256_bytes(b"what it is made of")


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store", Notes())


def fill(folder: Path) -> None:
    (folder / "file").write_text("content")


def staged(store: LocalStore) -> list[str]:
    area = store.root / "staging"
    return sorted(os.listdir(area)) if area.exists() else []


def test_get_or_build_builds_once(store):
    first = store.get_or_build("image", KEY, fill)
    second = store.get_or_build("image", KEY, lambda _: pytest.fail("built twice"))
    assert (first.built, second.built) == (True, False)
    assert first.path == second.path == store.find("image", KEY)
    assert (first.path / "file").read_text() == "content"
    assert staged(store) == []


def test_damage_is_reported_once_and_repaired(store):
    for times in (1, 2):
        entry = store.get_or_build("image", KEY, fill)
        (entry.path / "file").write_text("changed")
        assert store.find("image", KEY) is None
        assert store.get_or_build("image", KEY, fill).built
        assert (entry.path / "file").read_text() == "content"
        notes = store.reporter.lines
        assert [("file was changed" in note, "made anew" in note) for note in notes] == [(True, True)] * times


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_builder_that_raises_leaves_nothing(store, error):
    def build(folder: Path) -> None:
        fill(folder)
        (folder / "closed").mkdir(mode=0o555)
        raise error

    with pytest.raises(error):
        store.get_or_build("image", KEY, build)
    assert store.find("image", KEY) is None
    assert staged(store) == []
    assert store.get_or_build("image", KEY, fill).built


def test_builder_that_is_killed_leaves_no_entry_and_the_next_one_sweeps(store):
    def build_and_die(folder: Path) -> None:
        fill(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: store.get_or_build("image", KEY, build_and_die)) == -signal.SIGKILL
    assert store.find("image", KEY) is None
    assert len(staged(store)) == 2  # its folder and its lock
    assert store.get_or_build("image", KEY, fill).built
    assert staged(store) == []


def test_two_processes_become_one_builder(store, tmp_path):
    started = tmp_path / "started"

    def slowly(folder: Path) -> None:
        started.touch()
        wait_until(lambda: not started.exists())
        fill(folder)

    store.reporter.note = lambda text: (store.reporter.lines.append(text), started.unlink())
    with forked(lambda: store.get_or_build("image", KEY, slowly)) as other:
        wait_until(started.exists)
        entry = store.get_or_build("image", KEY, lambda _: pytest.fail("built twice"))
        assert os.waitpid(other, 0)[1] == 0
    assert not entry.built
    assert (entry.path / "file").read_text() == "content"
    assert len(store.reporter.lines) == 1
    assert "another envbuild is making image" in store.reporter.lines[0]


def test_waiting_process_builds_when_the_first_one_is_killed(store, tmp_path):
    started = tmp_path / "started"

    def never(folder: Path) -> None:
        started.touch()
        time.sleep(3600)

    with forked(lambda: store.get_or_build("image", KEY, never)) as other:
        wait_until(started.exists)
        store.reporter.note = lambda _: os.kill(other, signal.SIGKILL)
        assert store.get_or_build("image", KEY, fill).built


def test_two_keys_are_built_at_the_same_time(store):
    other = sha256_bytes(b"else")
    store.get_or_build("image", KEY, lambda folder: (fill(folder), store.get_or_build("image", other, fill)))
    assert store.find("image", KEY)
    assert store.find("image", other)


def rewrite(folder: Path) -> None:
    (folder / "file").write_text("anew")


def test_rebuild_takes_the_place_of_the_entry(store):
    store.get_or_build("image", KEY, fill)
    entry = store.rebuild("image", KEY, rewrite)
    assert entry.built
    assert (entry.path / "file").read_text() == "anew"
    assert staged(store) == []


def test_rebuild_that_raises_keeps_the_entry(store):
    store.get_or_build("image", KEY, fill)

    def build(folder: Path) -> None:
        rewrite(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.rebuild("image", KEY, build)
    assert (store.path_of("image", KEY) / "file").read_text() == "content"
    assert staged(store) == []


def test_sweep_spares_the_living(store, tmp_path):
    mark = tmp_path / "mark"

    def live() -> None:
        with store.staging("live") as folder:
            fill(folder)
            mark.touch()
            wait_until(lambda: not mark.exists())
            os._exit(0 if (folder / "file").exists() else 1)

    with forked(live) as other:
        wait_until(mark.exists)
        with store.staging("mine"):
            assert len(staged(store)) == 4
        mark.unlink()
        assert os.waitpid(other, 0)[1] == 0


def test_remove_takes_the_whole_entry(store):
    path = store.get_or_build("image", KEY, fill).path
    store.remove("image", KEY)
    assert not path.exists()
    assert store.find("image", KEY) is None
    store.remove("image", KEY)
    assert staged(store) == []


def test_store_that_cannot_be_written_is_an_error_of_the_machine(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError):
        LocalStore(tmp_path / "file", SilentReporter()).get_or_build("image", KEY, fill)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_no_other_account_enters_the_store(store, monkeypatch):
    old = os.umask(0)
    try:
        with store.staging("work") as folder:
            assert [mode(path) for path in (folder.parent, folder)] == [0o700] * 2
        entry = store.get_or_build("image", KEY, lambda folder: (folder / "su").touch(0o4777)).path
    finally:
        os.umask(old)
    assert [mode(path) for path in (entry.parent, entry)] == [0o700] * 2


def test_a_store_that_others_could_enter_is_closed(store):
    """Whoever may open a lock may hold it, and logs name places."""
    folders = [store.root / name for name in ("staging", "image", "locks")]
    for folder in folders:
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    store.get_or_build("image", KEY, fill)
    assert [mode(folder) for folder in (*folders, store.root / "logs")] == [0o700] * 4


def test_a_folder_that_is_made_in_its_place_is_made_anew_unless_it_is_whole(store):
    def make(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        fill(folder)

    def made() -> Path:
        return store.make_in_place("toolkits", KEY, "toolkit", lambda folder: (folder / "file").is_file(), make)

    folder = made()
    for name in ("file", COMPLETE):
        (folder / name).unlink()
        assert made() == folder
        assert (folder / "file").read_text() == "content"
    (folder / "kept").touch()
    assert (made() / "kept").exists()
