"""``envbuild schema``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from envbuild.catalog.fields import TomlModel
from envbuild.catalog.models import KINDS
from envbuild.catalog.site import SiteFile
from envbuild.catalog.trust import TrustFile
from envbuild.cli.command import Command
from envbuild.cli.common import PathArgument, Session, output_options
from envbuild.cli.output import put
from envbuild.core.files import write_atomic
from envbuild.core.text import shown

# Files that are not under envs/: the site's configuration, and the keys that a user trusts.
ALL: dict[str, type[TomlModel]] = {**KINDS, "site": SiteFile, "trust": TrustFile}
# pydantic writes schemas of this draft, and does not name it in them.
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(kind: str) -> dict[str, Any]:
    """The JSON schema of a kind of TOML file (``site``: the site's configuration; ``trust``: trusted keys)."""
    return {"$schema": DIALECT, "title": f"envbuild {kind}", **ALL[kind].model_json_schema()}


@click.command("schema", cls=Command)
@click.argument("kind", type=click.Choice(list(ALL)), required=False)
@click.option("--into", type=PathArgument(file_okay=False), help="Write KIND.schema.json files here.")
@output_options
def command(session: Session, kind: str | None, into: Path | None) -> None:
    """Print the JSON schema of KIND (all kinds without one), or write schema files for your editor."""
    kinds = [kind] if kind else list(ALL)
    schemas = {name: schema_of(name) for name in kinds}
    if into is None:
        put(json.dumps(schemas[kind] if kind else schemas, indent=2) + "\n")
        return
    paths = []
    for name, schema in schemas.items():
        path = into / f"{name}.schema.json"
        write_atomic(path, json.dumps(schema, indent=2) + "\n")
        paths.append(path)
    session.done({"written": [str(path) for path in paths]}, *[shown(path) for path in paths])
