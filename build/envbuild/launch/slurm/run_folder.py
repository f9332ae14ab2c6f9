"""The folder of a run where its nodes see it: here, or on the storage of a cluster that a login host has."""

from __future__ import annotations

import base64
import contextlib
import shlex
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import MachineError
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished, ProcessOptions, find_tool, run
from envbuild.core.text import quoted_command

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
        target = shlex.quote(self.path)
        self._piped(
            ["tar", "-C", str(source), "-cf", "-", "."],
            f"mkdir -p -- {shlex.quote(str(Path(self.path).parent))} && mkdir -- {target} && tar -C {target} -xf -",
            "copy the plan to the cluster",
        )

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
        names = shlex.join(BROUGHT_BACK)
        archive = target / "brought-back.tar"
        with machine_errors(target):
            target.mkdir(parents=True, exist_ok=True)
        self._shell(
            f"cd -- {shlex.quote(self.path)} && tar --ignore-failed-read -cf - {names} 2>/dev/null",
            "bring back the results",
            into=archive,
        )
        with tarfile.open(archive) as tar:
            # What comes from elsewhere is no reason to write elsewhere: links and absolute names are refused.
            tar.extractall(target, filter="data")
        archive.unlink()

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
        file_name = shlex.quote(f"{self.path}/{name}")
        # As text of one line: what a login shell prints comes before it.
        script = f"printf '\\n'; tail -c +{offset + 1} -- {file_name} 2>/dev/null | base64 -w 0"
        output = self._run([*self._ssh, script], "read the job's log").output
        return base64.b64decode(output.rpartition("\n")[2])

    def exists(self) -> bool:
        """Whether there is such a folder.

        Raises:
            MachineError: the host cannot be reached.
        """
        if self.login is None:
            return Path(self.path).is_dir()
        script = f"[ ! -d {shlex.quote(self.path)} ] || echo is-there"
        return "is-there" in self._run([*self._ssh, script], "look for the run's folder").output.split()

    def remove(self) -> None:
        """Remove it; what cannot be removed stays."""
        if self.login is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        with contextlib.suppress(MachineError):
            self._run([*self._ssh, f"rm -rf -- {shlex.quote(self.path)}"], "remove the run's folder")

    def _shell(self, script: str, what: str, into: Path) -> None:
        command = f"{quoted_command(*self._ssh, script)} >{shlex.quote(str(into))}"
        self._run(["sh", "-c", command], what)

    def _piped(self, first: Sequence[str], script: str, what: str) -> None:
        command = f"{quoted_command(*first)} | {quoted_command(*self._ssh, script)}"
        self._run(["sh", "-c", command], what)

    def _run(self, words: Sequence[str], what: str) -> Finished:
        fix = f"See whether `{quoted_command(*self._ssh, 'true')}` works, and whether its disk has room."
        options = ProcessOptions(timeout_seconds=LIMIT_SECONDS, error=MachineError, fix=fix)
        return run(words, what=what, options=options)

    @property
    def _ssh(self) -> list[str]:
        return [str(find_tool("ssh", "openssh-client")), "-o", "BatchMode=yes", "--", str(self.login)]
