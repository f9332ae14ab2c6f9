"""Daemons of the tests' own: programs from Debian's packages, unpacked and not installed, ended with what used them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.core import locks

READY_SECONDS = 60.0
# Accounts other than root's do not have them in PATH.
SEARCHED = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def has_programs(*names: str) -> bool:
    """Whether this machine has all of these."""
    return all(shutil.which(name, path=SEARCHED) for name in names)


def unpacked(folder: Path, packages: Iterable[str], links: Mapping[str, str] | None = None) -> Path:
    """A folder with Debian's packages, unpacked once for all who ask: no service starts.

    Args:
        links: symbolic links in it, which Debian's alternatives would make, and to what they lead.
    """
    with locks.exclusive(folder.with_suffix(".lock")):
        if not (folder / "complete").is_file():
            loading = folder / "download"
            loading.mkdir(parents=True, exist_ok=True)
            subprocess.run(["apt-get", "download", "-qq", *packages], cwd=loading, check=True)
            for package in loading.glob("*.deb"):
                subprocess.run(["dpkg", "-x", package, folder], check=True)
            for name, target in (links or {}).items():
                (folder / name).symlink_to(target)
            (folder / "complete").touch()
    return folder


def library_folders(folder: Path) -> str:
    """The folders of unpacked packages that have libraries, for LD_LIBRARY_PATH."""
    return ":".join(str(each) for top in ("lib", "usr/lib") for each in (folder / top).glob("*-linux-gnu"))


@dataclass
class Service:
    """A program that runs until it is ended; its log goes on where it is started again.

    Attributes:
        environment: besides this process's own.
    """

    words: Sequence[str | Path]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in self.words], stdout=log, stderr=log, env={**os.environ, **self.environment}
            )

    def wait_until(self, ready: Callable[[], object]) -> None:
        """Wait until it answers; fail with its log when it ends before that."""
        deadline = time.monotonic() + READY_SECONDS
        while not ready():
            assert self.process is not None
            assert self.process.poll() is None, f"ended:\n{self.last_words}"
            assert time.monotonic() < deadline, f"does not answer:\n{self.last_words}"
            time.sleep(0.1)

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it, unless it has ended."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()
            self.process = None

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]
