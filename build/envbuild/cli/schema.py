"""``envbuild schema``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from envbuild.catalog.fields import TomlModel
from envbuild.catalog.models import KINDS
from envbuild.catalog.site import SiteFile
from envbuild.catalog.trust import TrustFile
from envbuild.cli.common import FOLDER, Session, as_command
from envbuild.cli.options import argument, option
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


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    kind: str | None = argument(type=click.Choice(list(ALL)), required=False)
    into: Path | None = option("--into", "Write KIND.schema.json files to this folder.", type=FOLDER)


@as_command("schema", SchemaOptions)
def command(session: Session, options: SchemaOptions) -> None:
    """Print the JSON schema of one kind of file (default: all), or write schema files for your editor."""
    kind, into = options.kind, options.into
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
