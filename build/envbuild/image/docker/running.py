"""Runs a build in a daemon: shows and logs what it says, and tells why it failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from envbuild.core.digests import Json
from envbuild.core.errors import (
    BuildError,
    CheckRefusedError,
    ConfigurationError,
    EnvbuildError,
    MachineError,
    NetworkError,
)
from envbuild.core.exit_status import mask, tail
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished
from envbuild.core.progress import Reporter
from envbuild.image.docker.engine import NO_SPACE, Engine, daemon_disk_full, pull_failed
from envbuild.image.docker.trace import Step, Steps
from envbuild.lock.uv.program import failure

SPACE_LEFT_BYTES = 64 << 20
# What BuildKit, and podman, say of a RUN whose program ended with another status than 0.
_RAN = re.compile(r"exit(?:ed with)?(?: code| status)?:? ?(\d+)\s*$|exit (?:code|status) (\d+)", re.IGNORECASE)
# How an image that a FROM names is not had.
_PULL = re.compile(
    r"failed to (resolve|load metadata|do request|copy|authorize)|pull access denied|manifest unknown"
    r"|no such host|initializing source|unable to copy from source|error pinging|not found: manifest",
    re.IGNORECASE,
)
# settle.py's own word.
_NOT_LOCKED = "the environment is not what was locked"


def run_build(
    engine: Engine,
    context: Iterable[bytes],
    parameters: Mapping[str, Json],
    what: str,
    log: Path,
    reporter: Reporter,
) -> str:
    """Build, and return the ID of the image.

    Raises:
        BuildError: a step failed.
        CheckRefusedError: other packages are installed than are locked.
        MachineError: the daemon went away, or has no space.
        NetworkError: a base, an index or a file on it cannot be reached.
    """
    steps = Steps()
    with machine_errors(log), log.open("w", encoding="utf-8", buffering=1) as sink:
        for message in engine.build(context, parameters):
            for line in steps.take(message):
                sink.write(f"{mask(line)}\n")
                reporter.update(mask(line))
        if steps.error:
            sink.write(f"error: {mask(steps.error)}\n")
    if steps.error:
        raise build_failed(steps, what, log, engine)
    if not steps.image_id:
        raise BuildError(
            f"cannot {what}: the daemon named no image",
            why="Its answer ended without the ID of an image and without an error.",
            fix="It must have BuildKit (docker 20.10 or later, or podman). See the log, and the daemon's.",
            log=log,
        )
    return steps.image_id


def build_failed(steps: Steps, what: str, log: Path, engine: Engine) -> EnvbuildError:
    """The error for a build that the daemon ended."""
    step = steps.failed()
    output = mask(step.output()) if step else ""
    free = engine.free_bytes()
    if NO_SPACE in steps.error or NO_SPACE in output or (free is not None and free < SPACE_LEFT_BYTES):
        return daemon_disk_full(tail(output) or steps.error)
    ran = _RAN.search(steps.error)
    if ran is None:
        if _PULL.search(steps.error):
            return pull_failed(steps.error)
        return BuildError(
            f"cannot {what}: the daemon ended the build",
            why=mask(steps.error),
            fix="The words are the daemon's. `--print-dockerfile` prints what it was asked to build.",
            log=log,
        )
    if _NOT_LOCKED in output:
        return CheckRefusedError(
            _NOT_LOCKED,
            why=tail(output.partition(_NOT_LOCKED)[2].strip()),
            fix="Lock again with --upgrade; if it stays, report it with the lock.",
            log=log,
        )
    return _step_failed(step or Step(), int(ran[1] or ran[2]), output, what, log)


def _step_failed(step: Step, status: int, output: str, what: str, log: Path) -> EnvbuildError:
    error = failure(Finished(argv=(), status=status, output=output, seconds=0.0), what, log)
    if isinstance(error, ConfigurationError | NetworkError | MachineError):
        return error
    return BuildError(
        f"cannot {what}: a step exited with status {status}",
        why=tail(output) or f"It printed nothing: {step.name}",
        fix="The lines above are the step's own; the whole of it is in the log. `--print-dockerfile` prints the steps. "
        "A hash that differs means that the index serves another file than the one that was locked.",
        log=log,
    )
