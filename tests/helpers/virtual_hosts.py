"""Hosts of one machine: network and mount namespaces of their own, joined by a bridge that only tests see. As root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
NETWORK = "10.77.0"
# Of the machine that the hosts hang on: the bridge's own.
GATEWAY = f"{NETWORK}.254"


@dataclass(frozen=True)
class Host:
    """One host; its holder keeps the namespaces while no other process is in them."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]

    @property
    def words(self) -> tuple[str, ...]:
        """The words before a command that is run on it."""
        return ("nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--")

    @property
    def cable(self) -> str:
        """The bridge's end of its cable."""
        return f"to-{self.name}"

    def run(self, *words: str | Path) -> None:
        _run(*self.words, *words)

    def connect(self, state: bool) -> None:
        """Plug its cable in, or pull it."""
        _run("ip", "link", "set", self.cable, "up" if state else "down")

    def processes(self, *but: int) -> list[int]:
        """What runs on it, without its holder."""
        own = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns/net") == own and int(process.name) not in (self.holder.pid, *but):
                    pids.append(int(process.name))
        return pids


@contextlib.contextmanager
def virtual_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Hosts n1, n2, ...; this thread, and what it starts, is in their network while the block runs."""
    with _own_network(), contextlib.ExitStack() as running:
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "address", "add", f"{GATEWAY}/24", "dev", "bridge")
        _run("ip", "link", "set", "bridge", "up")
        yield tuple(running.enter_context(_host(number)) for number in range(1, count + 1))


@contextlib.contextmanager
def _host(number: int) -> Iterator[Host]:
    words = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", "echo && exec sleep infinity"]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    host = Host(f"n{number}", f"{NETWORK}.{number}", holder)
    try:
        holder.stdout.readline()
        _run("ip", "link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _run("ip", "link", "set", host.cable, "master", "bridge", "up")
        for words in (("link", "set", "lo", "up"), ("address", "add", f"{host.address}/24", "dev", "eth0")):
            host.run("ip", *words)
        host.run("ip", "link", "set", "eth0", "up")
        yield host
    finally:
        holder.kill()
        holder.communicate()


@contextlib.contextmanager
def _own_network() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def must(status: int) -> None:
        if status != 0:
            raise OSError(ctypes.get_errno(), "cannot change to another network: are you root?")

    with open("/proc/thread-self/ns/net", "rb") as before:
        must(libc.unshare(CLONE_NEWNET))
        try:
            yield
        finally:
            must(libc.setns(before.fileno(), 0))


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, timeout=60)
