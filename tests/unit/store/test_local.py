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
OTHER = sha256_bytes(b"something else")


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store", Notes())


def fill(folder: Path) -> None:
    (folder / "file").write_text("content")


def staged(store: LocalStore) -> list[str]:
    area = store.root / "staging"
    return sorted(os.listdir(area)) if area.exists() else []


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


def rewrite(folder: Path) -> None:
    (folder / "file").write_text("anew")


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


def test_locks_and_logs_are_closed(store):
    """Whoever may open a lock may hold it, and logs name places."""
    folders = [store.root / name for name in ("staging", "locks", "logs")]
    for folder in folders:
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    store.get_or_build("image", KEY, fill)
    assert [mode(folder) for folder in folders] == [0o700] * 3


def test_a_cache_that_its_owner_opened_for_reading_stays_open(store):
    first = store.get_or_build("image", KEY, fill).path
    for folder in (store.root, first.parent, first):
        folder.chmod(0o755)

    def fill_openly(folder: Path) -> None:
        (folder / "below").mkdir()
        fill(folder)
        for path in (folder / "below", *folder.iterdir()):
            path.chmod(0o777)

    second = store.get_or_build("image", OTHER, fill_openly).path
    assert [mode(folder) for folder in (store.root, first.parent, first, second)] == [0o755] * 4
    # It is read there, and not written to.
    assert not any(mode(path) & 0o022 for path in second.rglob("*"))
    # Other kinds are opened by themselves.
    assert mode(store.get_or_build("base", KEY, fill).path.parent) == 0o700


def test_root_file_systems_stay_closed(store):
    store.get_or_build("image", KEY, fill).path.parent.chmod(0o755)

    def fill_root(folder: Path) -> None:
        (folder / "rootfs").mkdir()
        (folder / "rootfs/su").touch()
        (folder / "rootfs/su").chmod(0o4777)

    entry = store.get_or_build("image", OTHER, fill_root).path
    assert (mode(entry), mode(entry / "rootfs/su")) == (0o700, 0o4777)


@pytest.mark.parametrize("bits", [0o770, 0o702, 0o777])
@pytest.mark.parametrize("name", ["", "image"])
def test_a_cache_that_others_can_write_to_is_refused(store, bits, name):
    store.get_or_build("image", KEY, fill)
    (store.root / name).chmod(bits)
    again = LocalStore(store.root, SilentReporter())
    for use in (
        lambda: again.find("image", KEY),
        lambda: again.get_or_build("image", KEY, fill),
        lambda: again.rebuild("image", KEY, fill),
        lambda: again.make_in_place("image", OTHER, "it", lambda _: False, fill),
    ):
        with pytest.raises(MachineError, match="is refused") as refused:
            use()
        assert f"mode {bits:o}" in refused.value.why
        assert f"chmod go-w {store.root / name}" in refused.value.fix
    if not name:
        # As /tmp is: others can put something there, and take nothing away.
        store.root.chmod(0o1777)
        assert again.find("image", KEY)


def test_an_entry_that_others_can_write_to_is_made_anew(store):
    """As after chmod -R g+w: they may have put another file there, and its index."""
    entry = store.get_or_build("image", KEY, fill).path
    (entry / "put there").touch()
    entry.chmod(0o770)
    assert store.find("image", KEY) is None
    entry = store.get_or_build("image", KEY, fill).path
    assert mode(entry) == 0o700
    assert not (entry / "put there").exists()


def test_no_folder_of_a_cache_is_made_for_others_to_write_to(tmp_path):
    old = os.umask(0)
    try:
        store = LocalStore(tmp_path / "deep/cache", SilentReporter())
        store.make_in_place("tools", KEY, "it", lambda _: True, fill)
        store.get_or_build("image", KEY, fill)
    finally:
        os.umask(old)
    folders = [tmp_path / "deep", store.root, *store.root.iterdir(), store.path_of("tools", KEY)]
    assert not any(mode(folder) & 0o022 for folder in folders)
    assert LocalStore(store.root, SilentReporter()).find("image", KEY)


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
