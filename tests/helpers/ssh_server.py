"""A real sshd on a port of loopback, and an `ssh` that knows its host, with keys and settings of the tests alone."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.services import SEARCHED, Service, library_folders, unpacked

# sshd itself; it starts programs of the other one.
PACKAGES = ("openssh-server", "openssh-sftp-server", "libwrap0")
HOST = "login-host"
SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
Banner {folder}/banner
{settings}
"""
CLIENT = """\
Host {host}
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    IdentityAgent none
    StrictHostKeyChecking yes
    UserKnownHostsFile {folder}/known-hosts
"""


@dataclass(frozen=True)
class SshServer:
    """A running sshd.

    Attributes:
        programs: a folder for PATH whose ssh uses the tests' settings.
        folder: with the keys; ``authorized`` has those that are let in.
    """

    folder: Path
    programs: Path


def sshd_program(folder: Path) -> Path:
    """This machine's sshd, else Debian's."""
    own = shutil.which("sshd", path=SEARCHED)
    return Path(own) if own else unpacked(folder, PACKAGES) / "usr/sbin/sshd"


@contextlib.contextmanager
def ssh_server(sshd: Path, folder: Path, variables: Mapping[str, str] | None = None) -> Iterator[SshServer]:
    """An sshd that lets this user in by a key; what it prints first is a banner.

    Args:
        variables: of the sessions.
    """
    folder.mkdir()
    for name in ("host-key", "key", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copyfile(folder / "key.pub", folder / "authorized")
    (folder / "banner").write_text("*** Authorized use only ***\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    public = (folder / "host-key.pub").read_text()
    (folder / "known-hosts").write_text(f"[127.0.0.1]:{port} {public}")
    settings = f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}" if variables else ""
    (folder / "sshd.conf").write_text(SERVER.format(folder=folder, port=port, settings=settings))
    user = pwd.getpwuid(os.getuid()).pw_name
    (folder / "ssh.conf").write_text(CLIENT.format(folder=folder, port=port, user=user, host=HOST))
    programs = folder / "programs"
    programs.mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh.conf "$@"\n')
    (programs / "ssh").chmod(0o755)
    words: list[Path | str] = [sshd, "-D", "-e", "-f", folder / "sshd.conf"]
    words = _as_root(words, folder) if os.getuid() == 0 else words
    service = Service(words, {"LD_LIBRARY_PATH": library_folders(sshd.parents[2])}, folder / "log")
    service.start()
    try:
        service.wait_until(lambda: _answers(port))
        yield SshServer(folder, programs)
    finally:
        service.end()


def _as_root(words: list[Path | str], folder: Path) -> list[Path | str]:
    """As root, sshd wants an account and a folder that a machine without it lacks: both in a mount namespace."""
    accounts = folder / "passwd"
    accounts.write_text(Path("/etc/passwd").read_text() + "sshd:x:65532:65534::/run/sshd:/usr/sbin/nologin\n")
    script = f'mount -t tmpfs none /run && mkdir -m 755 /run/sshd && mount --bind {accounts} /etc/passwd && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *words]


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
