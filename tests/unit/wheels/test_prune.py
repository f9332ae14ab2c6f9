"""What of the wheelhouse can go: by last use, unless a lock needs it; abandoned builds; never what is in use."""

import os
import time
from pathlib import Path

import pytest
from helpers.notes import Notes
from helpers.processes import forked, wait_until
from helpers.stores import keep_wheel
from unit.wheels.plans import compile_lock
from unit.wheels.test_wheelhouse import wanted

from envbuild.core import locks
from envbuild.store.local import LocalStore
from envbuild.wheels.cache.entry import Built
from envbuild.wheels.cache.prune import BUILDS_KIND, Pruning, plan_pruning, remove


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store", Notes())


def kept(store: LocalStore, parts, folder: Path, days: float) -> Built:
    """A wheel that was used some days ago."""
    item = keep_wheel(store, parts, folder)
    aged(item.path, days)
    return item


def aged(path: Path, days: float) -> None:
    moment = time.time() - days * 86400
    for folder, _, names in os.walk(path):
        for name in names if path.parent.name == BUILDS_KIND else []:
            os.utime(Path(folder, name), (moment, moment))
    os.utime(path, (moment, moment))


def abandoned(store: LocalStore, key: str, days: float) -> Path:
    folder = store.path_of(BUILDS_KIND, key)
    (folder / "build").mkdir(parents=True)
    (folder / "build/kernel.o").write_bytes(b"x" * 1000)
    aged(folder, days)
    return folder


def keys(plan: Pruning) -> set[tuple[str, str]]:
    return {(item.kind, "sha256:" + item.key) for item in plan.old}


def test_unused_wheels_are_removed_unless_a_lock_needs_them(store, tmp_path):
    lock = compile_lock(tmp_path / "lock")
    needed = kept(store, wanted(lock), tmp_path, 100)
    other_sm = kept(store, wanted(lock).model_copy(update={"sm": ("80",)}), tmp_path, 100)
    changes = [
        {"sdist": "sha256:" + "9" * 64},
        {"python": "cp312"},
        {"torch": wanted(lock).torch.model_copy(update={"version": "2.7.0"})},
    ]
    old = [kept(store, wanted(lock).model_copy(update=change), tmp_path, 31) for change in changes]
    recent = kept(store, wanted(lock).model_copy(update={"sdist": "sha256:" + "8" * 64}), tmp_path, 29)

    plan = plan_pruning(store, [lock], unused_days=30, force=False)
    assert keys(plan) == {("wheels", item.record.key) for item in old}
    assert {"sha256:" + item.key for item in plan.needed} == {needed.record.key, other_sm.record.key}
    assert [item.size_bytes for item in plan.old] == [
        sum(path.stat().st_size for path in item.path.iterdir()) for item in sorted(old, key=lambda item: item.path)
    ]
    assert all("not used for 31 days" in item.why for item in plan.old)

    forced = plan_pruning(store, [lock], unused_days=30, force=True)
    assert keys(forced) == keys(plan) | {("wheels", needed.record.key), ("wheels", other_sm.record.key)}
    assert forced.needed == ()

    assert recent.path.is_dir()
    gone = remove(store, plan.old)
    assert gone == plan.old
    assert [item.path.is_dir() for item in (*old, needed, other_sm, recent)] == [False] * 3 + [True] * 3
    assert plan_pruning(store, [lock], unused_days=30, force=False).old == ()


def test_damaged_wheels_are_removed_however_recent(store, tmp_path):
    lock = compile_lock(tmp_path / "lock")
    changed = kept(store, wanted(lock), tmp_path, 0)
    changed.wheel.write_bytes(b"another")
    unreadable = kept(store, wanted(lock).model_copy(update={"sm": ("80",)}), tmp_path, 0)
    (unreadable.path / "wheel.json").write_text("{")
    pipe = kept(store, wanted(lock).model_copy(update={"sm": ("100",)}), tmp_path, 0)
    (pipe.path / "wheel.json").unlink()
    os.mkfifo(pipe.path / "wheel.json")
    plan = plan_pruning(store, [lock], unused_days=30, force=False)
    assert keys(plan) == {("wheels", item.record.key) for item in (changed, unreadable, pipe)}
    assert all(item.why.startswith("damaged: ") for item in plan.old)


def test_abandoned_builds_are_removed_and_resumable_ones_stay(store, tmp_path):
    parts = wanted(compile_lock(tmp_path / "lock"))
    done = kept(store, parts, tmp_path, 0)
    keys_of = ["sha256:" + digit * 64 for digit in "12"]
    finished, old, recent = (
        abandoned(store, key, days) for key, days in zip([done.record.key, *keys_of], [0, 31, 1], strict=True)
    )
    plan = plan_pruning(store, [], unused_days=30, force=False)
    assert keys(plan) == {(BUILDS_KIND, done.record.key), (BUILDS_KIND, keys_of[0])}
    assert {item.size_bytes for item in plan.old} == {1000}
    remove(store, plan.old)
    assert [path.is_dir() for path in (finished, old, recent, done.path)] == [False, False, True, True]


@pytest.mark.parametrize("kind", ["wheels", BUILDS_KIND])
def test_locked_entry_is_not_removed(store, tmp_path, kind):
    parts = wanted(compile_lock(tmp_path / "lock"))
    item = kept(store, parts, tmp_path, 100)
    path = item.path if kind == "wheels" else abandoned(store, "sha256:" + "1" * 64, 100)
    lock = store.root / "locks" / f"wheels-{path.name}.lock"
    held = tmp_path / "held"

    def hold() -> None:
        with locks.exclusive(lock):
            held.write_text("")
            time.sleep(3600)

    plan = plan_pruning(store, [], unused_days=30, force=True)
    with forked(hold):
        wait_until(held.exists)
        gone = remove(store, plan.old)
    assert path.is_dir()
    assert path.name not in {item.key for item in gone}
    assert any("in use" in line for line in store.reporter.lines)
    remove(store, plan.old)
    assert not path.is_dir()


MADE_AGAIN = ["toolkits", "build-environments", "git-trees", "git"]


def made(store: LocalStore, kind: str, digit: str, days: float) -> Path:
    folder = store.path_of(kind, "sha256:" + digit * 64)
    (folder / "deep").mkdir(parents=True)
    (folder / "HEAD").write_bytes(b"x" * 10)
    (folder / "deep/file").write_bytes(b"x" * 1000)
    moment = time.time() - days * 86400
    for path in (folder / "HEAD", folder / "deep", folder):
        os.utime(path, (moment, moment))
    return folder


@pytest.mark.parametrize("kind", MADE_AGAIN)
def test_unused_reproducible_entries_are_removed(store, kind):
    old, recent = made(store, kind, "1", 31), made(store, kind, "2", 29)
    plan = plan_pruning(store, [], unused_days=30, force=False)
    assert [(item.kind, item.key, item.size_bytes) for item in plan.old] == [(kind, old.name, 1010)]
    assert plan.old[0].why == "not used for 31 days"
    assert remove(store, plan.old) == plan.old
    assert (old.exists(), recent.exists()) == (False, True)


@pytest.mark.parametrize("kind", MADE_AGAIN[:3])
def test_entry_in_use_stays_until_its_process_ends(store, kind, tmp_path):
    folder = made(store, kind, "1", 31)
    ready = tmp_path / "ready"

    def use() -> None:
        store.use(kind, "sha256:" + folder.name)
        ready.touch()
        time.sleep(3600)

    with forked(use):
        wait_until(ready.exists)
        assert plan_pruning(store, [], unused_days=30, force=False).old == (), "its use was noted"
        assert remove(store, plan_pruning(store, [], unused_days=0, force=True).old) == ()
        assert any("in use" in line for line in store.reporter.lines)
    assert len(remove(store, plan_pruning(store, [], unused_days=0, force=True).old)) == 1
    assert not folder.exists()
