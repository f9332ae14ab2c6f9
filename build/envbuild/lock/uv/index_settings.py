"""The package indexes of uv's own settings: its variables and its uv.toml files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from envbuild.core import tomlread
from envbuild.core.errors import InternalError
from envbuild.core.process import answer
from envbuild.lock.uv.program import uv_program
from envbuild.lock.uv.settings import settings_files

Use: TypeAlias = Literal["default", "general", "explicit", "find-links"]
# `--default-index ...  The URL of the default package index (by default: <https://...>)` of uv 0.13.
_BY_DEFAULT = re.compile(r"default package index \(by default: <(\S+)>\)")
# UV_INDEX_URL and UV_EXTRA_INDEX_URL are uv's older names for UV_DEFAULT_INDEX and UV_INDEX.
_VARIABLES: dict[str, Use] = {
    "UV_DEFAULT_INDEX": "default",
    "UV_INDEX_URL": "default",
    "UV_INDEX": "general",
    "UV_EXTRA_INDEX_URL": "general",
    "UV_FIND_LINKS": "find-links",
}
_NAMED = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)=(?P<url>\w+://.*)$")


@dataclass(frozen=True)
class IndexSetting:
    """A place of packages that uv is told of.

    Attributes:
        use: of indexes, whether it is asked last (default), before that (general) or for certain packages (explicit).
    """

    url: str
    use: Use
    name: str = ""


def index_settings(environ: Mapping[str, str] = os.environ) -> Iterator[IndexSetting]:
    """All that the settings name; of two for one use, the first wins."""
    for variable, use in _VARIABLES.items():
        text = environ.get(variable, "").strip()
        # An address of the default index may have a comma, and is one.
        for word in [text] if use == "default" else re.split(r"[\s,]+", text):
            if word:
                match = _NAMED.match(word)
                yield IndexSetting(match["url"], use, match["name"]) if match else IndexSetting(word, use)
    for path in settings_files(environ):
        yield from _in_file(path)


def _in_file(path: Path) -> Iterator[IndexSetting]:
    try:
        content = tomlread.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomlread.TOMLDecodeError):
        return  # there is none, or uv itself reports what is wrong with it
    for table in content.get("index", []):
        if isinstance(table, dict) and isinstance(table.get("url"), str):
            use: Use = "explicit" if table.get("explicit") else "default" if table.get("default") else "general"
            yield IndexSetting(table["url"], use, str(table.get("name", "")))
    keys: dict[Use, list[Any]] = {
        "default": [content.get("index-url")],
        "general": content.get("extra-index-url", []),
        "find-links": content.get("find-links", []),
    }
    yield from (IndexSetting(url, use) for use, urls in keys.items() for url in urls if isinstance(url, str))


@cache
def built_in_index() -> str:
    """The index that uv asks where no setting names another, as its help says."""
    text = answer([uv_program(), "lock", "--help"], what="ask uv for its default index")
    match = _BY_DEFAULT.search(" ".join(text.split()))
    if match is None:
        raise InternalError("uv's help does not name its default index")
    return match[1]


def asked_indexes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The addresses that uv asks for a package without an index of its own, the default one last."""
    every = list(index_settings(environ))
    default = next((index.url for index in every if index.use == "default"), None)
    return [*(index.url for index in every if index.use == "general"), default or built_in_index()]


def find_links(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The pages and folders that uv looks into besides; folders as paths."""
    places = (index.url for index in index_settings(environ) if index.use == "find-links")
    return [place.removeprefix("file://") for place in places]
