"""What others on the machine could do with files of ours while a command works: a watcher, and an attacker."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from helpers.processes import NOBODY, forked, wait_until


@contextlib.contextmanager
def reachable_folder() -> Iterator[Path]:
    """A folder that every account may enter, as /var/cache or a shared disk is."""
    folder = Path(tempfile.mkdtemp(prefix="envbuild-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@dataclass
class Seen:
    """What was seen; up to date after :meth:`look`, and when the watch is over.

    Attributes:
        dangerous: programs with another account's rights, and devices: modes and paths.
        taken: what the attacker read, wrote, or ran.
    """

    folder: Path
    dangerous: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def rounds(self) -> int:
        """How often the watcher went through everything; grows."""
        return (self.folder / "rounds").stat().st_size

    def look(self) -> Seen:
        self.dangerous, self.taken = (
            (self.folder / name).read_text(errors="replace").splitlines() for name in ("dangerous", "taken")
        )
        return self


@contextlib.contextmanager
def watched(store: Path) -> Iterator[Seen]:
    """Look again and again, as root, for what ``find STORE -perm /6000 -o -type b,c`` finds; and attack as nobody."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file in ("dangerous", "taken", "rounds"):
            (folder / file).touch()
            (folder / file).chmod(0o666)
        seen = Seen(folder)
        with forked(lambda: _watch(store, folder)), forked(lambda: _attack(store, folder)):
            wait_until(seen.rounds)
            yield seen
            before = seen.rounds()
            wait_until(lambda: seen.rounds() > before + 1)
            seen.look()


def _watch(store: Path, report: Path) -> None:
    known: set[str] = set()
    while True:
        for path, info in _files(store):
            special = stat.S_ISBLK(info.st_mode) or stat.S_ISCHR(info.st_mode)
            if (special or (not stat.S_ISLNK(info.st_mode) and info.st_mode & 0o6000)) and path not in known:
                known.add(path)
                _note(report / "dangerous", f"{stat.filemode(info.st_mode)} {path}")
        _note(report / "rounds", "")


def _attack(store: Path, report: Path) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    known: set[str] = set()
    while True:
        for path, info in _files(store):
            if path in known:
                continue
            if stat.S_ISREG(info.st_mode) and info.st_mode & 0o4000 and os.access(path, os.X_OK):
                ran = subprocess.run([path], capture_output=True, text=True)
                _note(report / "taken", f"ran {path}: {ran.stdout.strip()}")
            elif stat.S_ISBLK(info.st_mode) and os.access(path, os.R_OK):
                _note(report / "taken", f"opened {path}")
            elif stat.S_ISDIR(info.st_mode) and os.access(path, os.W_OK):
                _note(report / "taken", f"may write into {path}")
            else:
                continue
            known.add(path)


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    for folder, folders, names in os.walk(root):
        for name in folders + names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                yield path, os.lstat(path)


def _note(file: Path, text: str) -> None:
    with file.open("a") as stream:
        stream.write(text + "\n")


def hostile_sqsh(folder: Path) -> Path:
    """A .sqsh of a root file system with a setuid program, devices that everybody may use, and padding."""
    tree, file = folder / "tree", folder / "hostile.sqsh"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/environment").write_text("PATH=/usr/bin:/bin\n")
    (tree / "usr").mkdir()
    for name in ("aaa", "zzz"):  # first and last, whatever the order is
        shutil.copy("/usr/bin/id", tree / name)
        (tree / name).chmod(0o6755)
    for number in range(24):
        (tree / f"padding-{number:02}").write_bytes(os.urandom(4 << 20))
    words = ["mksquashfs", tree, file, "-quiet", "-no-progress", "-all-root"]
    for pseudo in ("aab b 666 0 0 7 0", "disk b 666 0 0 7 0", "null c 666 0 0 1 3", "open d 777 0 0"):
        words += ["-p", pseudo]
    subprocess.run(words, check=True, capture_output=True)
    shutil.rmtree(tree)
    return file
