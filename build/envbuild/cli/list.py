"""``envbuild list``."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.models import KINDS, Stack
from envbuild.cli.command import Command
from envbuild.cli.common import Session, output_options, shown
from envbuild.cli.report import as_json, tell
from envbuild.core.digests import Json
from envbuild.core.errors import ConfigurationError


@click.command("list", cls=Command)
@click.argument("kind", type=click.Choice(list(KINDS)))
@output_options
def command(session: Session, kind: str) -> None:
    """List the stacks, bases, targets, clusters or matrices that are defined here: yours first, then the shipped."""
    rows: list[dict[str, Json]] = []
    broken: list[ConfigurationError] = []
    for name in session.catalog.names(kind):
        try:
            rows.append(_row(session.catalog, kind, name))
        except ConfigurationError as error:  # noqa: PERF203 - one bad file does not hide the others
            broken.append(error)
    result: dict[str, Json] = {kind: list(rows)}
    if broken:
        together = _together(broken, kind)
        result["error"] = as_json(together)
        tell(together)
    session.done(result, *_lines(rows))
    if broken:
        raise click.exceptions.Exit(ConfigurationError.exit_code)


def _row(catalog: Catalog, kind: str, name: str) -> dict[str, Json]:
    path, model = catalog.path(kind, name), catalog.any(kind, name)
    row: dict[str, Json] = {"name": name, "summary": str(getattr(model, "summary", "")), "path": str(path)}
    if isinstance(model, Stack):
        row["targets"] = {entry.target: list(entry.bases) for entry in model.builds}
    return row


def _lines(rows: list[dict[str, Json]]) -> list[str]:
    """For people: one line for each, and for stacks one for each target."""
    width = max((len(str(row["name"])) for row in rows), default=0)
    lines = []
    for row in rows:
        lines.append(f"{row['name']:<{width}}  {row['summary']}  [{shown(Path(str(row['path'])))}]")
        targets = row.get("targets")
        if isinstance(targets, dict):
            lines += [
                f"{'':<{width}}  {target} on {', '.join(map(str, bases))}"
                for target, bases in targets.items()
                if isinstance(bases, list)
            ]
    return lines


def _together(errors: list[ConfigurationError], kind: str) -> ConfigurationError:
    if len(errors) == 1:
        return errors[0]
    return ConfigurationError(
        f"{len(errors)} files of {kind} cannot be used",
        why="\n".join(f"{error.what}\n{error.why}" for error in errors),
        fix="\n".join(dict.fromkeys(error.fix for error in errors)),
    )
