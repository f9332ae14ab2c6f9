"""``envbuild image resolve``."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import cast

import click
import tomlkit

from envbuild.catalog import toml
from envbuild.catalog.base import Base
from envbuild.cli.command import Command
from envbuild.cli.common import Session, output_options
from envbuild.core.files import machine_errors, write_atomic
from envbuild.core.text import shown
from envbuild.image.base.imported import resolve


@click.command("resolve", cls=Command)
@click.option("--base", required=True, metavar="NAME", help="The base (`envbuild list bases`).")
@click.option("--write", is_flag=True, help="Write it into the base's file in envs/ here; a shipped one is copied.")
@output_options
def command(session: Session, base: str, write: bool) -> None:
    """Ask for the digest of a base that is an image: of its registry, its OCI layout or its tar.

    Nothing is built on a base without one.
    """
    definition, path = session.catalog.base(base), session.catalog.path("bases", base)
    # The folder that holds envs/bases/FILE: the paths of a base are relative to it.
    digest = resolve(definition, base, path.parents[2], session.site.ca_bundle)
    was = definition.pinned
    written: Path | None = None
    if write and was != digest:
        written = session.project / "envs" / "bases" / path.name
        _write(path, written, digest)
    lines = [f"{base}: {definition.obtain.source}", f'digest = "{digest}"']
    if was is not None and was != digest:
        lines.append(f"its file has {was}")
    if written is not None:
        lines.append(f"written to {shown(written)}; a lock on it is for the digest: lock again")
    elif was != digest:
        lines.append(f"write it under [obtain] of {shown(path)}, or run this with --write; then lock again")
    session.done(
        {
            "base": base,
            "source": definition.obtain.source,
            "digest": digest,
            "was": was,
            "written": str(written) if written else None,
        },
        *lines,
    )


def _write(source: Path, to: Path, digest: str) -> None:
    with machine_errors(source, "read"):
        # tomlkit keeps comments and order.
        document = tomlkit.parse(source.read_text(encoding="utf-8"))
    cast("MutableMapping[str, str]", document["obtain"])["digest"] = digest
    text = tomlkit.dumps(document)
    toml.parse(text, Base, str(to))  # what cannot be read again is not written
    write_atomic(to, text)
