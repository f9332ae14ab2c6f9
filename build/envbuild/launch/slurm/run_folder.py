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

# What the judge reads; the plan is here. Checkpoints and caches are large, and of no use to it.
BROUGHT_BACK = ("results/results.jsonl", "results/cases")
# A plan and its runner have some 2 MB, results some 200.
LIMIT_SECONDS = 1800.0
_UNPACK = """\
set -e
rm -rf -- "$1.partial"
mkdir -p -- "$1.partial"
tar -C "$1.partial" -xf -
mv -T -- "$1.partial" "$1"
"""
_PACK = """\
cd -- "$1" 2>/dev/null || exec tar -cf - -T /dev/null
shift
for name; do [ ! -e "$name" ] || echo "$name"; done | tar -cf - -T -
"""


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
        packed = io.BytesIO()
        with machine_errors(source), tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(source, arcname=".")
        # It appears whole: one that is there is used again.
        self._run(_UNPACK, self.path, what="copy the plan to the cluster", stdin=packed.getvalue())

    def bring_back(self, target: Path) -> None:
        """Copy what the judge reads from there, as far as it is there.

        Raises:
            MachineError: it cannot be read or written, or the host cannot be reached.
        """
        words = ["sh", "-c", _PACK, "sh", self.path, *BROUGHT_BACK]
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
        # As text: a log may have bytes that are none.
        script = 'tail -c "+$2" -- "$1" 2>/dev/null | base64 -w 0'
        output = self._run(script, f"{self.path}/{name}", str(offset + 1), what="read the job's log")
        return base64.b64decode(output)

    def exists(self) -> bool:
        """Whether there is such a folder.

        Raises:
            MachineError: the host cannot be reached.
        """
        return self._run('[ ! -d "$1" ] || echo there', self.path, what="look for the run's folder").strip() == "there"

    def remove(self) -> None:
        """Remove it; what cannot be removed stays."""
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
                why=f"What came from {self._shown} cannot be unpacked: {error}.",
                fix=f"Look at the folder: `{self._shell.shown('ls', '-lR', self.path)}`.",
            ) from error

    def _run(self, script: str, *words: str, what: str, stdin: bytes | None = None) -> str:
        words = ("sh", "-c", script, "sh", *words)
        return self._shell.run(words, what=what, seconds=LIMIT_SECONDS, stdin=stdin, fix=self._fix).output

    @property
    def _shown(self) -> str:
        return self.path if self.login is None else f"{self.login}:{self.path}"

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
        raise tarfile.TarError(f"{member.name!r} is no file, or would be elsewhere")
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    with content, (target / name).open("wb") as file:
        shutil.copyfileobj(content, file)
