"""``envbuild export``."""

from __future__ import annotations

import re
from pathlib import Path

import click

from envbuild.cli.command import Command
from envbuild.cli.common import (
    PathArgument,
    Session,
    name_option,
    output_options,
    parse_phases,
    phases_option,
    selection_options,
    shown,
)
from envbuild.cli.output import put
from envbuild.core.errors import UsageError
from envbuild.core.files import write_atomic
from envbuild.lock.locate import find_lock
from envbuild.lock.record.export import Format, export_lock

# PEP 751: tools know such files by their names.
PYLOCK_NAME = re.compile(r"^pylock(\.[^.]+)?\.toml$")


@click.command("export", cls=Command)
@selection_options
@click.option(
    "--format",
    "kind",
    required=True,
    type=click.Choice([item.value for item in Format]),
    help="requirements (hashed, host-free), pylock (PEP 751) or cyclonedx (a 1.5 SBOM, host-free).",
)
@name_option
@phases_option("What to write.")
@click.option("--output", type=PathArgument(dir_okay=False), metavar="FILE", help="Where to; default: stdout.")
@output_options
def command(
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
    chosen = Format(kind)
    if chosen is Format.PYLOCK and output is not None and PYLOCK_NAME.match(output.name) is None:
        raise UsageError(
            f"--output {output.name} is no name for a pylock.toml",
            why="Tools know such files by their names: pylock.toml or pylock.NAME.toml, where NAME has no dot.",
            fix=f"Name it so: --output {output.with_name('pylock.toml')}",
        )
    selection = session.select_to_lock(stack, target, base)
    lock = find_lock(session.project, selection, name)
    result = export_lock(
        lock, chosen, parse_phases(phases), site=session.site, store=session.store, reporter=session.reporter
    )
    for note in result.notes:
        session.reporter.note(f"note: {note}")
    if output is not None:
        write_atomic(output, result.text)
    elif not session.as_json:
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
