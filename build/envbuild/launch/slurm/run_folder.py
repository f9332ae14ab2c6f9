"""The folder of a run where its nodes see it: here, or on the storage of a cluster that a login host has."""

from __future__ import annotations

import base64
import contextlib
import io
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from envbuild.core.errors import MachineError
from envbuild.core.files import machine_errors
from envbuild.launch.slurm.login import LoginShell

# What the judge reads. Checkpoints and caches are large, and of no use to it.
BROUGHT_BACK = ("plan.json", "results/results.jsonl", "results/cases")
# A plan and its runner have some 2 MB, results some 200.
LIMIT_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A folder on a cluster's shared storage.

    Attributes:
        path: as the nodes have it.
        login: the host that reaches it; None: this machine does.
    """

    path: str
    login: str | None = None

    def put(self, source: Path) -> None:
        """Copy a folder there; nothing may be there yet.

        Raises:
            MachineError: it cannot be written, or the host cannot be reached.
        """
        if self.login is None:
            with machine_errors(Path(self.path)):
                shutil.copytree(source, self.path)
            return
        packed = io.BytesIO()
        with machine_errors(source), tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(source, arcname=".")
        script = 'mkdir -p -- "${1%/*}" && mkdir -- "$1" && tar -C "$1" -xf -'
        self._run(script, self.path, what="copy the plan to the cluster", stdin=packed.getvalue())

    def bring_back(self, target: Path) -> None:
        """Copy what the judge reads from there.

        Raises:
            MachineError: there is nothing, or the host cannot be reached.
        """
        if self.login is None:
            for name in BROUGHT_BACK:
                source = Path(self.path, name)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, target / name, dirs_exist_ok=True)
                elif source.exists():
                    shutil.copyfile(source, target / name)
            return
        script = 'cd -- "$1" && shift && for name; do [ ! -e "$name" ] || echo "$name"; done | tar -cf - -T -'
        words = ["sh", "-c", script, "sh", self.path, *BROUGHT_BACK]
        with machine_errors(target):
            target.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target) as packed:
                packed.writelines(self._shell.stream(words, what="bring back the results", fix=self._fix))
                packed.seek(0)
                self._unpack(packed, target)

    def read_from(self, name: str, offset: int) -> bytes:
        """What a file there has after so many bytes; nothing while it is not there.

        Raises:
            MachineError: the host cannot be reached.
        """
        if self.login is None:
            with contextlib.suppress(FileNotFoundError), Path(self.path, name).open("rb") as file:
                file.seek(offset)
                return file.read()
            return b""
        # As text: a log may have bytes that are none.
        script = 'tail -c "+$2" -- "$1" 2>/dev/null | base64 -w 0'
        output = self._run(script, f"{self.path}/{name}", str(offset + 1), what="read the job's log")
        return base64.b64decode(output)

    def exists(self) -> bool:
        """Whether there is such a folder.

        Raises:
            MachineError: the host cannot be reached.
        """
        if self.login is None:
            return Path(self.path).is_dir()
        return self._run('[ ! -d "$1" ] || echo there', self.path, what="look for the run's folder").strip() == "there"

    def remove(self) -> None:
        """Remove it; what cannot be removed stays."""
        if self.login is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        with contextlib.suppress(MachineError):
            self._run('rm -rf -- "$1"', self.path, what="remove the run's folder")

    def _unpack(self, packed: IO[bytes], target: Path) -> None:
        try:
            with tarfile.open(fileobj=packed) as tar:
                for member in tar:
                    if not member.isdir():
                        _unpack_file(tar, member, target)
        except tarfile.TarError as error:
            raise MachineError(
                "cannot bring back the results",
                why=f"What came from {self.login}:{self.path} cannot be unpacked: {error}.",
                fix=f"Look at the folder: `{self._shell.shown('ls', '-lR', self.path)}`.",
            ) from error

    def _run(self, script: str, *words: str, what: str, stdin: bytes | None = None) -> str:
        words = ("sh", "-c", script, "sh", *words)
        return self._shell.run(words, what=what, seconds=LIMIT_SECONDS, stdin=stdin, fix=self._fix).output

    @property
    def _shell(self) -> LoginShell:
        return LoginShell(host=self.login)

    @property
    def _fix(self) -> str:
        return f"{self.path} must be writable there, and its disk have room: `{self._shell.shown('df', self.path)}`."


def _unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write a file below a folder. What comes from elsewhere is no reason to write, or to lead, elsewhere."""
    # Not extractall: its filter is not in Debian 12's Python.
    name, content = Path(member.name), tar.extractfile(member) if member.isreg() else None
    if content is None or name.is_absolute() or ".." in name.parts:
        raise tarfile.TarError(f"{member.name!r} is a link, or would be elsewhere")
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    with content, (target / name).open("wb") as file:
        shutil.copyfileobj(content, file)
