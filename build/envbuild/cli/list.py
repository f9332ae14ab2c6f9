"""``envbuild list``."""

from __future__ import annotations

import click

from envbuild.catalog.models import KINDS, Stack
from envbuild.cli.command import Command
from envbuild.cli.common import Session, output_options, shown
from envbuild.core.digests import Json
from envbuild.core.errors import ConfigurationError


@click.command("list", cls=Command)
@click.argument("kind", type=click.Choice(list(KINDS)))
@output_options
def command(session: Session, kind: str) -> None:
    """List the stacks, bases, targets, clusters or matrices that are defined here: yours first, then the shipped."""
    rows: list[dict[str, Json]] = []
    broken: ConfigurationError | None = None
    for name in session.catalog.names(kind):
        path = session.catalog.path(kind, name)
        try:
            model = session.catalog.any(kind, name)
        except ConfigurationError as error:
            broken = broken or error
            continue
        row: dict[str, Json] = {"name": name, "summary": str(getattr(model, "summary", "")), "path": str(path)}
        if isinstance(model, Stack):
            row["targets"] = {entry.target: list(entry.bases) for entry in model.builds}
        rows.append(row)
    width = max((len(str(row["name"])) for row in rows), default=0)
    lines = []
    for row in rows:
        lines.append(
            f"{row['name']:<{width}}  {row['summary']}  [{shown(session.catalog.path(kind, str(row['name'])))}]"
        )
        targets = row.get("targets")
        if isinstance(targets, dict):
            lines += [
                f"{'':<{width}}  {target} on {', '.join(map(str, bases))}"
                for target, bases in targets.items()
                if isinstance(bases, list)
            ]
    if broken:
        raise broken
    session.done({kind: list(rows)}, *lines)
