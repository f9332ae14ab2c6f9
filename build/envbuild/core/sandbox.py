"""Bubblewrap: run a program in a root file system of its own, seeing nothing of the host but what is bound in."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.core.errors import EnvbuildError, MachineError
from envbuild.core.exit_status import tail
from envbuild.core.files import read_number
from envbuild.core.process import ProcessOptions, find_tool, run

# The dynamic loader of bwrap itself would obey these, so they are set for the program inside only.
LOADER_PREFIX = "LD_"
PROC_SYS = Path("/proc/sys")
# What a program may lie in or need; on merged systems all but the first are links into it.
PROGRAMS = ("usr", "bin", "lib", "lib32", "lib64", "libx32")
TRIES = 3
# Docker's and podman's.
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A file or directory of the host, and where it is seen inside. Its place must exist there or be on a tmpfs.

    Attributes:
        device: it is a device that may be used inside.
    """

    source: Path
    target: str
    writable: bool = False
    device: bool = False

    @property
    def option(self) -> str:
        """The word of bubblewrap for it."""
        return "--dev-bind" if self.device else "--bind" if self.writable else "--ro-bind"


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A read-only root with private /proc, /dev (with /dev/shm) and /tmp; user and group 0; nothing of the host.

    Attributes:
        tmpfs: directories of the root that are empty and writable inside; /tmp and /run always are.
        opened: directories of the root that are writable inside, and show what they have.
        links: symbolic links to make, as (place, what it points to); the place must be on a tmpfs.
        environment: the whole environment of the program.
        network: share the host's network; without it only loopback is there, and it is up.
    """

    root: Path
    binds: tuple[Bind, ...] = ()
    tmpfs: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    network: bool = False
    workdir: str = "/"

    def command(self, bwrap: Path, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` inside; to be started with :meth:`process_environment`."""
        # --new-session: a program inside could else type into the terminal it shares (TIOCSTI, CVE-2017-5226;
        # bwrap(1)).
        words = [str(bwrap), "--unshare-all", "--die-with-parent", "--new-session", "--uid", "0", "--gid", "0"]
        if self.network:
            words.append("--share-net")
        words += ["--ro-bind", str(self.root), "/", "--dev", "/dev", "--proc", "/proc"]
        for folder in dict.fromkeys(("/tmp", "/run", *self.tmpfs)):  # noqa: S108 - inside, and private
            words += ["--tmpfs", folder]
        # A tmpfs, with what the root has there bound into it: the root itself stays read-only.
        for folder in self.opened:
            words += ["--tmpfs", folder, *self._shown(folder)]
        for bind in self.binds:
            words += [bind.option, str(bind.source), bind.target]
        for place, points_to in self.links:
            words += ["--symlink", points_to, place]
        for name, value in self.environment.items():
            if name.startswith(LOADER_PREFIX):
                words += ["--setenv", name, value]
        return [*words, "--chdir", self.workdir, "--", *argv]

    def _shown(self, folder: str) -> list[str]:
        """What the root has in a folder, on the tmpfs over it."""
        words = []
        for path in sorted((self.root / folder.lstrip("/")).iterdir()):
            seen = f"{folder}/{path.name}"
            words += ["--symlink", str(path.readlink()), seen] if path.is_symlink() else ["--ro-bind", str(path), seen]
        return words

    def process_environment(self) -> dict[str, str]:
        """The environment to start bwrap with, which it hands on: values stay out of command lines and logs."""
        return {name: value for name, value in self.environment.items() if not name.startswith(LOADER_PREFIX)}


def probe(error: type[EnvbuildError] = MachineError) -> Path:
    """The bwrap program, after it has shown that it can make its namespaces here.

    Raises:
        MachineError: bubblewrap is not installed.
        error: the machine forbids namespaces; names the setting.
    """
    bwrap = find_tool("bwrap", "bubblewrap")
    with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
        sandbox = _bare(Path(folder))
        for _ in range(TRIES):  # a machine that forbids namespaces does so every time
            finished = run(
                sandbox.command(bwrap, ["/bin/true"]),
                what="try bubblewrap",
                check=False,
                options=ProcessOptions(env=sandbox.process_environment()),
            )
            if finished.status == 0:
                return bwrap
    cause, fix = why_blocked(PROC_SYS, in_container=any(mark.exists() for mark in CONTAINER_MARKS))
    raise error(
        "bubblewrap cannot make its namespaces on this machine",
        why="\n".join(text for text in (tail(finished.output), cause) if text),
        fix=fix,
    )


def _bare(root: Path) -> Sandbox:
    """A sandbox with the machine's programs and nothing else, its root in an empty folder.

    The machine's whole root would bring along every mount there is: where a shared one goes meanwhile (dockerd's are),
    bubblewrap's remount of it fails with "Invalid argument".
    """
    for name in ("dev", "proc", "run", "tmp"):
        (root / name).mkdir()
    binds = []
    for name in PROGRAMS:
        place = Path("/", name)
        if place.is_symlink():
            (root / name).symlink_to(place.readlink())
        elif place.is_dir():
            (root / name).mkdir()
            binds.append(Bind(source=place, target=str(place)))
    return Sandbox(root=root, binds=tuple(binds))


def why_blocked(proc_sys: Path, *, in_container: bool, root: bool | None = None) -> tuple[str, str]:
    """Which setting keeps a process from making namespaces, and how to change it; empty cause if none stands out."""
    if root is None:
        root = os.geteuid() == 0
    # user_namespaces(7). The next two settings are of distributions: kernels of Debian have had the first, those of
    # Ubuntu have the second since 23.10.
    if read_number(proc_sys / "user/max_user_namespaces") == 0:
        return (
            "user.max_user_namespaces is 0: no user namespaces at all.",
            "As root: sysctl -w user.max_user_namespaces=15000",
        )
    if not root and read_number(proc_sys / "kernel/unprivileged_userns_clone") == 0:
        return (
            "kernel.unprivileged_userns_clone is 0: only root may make user namespaces.",
            "As root: sysctl -w kernel.unprivileged_userns_clone=1 (or run envbuild as root).",
        )
    if not root and read_number(proc_sys / "kernel/apparmor_restrict_unprivileged_userns") == 1:
        return (
            "kernel.apparmor_restrict_unprivileged_userns is 1 (Ubuntu 24.04's default).",
            "As root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (or run envbuild as root).",
        )
    # systempaths: the kernel mounts no new /proc in a user namespace where parts of the old one are covered, and docker
    # covers some.
    if in_container:
        options = (
            "--cap-add SYS_ADMIN and --security-opt seccomp=unconfined, apparmor=unconfined, systempaths=unconfined"
        )
        return (
            "This is a container, and its runtime forbids namespaces or mounts.",
            f"Start the container with --privileged, or with {options}.",
        )
    settings = (
        "user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns"
    )
    return "", f"Check the machine's security policy, and with sysctl: {settings}."
