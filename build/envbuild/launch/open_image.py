"""Runs commands on this machine inside an image: straight from its .sqsh, or from its layers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from envbuild.core import sandbox
from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.core.exit_status import tail
from envbuild.core.files import machine_errors
from envbuild.core.process import ProcessOptions, run
from envbuild.core.sandbox import Bind, Sandbox
from envbuild.image.squashfs.read import members_of_sqsh
from envbuild.launch.gpus import NvidiaDriver
from envbuild.launch.runtimes import Runtime
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.unpack import unpack, write_members
from envbuild.store.local import temporary_store

# The runtime's name in certificates where the image is put together from its layers.
LAYERS = "layers"
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

# The directory of an image in which a task's files are mounted, empty and writable while a command runs.
TASK_DIR = "/envbuild"
OPEN_SECONDS = 120.0
MOST_ENVIRONMENT_BYTES = 1 << 20
# Prints a root's /etc/environment if it is a file and no folder above it is a link. In sh, because the account that
# opens images may not be allowed to run this Python.
READ_ENVIRONMENT = """
file=$1/etc/environment
[ -h "$1/etc" ] || [ -h "$file" ] || [ ! -f "$file" ] || exec head -c "$2" "$file"
"""
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, kw_only=True)
class OpenImage:
    """An image in which commands can be run, while it is open.

    Attributes:
        rootfs: where its root is unpacked, or where each command mounts it for itself.
        variables: the image's own environment.
        driver: of the GPUs that commands see; without one they see none.
    """

    runtime: Runtime
    sqsh: Path
    rootfs: Path
    variables: Mapping[str, str]
    driver: NvidiaDriver | None = None

    def sandbox(self, binds: Sequence[Bind] = (), variables: Mapping[str, str] = NO_VARIABLES) -> Sandbox:
        """Where a command runs in the image.

        The root is read-only; /tmp, /run and /dev/shm are private and empty. Of this machine's environment nothing is
        visible, only the image's own variables and ``variables``. The network is loopback alone.

        Args:
            binds: files and directories of this machine, and their places inside (below ``TASK_DIR``).
        """
        environment = {**self.variables, **variables}
        tmpfs = (TASK_DIR,) if binds else ()
        if self.driver is not None:
            binds = [*binds, *self.driver.binds()]
            environment = self.driver.environment(environment)
        return Sandbox(root=self.rootfs, binds=tuple(binds), tmpfs=tmpfs, environment=environment)

    def command(self, sandbox: Sandbox, argv: Sequence[str]) -> list[str | Path]:
        """The command line that opens the image and runs ``argv`` in it."""
        opener = self.runtime.opener(self.sqsh, self.rootfs) if self.runtime.opener else []
        return [*opener, *sandbox.command(self.runtime.bwrap, argv)]


@contextlib.contextmanager
def open_image(
    runtime: Runtime, sqsh: Path, scratch_dir: Path | None = None, driver: NvidiaDriver | None = None
) -> Iterator[OpenImage]:
    """Open a .sqsh for running commands in it.

    Mounts live in namespaces of the commands themselves, so none is left behind whatever happens; an unpacked copy
    goes when the image is closed, or, after a kill, when the next one is opened.

    Args:
        scratch_dir: where an unpacked copy may be put; below the system's temporary directory when None.

    Raises:
        MachineError: the file cannot be opened with this runtime.
    """
    with temporary_store(scratch_dir).staging("image") as folder:
        rootfs = folder / "rootfs"
        if runtime.opener is None:
            _unpack(sqsh, rootfs)
        else:
            rootfs.mkdir()
        opener = runtime.opener(sqsh.resolve(), rootfs) if runtime.opener else []
        # Neither a program nor a link of the image is used for this.
        reading = [*opener, "/bin/sh", "-c", READ_ENVIRONMENT, "sh", rootfs, str(MOST_ENVIRONMENT_BYTES)]
        finished = run(
            reading,
            what=f"open {sqsh}",
            check=False,
            options=ProcessOptions(timeout_seconds=OPEN_SECONDS, error=MachineError),
        )
        if finished.status != 0:
            raise MachineError(
                f"{sqsh} cannot be opened with {runtime.name}",
                why=tail(finished.output),
                fix="Check that the file is whole (remove it, and `envbuild image` makes it again), or try another "
                "--runtime.",
            )
        if "\0" in finished.output:
            raise CheckRefusedError(
                f"{sqsh} cannot be opened",
                why="Its /etc/environment has a NUL byte, which no variable can have.",
                fix="Use another image; those of `envbuild image` have no NUL byte there.",
            )
        variables = parse_environment(finished.output)
        yield OpenImage(runtime=runtime, sqsh=sqsh.resolve(), rootfs=rootfs, variables=variables, driver=driver)


@contextlib.contextmanager
def open_layers(
    layers: Sequence[LayerBlob],
    variables: Mapping[str, str],
    driver: NvidiaDriver | None = None,
) -> Iterator[OpenImage]:
    """Put an image together from its layers (lowest first) for running commands in it; gone with the block.

    Raises:
        CheckRefusedError: a layer is damaged, or is not the one that its digest names.
        MachineError: there is no space, or no namespace for bubblewrap.
    """
    runtime = Runtime(name=LAYERS, bwrap=sandbox.probe(), opener=None)
    with temporary_store().staging("image") as folder:
        rootfs = folder / "rootfs"
        rootfs.mkdir()
        unpack(layers, rootfs)
        # Without an opener nobody looks for the .sqsh, which is not there.
        yield OpenImage(runtime=runtime, sqsh=folder, rootfs=rootfs, variables=variables, driver=driver)


def _unpack(sqsh: Path, rootfs: Path) -> None:
    with machine_errors(rootfs):
        rootfs.mkdir()
    try:
        write_members(members_of_sqsh(sqsh), rootfs)
    except CheckRefusedError as error:
        raise MachineError(
            f"{sqsh} cannot be unpacked",
            why=f"{error.what}: {error.why}",
            fix="Check that the file is whole (remove it, and `envbuild image` makes it again).",
        ) from error


def parse_environment(text: str) -> dict[str, str]:
    """The variables of an /etc/environment, read as enroot reads it.

    ``${NAME}`` stands for an earlier variable of the file (never for one of this machine), and one pair of quotes
    around a value is taken off.
    """
    values: dict[str, str] = {}
    for line in text.splitlines():
        # enroot 4.1 writes the image's Env there unquoted, and expands variables and strips quotes when it starts.
        name, equals, value = line.partition("=")
        if not equals or not name:
            continue
        value = _VARIABLE.sub(lambda match: values.get(match[1], ""), value)
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        values[name] = value
    return values
