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
from envbuild.image.docker.engine import Box, Engine
from envbuild.image.docker.streams import tar_stream
from envbuild.image.environment import PLAIN_ENVIRONMENT, VENV
from envbuild.lock.record import Lock
from envbuild.sync.imports import PROBE, Imports, check_environment, modules_of, try_imports

# A folder that every base has.
FOLDER = "/var/tmp"  # noqa: S108 - in a container, which is gone afterwards
PROBE_NAME = "envbuild-import.py"
TIMED_OUT = -9


def check_imports(engine: Engine, image_id: str, lock: Lock, target: Target, logs: Path, reporter: Reporter) -> Imports:
    """Import every module that the stack names, in a container of the image.

    Raises:
        CheckRefusedError: a module does not import.
    """
    variables = check_environment(target) | lock.variables(VENV)
    environment = {**PLAIN_ENVIRONMENT, **variables, "PATH": f"{VENV}/bin:{PLAIN_ENVIRONMENT['PATH']}"}
    with engine.box(image_id) as box:
        box.put(FOLDER, b"".join(tar_stream({PROBE_NAME: data_root() / PROBE})))
        runner = _Runner(box, environment)
        probe = f"{FOLDER}/{PROBE_NAME}"
        found = try_imports(modules_of(lock), f"{VENV}/bin/python", runner, logs, reporter, probe=probe)
    return found.refuse_failed()


@dataclass(frozen=True)
class _Runner:
    """A :class:`envbuild.sync.place.Run` inside a container."""

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
