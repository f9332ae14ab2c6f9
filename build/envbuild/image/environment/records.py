"""What the distributions of an environment say of their files (PEP 376 and 610: RECORD and direct_url.json)."""

from __future__ import annotations

import csv
import hashlib
import io
import posixpath
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from envbuild.core.digests import Json, canonical_json
from envbuild.core.files import machine_errors, write_atomic


class Row(NamedTuple):
    """A file of a distribution: its path relative to site-packages, and its hash as it is stated there."""

    path: str
    hash: str


def rows(info: Path) -> list[Row]:
    """The files that a ``.dist-info`` folder lists."""
    text = (info / "RECORD").read_text(encoding="utf-8")
    return [
        Row(posixpath.normpath(row[0]), row[1] if len(row) > 1 else "")
        for row in csv.reader(io.StringIO(text))
        if row and row[0]
    ]


def infos(site_packages: Path, packages: Collection[str]) -> dict[str, Path]:
    """The ``.dist-info`` folders of some packages, by canonical name."""
    found = {str(canonicalize_name(path.name.split("-")[0])): path for path in site_packages.glob("*.dist-info")}
    return {name: path for name, path in sorted(found.items()) if name in packages}


def conflicts(listed: Mapping[str, list[Row]]) -> Iterator[tuple[str, list[str]]]:
    """Files that several distributions list with different hashes, and the names of those."""
    owners: dict[str, dict[str, str]] = {}
    for name, files in listed.items():
        for row in files:
            owners.setdefault(row.path, {})[name] = row.hash
    for path, hashes in sorted(owners.items()):
        if len(set(hashes.values())) > 1:
            yield path, sorted(hashes)


def forget(info: Path, name: str) -> None:
    """Take a file of the ``.dist-info`` folder out of its list of files."""
    _rewrite(info / "RECORD", f"{info.name}/{name}", None)


def from_commit(info: Path, url: str, commit: str, subdirectory: str | None) -> None:
    """Let a distribution say that it is of a commit, where it was built from a tree of that commit's files."""
    value: dict[str, Json] = {"url": url, "vcs_info": {"vcs": "git", "requested_revision": commit, "commit_id": commit}}
    if subdirectory:
        value["subdirectory"] = subdirectory
    data = canonical_json(value)
    write_atomic(info / "direct_url.json", data)
    digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    _rewrite(info / "RECORD", f"{info.name}/direct_url.json", [f"sha256={digest}", str(len(data))])


def _rewrite(record: Path, name: str, values: list[str] | None) -> None:
    """Change or remove a row. Never in place: the file is a hard link into uv's cache."""
    with machine_errors(record):
        kept = [row for row in csv.reader(io.StringIO(record.read_text(encoding="utf-8"))) if row]
        text = io.StringIO()
        changed = [row if row[0] != name else [name, *values] if values else None for row in kept]
        csv.writer(text, lineterminator="\n").writerows(row for row in changed if row)
    write_atomic(record, text.getvalue())
