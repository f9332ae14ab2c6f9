"""The same paths for every build: its folders are bound to fixed places in a mount namespace of its own.

nvcc puts a number made of its whole command, and so of every path in it, into the names of symbols: no option maps
these. A wheel's bytes would depend on where the cache is.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import MachineError
from envbuild.core.process import find_tool, run

# /run: there on every machine, and nothing in it takes part in a build that has no network.
PLACE = Path("/run/wheel")
# $1 is a folder for a file system in memory, which becomes /run once everything is bound below it: what is bound may
# come from the machine's own /run.
_SCRIPT = """\
set -eu
stage=$1
shift
mount -n -t tmpfs -o mode=755 envbuild "$stage"
mkdir "$stage/wheel"
while [ "$1" != -- ]; do
    mkdir "$stage/wheel/$1"
    mount -n --rbind "$2" "$stage/wheel/$1"
    shift 2
done
shift
mount -n --move "$stage" /run
cd /run/wheel/build
exec "$@"
"""


@dataclass(frozen=True, kw_only=True)
class BuildPaths:
    """Where the folders of a build are, as its processes see them.

    Attributes:
        stage: an empty folder for the namespace's own use; None: the folders are seen where they are.
    """

    build: Path
    environment: Path
    cuda: Path
    stage: Path | None

    @property
    def _folders(self) -> dict[str, Path]:
        return {"build": self.build, "environment": self.environment, "cuda": self.cuda}

    def seen(self, path: Path) -> Path:
        """A path in one of the folders as a process of the build sees it; any other stays."""
        for name, folder in self._folders.items():
            if self.stage is not None and path.is_relative_to(folder):
                return PLACE / name / path.relative_to(folder)
        return path

    def command(self, argv: Sequence[str | Path]) -> list[str | Path]:
        """The command that runs ``argv`` in the build's folder, with its folders where they are to be seen."""
        if self.stage is None:
            return [*argv]
        return _in_namespace(self.stage, [word for pair in self._folders.items() for word in pair], argv)


def _in_namespace(stage: Path, binds: Sequence[str | Path], argv: Sequence[str | Path]) -> list[str | Path]:
    # Root of a namespace of users, an ordinary user may mount, too (user_namespaces(7)).
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    opener = [find_tool("unshare", "util-linux"), *user, "--mount", "--propagation", "private"]
    return [*opener, "/bin/sh", "-c", _SCRIPT, "envbuild", stage, *binds, "--", *argv]


@functools.cache
def are_possible() -> bool:
    """Whether this machine lets a process have a mount namespace of its own."""
    with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
        stage, build = Path(folder, "stage"), Path(folder, "build")
        stage.mkdir()
        build.mkdir()
        try:
            command = _in_namespace(stage, ["build", build], ["/bin/true"])
        except MachineError:
            return False
        return run(command, what="try a mount namespace", check=False).status == 0
