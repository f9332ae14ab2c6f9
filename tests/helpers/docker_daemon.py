"""A docker daemon of the tests' own: on a socket, with data and without a network of its own, gone with the block."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from helpers.processes import alive
from helpers.services import READY_SECONDS, SEARCHED, has_programs, library_folders, unpacked

# dockerd, what it starts, and the one library of it that small systems lack.
PACKAGES = ("docker.io", "containerd", "runc", "libdevmapper1.02.1")
# Steps run in the host's network, so the daemon needs no bridge and touches no firewall.
NO_NETWORK = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")


def docker_programs(folder: Path) -> dict[str, str]:
    """Variables with which dockerd is found: this machine's, else Debian's."""
    if has_programs("dockerd", "containerd", "runc"):
        return {"PATH": SEARCHED}
    unpacked(folder, PACKAGES)
    return {"PATH": f"{folder}/usr/sbin:{folder}/usr/bin:{SEARCHED}", "LD_LIBRARY_PATH": library_folders(folder)}


@dataclass
class Daemon:
    """A dockerd; :meth:`start` it again after :meth:`kill`, with what it had."""

    folder: Path
    # For sockets: containerd's may have names of 107 bytes.
    short: Path
    programs: dict[str, str]
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    data: Path = field(init=False)

    def __post_init__(self) -> None:
        self.data = self.folder / "data"

    @property
    def host(self) -> str:
        """DOCKER_HOST."""
        return f"unix://{self.short}/socket"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        words = ["dockerd", "--data-root", self.data, "--exec-root", self.short / "exec"]
        words += ["--pidfile", self.short / "pid", "--host", self.host, *NO_NETWORK, *self.options]
        with self.log.open("ab") as log:
            environment = {**os.environ, **self.programs}
            self.process = subprocess.Popen(
                [str(word) for word in words], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + READY_SECONDS
        while not self.answers():
            assert self.process.poll() is None, f"dockerd ended:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"dockerd does not answer:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def answers(self) -> bool:
        from docker import APIClient
        from docker.errors import DockerException

        try:
            with contextlib.closing(APIClient(base_url=self.host, version="1.40", timeout=5)) as api:
                return bool(api.ping())
        except (DockerException, OSError):
            return False

    def kill(self) -> None:
        """End it as a crash does, and what it started."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it, with its containers and mounts."""
        self._end(signal.SIGTERM)
        for path in self.mounts():
            subprocess.run(["umount", "--lazy", path], check=False)

    def mounts(self) -> list[str]:
        """What is mounted below its folder, the innermost first."""
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        found = [line.split()[4].encode().decode("unicode_escape") for line in lines]
        below = (f"{self.folder}/", f"{self.short}/")
        return sorted((path for path in found if path.startswith(below)), reverse=True)

    def _end(self, how: signal.Signals) -> None:
        if self.process is None:
            return
        self.process.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=300)
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        deadline = time.monotonic() + 300
        while any(alive(pid) for pid in self._left()):
            assert time.monotonic() < deadline, "what dockerd started does not end"
            time.sleep(0.05)
        # As after a restart of the machine: dockerd takes a process that nobody waited for as its containerd.
        for stale in (self.short / "pid", self.short / "exec/containerd/containerd.pid"):
            stale.unlink(missing_ok=True)

    def _left(self) -> list[int]:
        """Processes that name its folder: the daemon, its containerd, and what watches over containers."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                program = os.path.basename(words[0])
                below = (f"{self.folder}/".encode(), f"{self.short}/".encode())
                if program.startswith((b"dockerd", b"containerd")) and any(
                    place in word for word in words for place in below
                ):
                    found.append(int(process.name))
        return found


@contextlib.contextmanager
def docker_daemon(folder: Path, programs: dict[str, str], *options: str) -> Iterator[Daemon]:
    """A daemon while the block runs."""
    with tempfile.TemporaryDirectory(prefix="dk", dir="/tmp") as short:
        daemon = Daemon(folder, Path(short), programs, options)
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.stop()
            shutil.rmtree(daemon.data, ignore_errors=True)
