"""The metadata of installed distributions: their files (RECORD, PEP 376), their origin (direct_url.json, PEP 610)."""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.core.digests import record_digest
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors, write_atomic
from envbuild.image.scan.packages import python_package, recorded

# For uv's and backup programs' own use; the lock file's mode shows the builder's umask.
VENV_LEFTOVERS = (".lock", ".gitignore", "CACHEDIR.TAG")
# The origin of a wheel from a local folder: its time stamp there.
UV_CACHE = "uv_cache.json"
# The origin of a distribution that did not come from an index.
DIRECT_URL = "direct_url.json"


def rows(info: Path) -> list[tuple[str, str]]:
    """The files that a ``.dist-info`` folder lists: path relative to site-packages, and hash."""
    return [(posixpath.normpath(path), digest) for path, digest in recorded((info / "RECORD").read_bytes()) if path]


def infos(site_packages: Path, packages: Collection[str]) -> dict[str, Path]:
    """The ``.dist-info`` folders of some packages, by canonical name."""
    # The name in a dist-info folder has no dash (binary distribution format, "Escaping and Unicode").
    folders = {str(canonicalize_name(path.name.split("-")[0])): path for path in site_packages.glob("*.dist-info")}
    return {name: path for name, path in sorted(folders.items()) if name in packages}


def conflicts(listed: Mapping[str, list[tuple[str, str]]]) -> Iterator[tuple[str, list[str]]]:
    """Files that several distributions list with different hashes, and the names of those."""
    owners: dict[str, dict[str, str]] = {}
    for name, files in listed.items():
        for path, digest in files:
            owners.setdefault(path, {})[name] = digest
    for path, hashes in sorted(owners.items()):
        if len(set(hashes.values())) > 1:
            yield path, sorted(hashes)


def remove_leftovers(venv: Path, site_packages: Path) -> None:
    """Remove what uv leaves that depends on the building machine, also from the lists of installed files."""
    with machine_errors(venv):
        for name in VENV_LEFTOVERS:
            (venv / name).unlink(missing_ok=True)
        for file in site_packages.glob(f"*.dist-info/{UV_CACHE}"):
            _remove(file)
        for file in site_packages.glob(f"*.dist-info/{DIRECT_URL}"):
            # A wheel of the wheelhouse: its path inside the sandbox is not its origin.
            if str(json.loads(file.read_text(encoding="utf-8")).get("url", "")).startswith("file:"):
                _remove(file)


def _remove(file: Path) -> None:
    """Remove a file of a ``.dist-info`` folder, and its row of RECORD."""
    file.unlink()
    _rewrite(file, None)


def from_commit(info: Path, url: str, commit: str, subdirectory: str | None) -> None:
    """Record the commit of a distribution that was built from a tree of that commit's files."""
    value: dict[str, object] = {
        "url": url,
        "vcs_info": {"vcs": "git", "requested_revision": commit, "commit_id": commit},
    }
    if subdirectory:
        value["subdirectory"] = subdirectory
    data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    # Files are replaced and never written in place: they are hard links into uv's cache.
    write_atomic(info / DIRECT_URL, data)
    _rewrite(info / DIRECT_URL, [f"sha256={record_digest(data)}", str(len(data))])


def _rewrite(file: Path, values: list[str] | None) -> None:
    """Change or remove the row of a file in the RECORD next to it."""
    record, name = file.with_name("RECORD"), f"{file.parent.name}/{file.name}"
    kept = [row for row in csv.reader(io.StringIO(record.read_text(encoding="utf-8"))) if row]
    changed = [row if row[0] != name else [name, *values] if values else None for row in kept]
    text = io.StringIO()
    # As uv writes RECORD; the module's own default is \r\n.
    csv.writer(text, lineterminator="\n").writerows(row for row in changed if row)
    write_atomic(record, text.getvalue())


def distributions(site_packages: Path) -> dict[str, str]:
    """Version by canonical name of every installed distribution."""
    files = ((folder.name, folder / "METADATA") for folder in site_packages.glob("*.dist-info"))
    packages = (python_package(name, {"METADATA": file.read_bytes()}) for name, file in files)
    return dict(sorted((package.name, package.version) for package in packages if package))


def check_against(locked: Mapping[str, str], installed: Mapping[str, str]) -> None:
    """Compare what is installed with what is locked.

    Raises:
        CheckRefusedError: they differ.
    """
    differing = [
        f"{name}: locked {locked.get(name, 'not')}, installed {installed.get(name, 'not')}"
        for name in sorted({*locked, *installed})
        if locked.get(name) != installed.get(name)
    ]
    if differing:
        raise CheckRefusedError(
            "the environment is not what was locked",
            why="\n".join(differing),
            fix="Lock again with --upgrade; if it stays, report it with the lock.",
        )
