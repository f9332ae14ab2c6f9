"""File locks between real processes."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.processes import forked, in_child, wait_until

from envbuild.core.locks import exclusive, exclusive_if_free, shared


def hold(path: Path, mark: Path) -> None:
    with exclusive(path):
        mark.write_text("")
        time.sleep(3600)


def is_free(path: Path) -> bool:
    with exclusive_if_free(path) as free:
        return free


def test_exclusive_keeps_a_second_process_out_until_the_first_is_killed(tmp_path):
    lock, mark = tmp_path / "locks" / "key.lock", tmp_path / "mark"
    waits: list[int] = []
    with forked(lambda: hold(lock, mark)) as holder:
        wait_until(mark.exists)
        assert not is_free(lock)

        def on_wait() -> None:
            waits.append(1)
            os.kill(holder, signal.SIGKILL)

        with exclusive(lock, on_wait=on_wait):
            assert waits == [1]
            assert in_child(lambda: is_free(lock) and os._exit(3)) == 0


def test_exclusive_makes_a_new_file_when_the_holder_removed_it(tmp_path):
    """Else the one who waited would hold a file that nobody else can see."""
    lock, mark = tmp_path / "lock", tmp_path / "mark"

    def hold_and_remove() -> None:
        with exclusive(lock):
            mark.write_text("")
            wait_until(lambda: not mark.exists())
            lock.unlink()

    with forked(hold_and_remove):
        wait_until(mark.exists)
        with exclusive(lock, on_wait=mark.unlink):
            assert lock.exists()
            assert in_child(lambda: is_free(lock) and os._exit(3)) == 0


def test_shared_waits_for_exclusive_and_exclusive_for_shared(tmp_path):
    lock, mark = tmp_path / "lock", tmp_path / "mark"
    for first, second in ((exclusive, shared), (shared, exclusive)):

        def hold_a_while(first=first) -> None:
            with first(lock):
                mark.touch()
                wait_until(lambda: not mark.exists())

        with forked(hold_a_while):
            wait_until(mark.exists)
            with second(lock, on_wait=mark.unlink):
                assert not mark.exists()


def test_exclusive_if_free_without_a_file_makes_none(tmp_path):
    assert not is_free(tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("take", [exclusive, shared])
def test_no_other_account_can_hold_a_lock_of_a_store(tmp_path, take):
    """Whoever may open a lock file may hold it, and all others wait; also where the folder was there before."""
    for folder in (tmp_path / "new/locks", tmp_path / "old/locks"):
        if folder.parent.name == "old":
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        with take(folder / "a.lock"):
            modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "a.lock")]
        assert modes == [0o700, 0o600]
