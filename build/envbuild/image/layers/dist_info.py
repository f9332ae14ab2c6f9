"""The metadata of installed distributions: their files (RECORD, PEP 376), their origin (direct_url.json, PEP 610)."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import posixpath
import re
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# For uv's and backup programs' own use; the lock file's mode shows the builder's umask.
VENV_LEFTOVERS = (".lock", ".gitignore", "CACHEDIR.TAG")
# Where a wheel from a local folder came from: its time stamp there.
DIST_INFO_LEFTOVERS = ("uv_cache.json",)
# Where a distribution came from, when that was no index.
DIRECT_URL = "direct_url.json"


class RecordRow(NamedTuple):
    """A file of a distribution: its path relative to site-packages, and its hash as it is stated there."""

    path: str
    hash: str


def rows(info: Path) -> list[RecordRow]:
    """The files that a ``.dist-info`` folder lists."""
    text = (info / "RECORD").read_text(encoding="utf-8")
    return [
        RecordRow(posixpath.normpath(row[0]), row[1] if len(row) > 1 else "")
        for row in csv.reader(io.StringIO(text))
        if row and row[0]
    ]


def infos(site_packages: Path, packages: Collection[str]) -> dict[str, Path]:
    """The ``.dist-info`` folders of some packages, by canonical name."""
    found = {canonical(path.name.split("-")[0]): path for path in site_packages.glob("*.dist-info")}
    return {name: path for name, path in sorted(found.items()) if name in packages}


def conflicts(listed: Mapping[str, list[RecordRow]]) -> Iterator[tuple[str, list[str]]]:
    """Files that several distributions list with different hashes, and the names of those."""
    owners: dict[str, dict[str, str]] = {}
    for name, files in listed.items():
        for row in files:
            owners.setdefault(row.path, {})[name] = row.hash
    for path, hashes in sorted(owners.items()):
        if len(set(hashes.values())) > 1:
            yield path, sorted(hashes)


def canonical(name: str) -> str:
    """A package's name as PEP 503 has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def remove_leftovers(venv: Path, site_packages: Path) -> None:
    """Remove what uv leaves that depends on the building machine, also from the lists of installed files."""
    for name in VENV_LEFTOVERS:
        (venv / name).unlink(missing_ok=True)
    for name in DIST_INFO_LEFTOVERS:
        for file in site_packages.glob(f"*.dist-info/{name}"):
            file.unlink()
            forget(file.parent, name)
    for file in site_packages.glob(f"*.dist-info/{DIRECT_URL}"):
        # A wheel of the wheelhouse: its path inside the sandbox is not its origin.
        if str(json.loads(file.read_text(encoding="utf-8")).get("url", "")).startswith("file:"):
            file.unlink()
            forget(file.parent, DIRECT_URL)


def forget(info: Path, name: str) -> None:
    """Take a file of the ``.dist-info`` folder out of its list of files."""
    _rewrite(info / "RECORD", f"{info.name}/{name}", None)


def from_commit(info: Path, url: str, commit: str, subdirectory: str | None) -> None:
    """Record the commit of a distribution that was built from a tree of that commit's files."""
    value: dict[str, object] = {
        "url": url,
        "vcs_info": {"vcs": "git", "requested_revision": commit, "commit_id": commit},
    }
    if subdirectory:
        value["subdirectory"] = subdirectory
    data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    _replace(info / DIRECT_URL, data)
    digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    _rewrite(info / "RECORD", f"{info.name}/{DIRECT_URL}", [f"sha256={digest}", str(len(data))])


def _rewrite(record: Path, name: str, values: list[str] | None) -> None:
    """Change or remove a row."""
    kept = [row for row in csv.reader(io.StringIO(record.read_text(encoding="utf-8"))) if row]
    text = io.StringIO()
    changed = [row if row[0] != name else [name, *values] if values else None for row in kept]
    csv.writer(text, lineterminator="\n").writerows(row for row in changed if row)
    _replace(record, text.getvalue().encode())


def _replace(file: Path, data: bytes) -> None:
    """Replace a file. It is never written in place: it is a hard link into uv's cache."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
    staged = Path(name)
    staged.chmod(0o644)
    staged.replace(file)
