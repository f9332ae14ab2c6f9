"""Runs commands in an open image, as executors do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from envbuild.core.process import Finished, ProcessOptions, run
from envbuild.core.sandbox import Bind
from envbuild.launch.open_image import NO_VARIABLES, OpenImage, open_image
from envbuild.launch.runtimes import Runtime


def run_inside(
    image: OpenImage,
    argv: Sequence[str],
    *,
    binds: Sequence[Bind] = (),
    variables: Mapping[str, str] = NO_VARIABLES,
    timeout_seconds: float | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Finished:
    """Run a command to its end, whatever its exit status."""
    sandbox = image.sandbox(binds, variables)
    options = ProcessOptions(env=sandbox.process_environment(), timeout_seconds=timeout_seconds)
    what = "run a command inside the image"
    return run(image.command(sandbox, argv), what=what, on_line=on_line, check=False, options=options)


def run_in_sqsh(
    runtime: Runtime, sqsh: Path, argv: Sequence[str], scratch: Path | None = None, binds: Sequence[Bind] = ()
) -> Finished:
    """Open a .sqsh, run one command in it, and close it."""
    with open_image(runtime, sqsh, scratch) as image:
        return run_inside(image, argv, binds=binds)
