"""What moved between two locks, and the locks between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from helpers.locks import make_lock

from envbuild.lock import lockfile
from envbuild.lock.lockfile import LockDirectory
from envbuild.nightly.bisect.mixed_lock import Mix, write_mixed
from envbuild.nightly.bisect.moved import moved_groups, pins_of

# By package: version, hash, and what needs it.
GOOD = {
    "app": ("1.0", "a1", ["envbuild-mcore"]),
    "helper": ("1.0", "b1", ["torch"]),
    "numpy": ("1.0", "c1", ["app", "torch"]),
    "old": ("1.0", "d1", ["envbuild-mcore"]),
    "rebuilt": ("1.0", "e1", ["envbuild-mcore"]),
    "torch": ("2.13.0+cpu", "f1", ["envbuild-mcore"]),
    "transformer-engine": ("2.1", "91", ["envbuild-mcore"]),
    "transformer-engine-torch": ("2.1", "92", ["envbuild-mcore"]),
}
BAD = {name: row for name, row in GOOD.items() if name != "old"} | {
    # What needs it is a comment: it did not move.
    "app": ("1.0", "a1", ["another"]),
    "helper": ("2.0", "b2", ["torch"]),
    "new": ("1.0", "d2", ["envbuild-mcore"]),
    "numpy": ("2.0", "c2", ["app", "torch"]),
    "rebuilt": ("1.0", "e2", ["envbuild-mcore"]),
    "torch": ("2.14.0+cpu", "f2", ["envbuild-mcore"]),
    "transformer-engine": ("2.2", "93", ["envbuild-mcore"]),
    "transformer-engine-torch": ("2.2", "94", ["envbuild-mcore"]),
}
NOTHING = Mix(moved=frozenset(), commits={})


def lock_of(folder: Path, rows: Mapping[str, tuple[str, str, list[str]]]) -> LockDirectory:
    text = ""
    for name, (version, digest, needed_by) in rows.items():
        via = "".join(f"    #   {one}\n" for one in needed_by)
        text += f"{name}=={version} \\\n    --hash=sha256:{digest}\n    # via\n{via}"
    record = make_lock(folder, text)
    phases = {**record.phases, "main": record.phases["main"].model_copy(update={"packages": len(rows)})}
    (folder / lockfile.RECORD_FILE).write_text(
        lockfile.render(lockfile.sealed(record.model_copy(update={"phases": phases})))
    )
    return lockfile.read_lock(folder)


def both(folder: Path) -> tuple[LockDirectory, LockDirectory]:
    return lock_of(folder / "good", GOOD), lock_of(folder / "bad", BAD)


def test_packages_move_in_families_and_with_the_one_that_needs_them(tmp_path: Path) -> None:
    groups = moved_groups(*both(tmp_path), suspects=["NumPy"])
    assert [(group.name, [package.name for package in group.packages]) for group in groups] == [
        ("numpy", ["numpy"]),  # needed by one that stayed; the suspect is first
        ("torch", ["torch", "helper"]),  # a component of the stack
        ("new", ["new"]),
        ("old", ["old"]),
        ("rebuilt", ["rebuilt"]),
        ("transformer-engine", ["transformer-engine", "transformer-engine-torch"]),
    ]
    assert [group.text for group in groups] == [
        "numpy 1.0 -> 2.0",
        "torch 2.13.0+cpu -> 2.14.0+cpu and 1 that move with it",
        "new 1.0 (added)",
        "old 1.0 (gone)",
        "rebuilt 1.0 (other files)",
        "transformer-engine 2.1 -> 2.2 and 1 that move with it",
    ]


def test_a_mix_has_the_moved_packages_and_the_digest_of_its_versions_alone(tmp_path: Path) -> None:
    good, bad = both(tmp_path)
    mixed = write_mixed(tmp_path / "mixed", good, bad, Mix(moved=frozenset({"numpy", "old", "new"}), commits={}))
    kept = {name: version for name, version in good.packages().items() if name != "old"}
    assert mixed.packages() == {**kept, "numpy": "2.0", "new": "1.0"}
    assert pins_of(mixed)["numpy"].text == "numpy==2.0 \\\n    --hash=sha256:c2\n"
    assert mixed.lock.torch.version == good.lock.torch.version
    everything = frozenset(package.name for group in moved_groups(good, bad) for package in group.packages)
    end = write_mixed(tmp_path / "end", good, bad, Mix(moved=everything, commits={}))
    assert end.packages() == bad.packages()
    # The good lock of one bisection may be the bad one of another: the same versions have the same digest.
    assert end.lock.digest == write_mixed(tmp_path / "start", bad, good, NOTHING).lock.digest
    assert end.lock.digest != write_mixed(tmp_path / "other", good, bad, NOTHING).lock.digest
