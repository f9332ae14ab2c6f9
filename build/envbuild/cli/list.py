"""``envbuild list``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.catalog.base import NOT_RESOLVED, Base
from envbuild.catalog.cluster import Cluster
from envbuild.catalog.models import KINDS, Target
from envbuild.catalog.stack import Stack
from envbuild.cli.common import Session, as_command
from envbuild.cli.options import argument
from envbuild.cli.report import as_json, print_error
from envbuild.core.digests import Json
from envbuild.core.errors import ConfigurationError
from envbuild.core.text import quoted_command, shown
from envbuild.sync.imports import NEVER_BUILT


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    kind: str = argument(type=click.Choice(list(KINDS)))


@as_command("list", ListOptions)
def command(session: Session, options: ListOptions) -> None:
    """List the shipped definitions and your own: stacks, bases, targets, ..."""
    kind = options.kind
    rows: list[dict[str, Json]] = []
    broken: list[ConfigurationError] = []
    for name in session.catalog.names(kind):
        try:
            rows.append(_row(session, kind, name))
        except ConfigurationError as error:  # noqa: PERF203 - one bad file does not hide the others
            broken.append(error)
    result: dict[str, Json] = {kind: list(rows)}
    if broken:
        together = _together(broken, kind)
        # Next to what could be read: a script gets both from one document.
        result["error"] = as_json(together)
        print_error(together)
    session.done(result, *_lines(rows))
    if broken:
        # Without the error, which was printed with the result.
        raise click.exceptions.Exit(ConfigurationError.exit_code)


def _row(session: Session, kind: str, name: str) -> dict[str, Json]:
    path, model = session.catalog.path(kind, name), session.catalog.any(kind, name)
    row: dict[str, Json] = {"name": name, "summary": str(getattr(model, "summary", "")), "path": str(path)}
    if isinstance(model, (Stack, Cluster)):
        row["extends"] = model.extends
    if isinstance(model, Stack):
        from envbuild.cli.states import states  # locks and images are looked at for stacks alone

        row["targets"] = {entry.target: list(entry.bases) for entry in model.builds}
        row["states"] = {target: dict(bases) for target, bases in states(session.project, name, model).items()}
    if isinstance(model, Base):
        row["platform"], row["source"], row["digest"] = model.platform, model.obtain.source, model.pinned
        row["resolved"], row["never_built"] = model.is_resolved, model.never_built
    if isinstance(model, Cluster):
        row["launcher"], row["source"], row["never_run"] = model.launcher, model.source, model.never_run
    if isinstance(model, Target):
        row["platform"], row["sm"] = model.platform, list(model.sm)
    return row


def _lines(rows: list[dict[str, Json]]) -> list[str]:
    """For people: one line for each, and for stacks one for each state that images of a target have."""
    width = max((len(str(row["name"])) for row in rows), default=0)
    lines = []
    for row in rows:
        extends = f"  (extends {row['extends']})" if row.get("extends") else ""
        lines.append(f"{row['name']:<{width}}  {row['summary']}{extends}  [{shown(Path(str(row['path'])))}]")
        if row.get("never_built"):
            lines.append(f"{'':<{width}}  {NEVER_BUILT}")
        if row.get("never_run"):
            lines.append(f"{'':<{width}}  never run here")
        if row.get("resolved") is False:
            resolve = quoted_command("envbuild", "image", "resolve", "--base", str(row["name"]))
            lines.append(f"{'':<{width}}  {row['source']}: {NOT_RESOLVED} ({resolve})")
        states = row.get("states")
        if isinstance(states, dict):
            for target, bases in states.items():
                lines += [f"{'':<{width}}  {target} on {text}" for text in _by_state(bases)]
    return lines


def _by_state(bases: Json) -> list[str]:
    """``debian12, ubuntu2404: locked, never built``: the bases of a target by their state."""
    by_state: dict[str, list[str]] = {}
    if isinstance(bases, dict):
        for base, state in bases.items():
            by_state.setdefault(str(state), []).append(base)
    return [f"{', '.join(names)}: {state}" for state, names in by_state.items()]


def _together(errors: list[ConfigurationError], kind: str) -> ConfigurationError:
    if len(errors) == 1:
        return errors[0]
    return ConfigurationError(
        f"{len(errors)} files of {kind} cannot be used",
        why="\n".join(f"{error.what}\n{error.why}" for error in errors),
        fix="\n".join(dict.fromkeys(error.fix for error in errors)),
    )
