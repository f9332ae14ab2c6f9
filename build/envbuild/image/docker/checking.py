"""The import check inside an image that a daemon has: in a container of it, without a network."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.data import data_root
from envbuild.catalog.models import Target
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished
from envbuild.core.progress import Reporter
from envbuild.image.checks.loaded_libraries import PROBE as LOADED_PROBE
from envbuild.image.checks.loaded_libraries import loaded_libraries
from envbuild.image.docker.engine import Box, Engine
from envbuild.image.docker.streams import Content, tar_stream
from envbuild.image.layers.sandbox import VENV
from envbuild.lock.lockfile import Lock
from envbuild.sync.imports import PROBE, Imports, check_environment, modules_of, try_imports

# A folder that every base has.
FOLDER = "/var/tmp"  # noqa: S108 - in a container, which is gone afterwards
TIMED_OUT = -9


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What was found out in a container: of the imports, and which libraries torch loads (None without torch)."""

    imports: Imports
    loaded: tuple[str, ...] | None


def try_image(
    engine: Engine, image_id: str, held: Path, lock: Lock, target: Target, logs: Path, reporter: Reporter
) -> Tried:
    """Import every module that the stack names, in a container of the image, and look what torch loads.

    Args:
        held: see :meth:`Engine.box`.

    Raises:
        CheckRefusedError: a module does not import.
    """
    # Beside the image's own variables, which a container has anyway.
    environment = {"HOME": "/tmp", **check_environment(target)}  # noqa: S108 - inside
    files: dict[str, Content] = {Path(name).name: data_root() / name for name in (PROBE, LOADED_PROBE)}
    python = f"{VENV}/bin/python"
    with engine.box(image_id, held) as box:
        box.put(FOLDER, b"".join(tar_stream(files)))
        runner = _Runner(box, environment)
        probe = f"{FOLDER}/{Path(PROBE).name}"
        found = try_imports(modules_of(lock), python, runner, logs, reporter, probe=probe).refuse_failed()
        loaded = loaded_libraries(python, runner, logs, f"{FOLDER}/{Path(LOADED_PROBE).name}")
    return Tried(imports=found, loaded=loaded)


@dataclass(frozen=True)
class _Runner:
    """A :class:`envbuild.sync.install_target.RunCommand` inside a container."""

    box: Box
    environment: Mapping[str, str]

    def __call__(self, argv: Sequence[str], *, what: str, log: Path, timeout_seconds: float | None = None) -> Finished:
        started = time.monotonic()
        status, output = self.box.run([*argv], self.environment, timeout_seconds)
        with machine_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_bytes(output)
        seconds = time.monotonic() - started
        if status == TIMED_OUT and timeout_seconds is not None and seconds >= timeout_seconds:
            raise CheckRefusedError(f"cannot {what}: it ran longer than {timeout_seconds:.0f} s", log=log)
        return Finished(argv=(*argv,), status=status, output=output.decode(errors="replace"), seconds=seconds)
