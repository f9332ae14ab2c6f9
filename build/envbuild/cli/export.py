"""``envbuild export``."""

from __future__ import annotations

import re
from pathlib import Path

import click

from envbuild.cli.command import Command, given_options
from envbuild.cli.common import (
    PathArgument,
    Session,
    name_option,
    output_options,
    parse_phases,
    phases_option,
    selection_options,
)
from envbuild.cli.output import put
from envbuild.core.errors import UsageError
from envbuild.core.files import write_atomic
from envbuild.core.text import shown
from envbuild.lock.lockdir import find_lock
from envbuild.lock.record.export import Exported, Format, export_lock

DOCKERFILE = "dockerfile"
# PEP 751: tools know such files by their names.
PYLOCK_NAME = re.compile(r"^pylock(\.[^.]+)?\.toml$")


@click.command("export", cls=Command)
@selection_options
@click.option(
    "--format",
    "kind",
    required=True,
    type=click.Choice([*(known.value for known in Format), DOCKERFILE]),
    help="requirements (hashed, host-free), pylock (PEP 751), cyclonedx (a 1.5 SBOM, host-free), or dockerfile (a "
    "folder to build with docker, podman or kaniko).",
)
@name_option
@phases_option("What to write.")
@click.option(
    "--output", type=PathArgument(), metavar="FILE", help="Where to; default: stdout. For dockerfile: the folder."
)
@output_options
@click.pass_context
def command(
    context: click.Context,
    session: Session,
    stack: str,
    base: str | None,
    target: str | None,
    kind: str,
    name: str | None,
    phases: str,
    output: Path | None,
) -> None:
    """Write a lock in a format that other tools read, with the lock's own versions and hashes."""
    _check_options(kind, output, phases_given="phases" in given_options(context))
    if kind == DOCKERFILE and output is not None:
        from envbuild.image.docker.export import export_dockerfile
        from envbuild.image.inputs import ImageInputs

        selection = session.select_locked(stack, target, base, name)
        lock = find_lock(session.project, selection, name)
        inputs = ImageInputs(selection=selection, lock=lock, wheels=session.built_wheels(lock, selection))
        export_dockerfile(inputs, session.context, output)
        result = Exported(text="", packages=len(lock.packages()))
    else:
        # Targets share a lock: only an image needs one.
        selection = session.select_locked(stack, target, base, name, needs_target=False)
        lock = find_lock(session.project, selection, name)
        chosen = parse_phases(phases)
        result = export_lock(lock, Format(kind), chosen, session.context)
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
            raise UsageError(
                "--phases has no effect with --format dockerfile",
                why="An image has all phases of its lock.",
                fix="Leave --phases out.",
            )
    elif output is not None and output.is_dir():
        raise UsageError(f"--output {output} is a folder", why=f"--format {kind} writes one file.", fix="Name a file.")
    if kind == Format.PYLOCK.value and output is not None and PYLOCK_NAME.match(output.name) is None:
        raise UsageError(
            f"--output {output.name} is not a name of a pylock.toml",
            why="Tools know such files by their names: pylock.toml or pylock.NAME.toml, where NAME has no dot.",
            fix=f"Name it so: --output {output.with_name('pylock.toml')}",
        )
