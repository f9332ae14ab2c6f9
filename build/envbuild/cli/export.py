"""``envbuild export``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.cli.command import given_options
from envbuild.cli.common import ANY_PATH, LockedOptions, Session, as_command, phases
from envbuild.cli.options import include, no_effect, option
from envbuild.cli.output import put
from envbuild.core.errors import UsageError
from envbuild.core.files import write_atomic
from envbuild.core.text import shown
from envbuild.lock.record.export import Exported, Format, export_lock

DOCKERFILE = "dockerfile"
# PEP 751: tools know such files by their names.
PYLOCK_NAME = re.compile(r"^pylock(\.[^.]+)?\.toml$")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    locked: LockedOptions = include(LockedOptions)
    format: str = option(
        "--format",
        "requirements (hashed, no index), pylock (PEP 751), cyclonedx (a 1.5 SBOM, no index), or dockerfile (a "
        "folder to build with docker, podman or kaniko).",
        required=True,
        type=click.Choice([*(known.value for known in Format), DOCKERFILE]),
    )
    phases: tuple[str, ...] = phases("The phases to write.")
    output: Path | None = option(
        "--output FILE", "The file; default: stdout. For dockerfile: the folder.", type=ANY_PATH
    )


@as_command("export", ExportOptions)
def command(session: Session, options: ExportOptions) -> None:
    """Write a lock in a format that other tools read, with the lock's own versions and hashes."""
    kind, output = options.format, options.output
    _check_options(kind, output, phases_given="phases" in given_options(click.get_current_context()))
    # Targets share a lock: only an image needs one.
    selection, lock = session.locked(options.locked, needs_target=kind == DOCKERFILE)
    if kind == DOCKERFILE and output is not None:
        from envbuild.image.docker.export import export_dockerfile
        from envbuild.image.inputs import ImageInputs

        inputs = ImageInputs(selection=selection, lock=lock, wheels=session.built_wheels(lock, selection))
        export_dockerfile(inputs, session.context, output)
        result = Exported(text="", packages=len(lock.packages()))
    else:
        result = export_lock(lock, Format(kind), options.phases, session.context)
        if output is not None:
            write_atomic(output, result.text)
    for note in result.notes:
        session.reporter.note(f"note: {note}")
    if output is None and not session.as_json:
        put(result.text)
        return
    session.done(
        {
            "format": kind,
            "lock": lock.lock.digest,
            "packages": result.packages,
            "output": str(output.absolute()) if output else None,
            "content": None if output else result.text,
        },
        *([f"{result.packages} packages as {kind}: {shown(output)}"] if output else []),
    )


def _check_options(kind: str, output: Path | None, *, phases_given: bool) -> None:
    """Refuse an output or phases that the format cannot have.

    Raises:
        UsageError: there is one.
    """
    if kind == DOCKERFILE:
        if output is None:
            raise UsageError(
                "--format dockerfile needs --output DIR",
                why="It writes a folder: a Dockerfile and the files that it copies.",
                fix="Name the folder: --output DIR",
            )
        if phases_given:
            raise no_effect("--phases", "with --format dockerfile", "An image has all phases of its lock.")
    elif output is not None and output.is_dir():
        raise UsageError(f"--output {output} is a folder", why=f"--format {kind} writes one file.", fix="Name a file.")
    if kind == Format.PYLOCK.value and output is not None and PYLOCK_NAME.match(output.name) is None:
        raise UsageError(
            f"--output {output.name} is not a name of a pylock.toml",
            why="Tools know such files by their names: pylock.toml or pylock.NAME.toml, where NAME has no dot.",
            fix=f"Name it so: --output {output.with_name('pylock.toml')}",
        )
