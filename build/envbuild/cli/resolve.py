"""``envbuild image resolve``."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tomlkit

from envbuild.catalog import toml
from envbuild.catalog.base import Base
from envbuild.cli.common import Session, as_command
from envbuild.cli.options import flag, option
from envbuild.core.files import machine_errors, write_atomic
from envbuild.core.text import shown
from envbuild.image.base.imported import resolve


@dataclass(frozen=True, kw_only=True)
class ResolveOptions:
    base: str = option("--base NAME", "The base (`envbuild list bases`).", required=True)
    write: bool = flag(
        "--write", "Write the digest to the base's file in envs/ here; the file of a shipped base is copied."
    )


@as_command("resolve", ResolveOptions)
def command(session: Session, options: ResolveOptions) -> None:
    """Look up the digest of a base that is an image, in its registry, OCI layout or tar.

    Images are built only on bases whose digest is known.
    """
    base = options.base
    definition, path = session.catalog.base(base), session.catalog.path("bases", base)
    # The folder that holds envs/bases/FILE: the paths of a base are relative to it.
    digest = resolve(definition, base, path.parents[2], session.site.ca_bundle)
    was = definition.pinned
    written: Path | None = None
    if options.write and was != digest:
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
