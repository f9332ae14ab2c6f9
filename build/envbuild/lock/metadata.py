"""What the packages of the compile phase declare, read from their sdists and never typed in.

uv would have to build such a package to learn its requirements, which needs torch and a compiler. So a throw-away lock
with empty metadata finds which sdist it is; its PKG-INFO and pyproject.toml say the rest, and go into the project as
``[[tool.uv.dependency-metadata]]``, pinned to that version: wrong metadata would hide real conflicts.
"""

from __future__ import annotations

import io
import re
import ssl
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, canonicalize_version

from envbuild.catalog.site import Site
from envbuild.core import tomlread
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, NetworkError, ResolutionError
from envbuild.core.process import mask
from envbuild.lock.credentials import request_for
from envbuild.store.local import LocalStore

DOWNLOAD_SECONDS = 300
DOWNLOADS_AT_ONCE = 4
FILE = "file"
METADATA_FILES = ("PKG-INFO", "pyproject.toml")
# PEP 518: what builds a project that does not say.
DEFAULT_BUILD_REQUIRES = ("setuptools>=40.8.0",)
# transformer-engine-torch's sdist names the core of one CUDA major version, whatever it is built against.
_CUDA_NAME = re.compile(r"^(?P<stem>.+)[-_.]cu(?P<major>\d\d)$")


@dataclass(frozen=True, kw_only=True)
class CompileMetadata:
    """What one package of the compile phase declares.

    Attributes:
        requires_dist: its requirements, as PEP 508 lines.
        build_requires: what must be installed before it is built.
        rewritten: requirements that named another CUDA than the base's, as ``old -> new``.
    """

    name: str
    version: str
    sdist_digest: str
    requires_dist: tuple[str, ...]
    provides_extra: tuple[str, ...]
    build_requires: tuple[str, ...]
    rewritten: tuple[str, ...]


def read_sdist(name: str, version: str, content: bytes, cuda_major: str | None) -> CompileMetadata:
    """Read PKG-INFO and pyproject.toml of an sdist.

    Args:
        content: the bytes of the .tar.gz or .zip.
        cuda_major: the major version of the base's CUDA (``13``); requirements on packages of another one are
            rewritten to it. None: nothing is rewritten.

    Raises:
        CheckRefusedError: it is no sdist, or states another name or version than the index.
    """
    return _understood(name, version, top_files(name, content), cuda_major, sha256_bytes(content))


def _understood(
    name: str, version: str, files: Mapping[str, bytes], cuda_major: str | None, sdist_digest: str
) -> CompileMetadata:
    if "PKG-INFO" not in files:
        raise _bad(name, version, "It has no PKG-INFO.")
    raw, _ = parse_email(files["PKG-INFO"])
    stated = (canonicalize_name(raw.get("name", "")), canonicalize_version(raw.get("version", "")))
    if stated != (canonicalize_name(name), canonicalize_version(version)):
        raise _bad(name, version, f"Its PKG-INFO is of {raw.get('name', 'no name')} {raw.get('version', '')}.")
    requires, rewritten = _for_cuda(raw.get("requires_dist", []), cuda_major)
    return CompileMetadata(
        name=canonicalize_name(name),
        version=version,
        sdist_digest=sdist_digest,
        requires_dist=tuple(requires),
        provides_extra=tuple(raw.get("provides_extra", [])),
        build_requires=_build_requires(name, version, files.get("pyproject.toml")),
        rewritten=tuple(rewritten),
    )


def _for_cuda(lines: Sequence[str], cuda_major: str | None) -> tuple[list[str], list[str]]:
    requires, rewritten = [], []
    for line in lines:
        try:
            name = Requirement(line).name
        except InvalidRequirement:
            requires.append(line)  # uv will say what is wrong with it
            continue
        match = _CUDA_NAME.match(name)
        if cuda_major is None or match is None or match["major"] == cuda_major:
            requires.append(line)
            continue
        new = line.replace(name, f"{match['stem']}-cu{cuda_major}", 1)
        requires.append(new)
        rewritten.append(f"{line} -> {new}")
    return requires, rewritten


def _build_requires(name: str, version: str, pyproject: bytes | None) -> tuple[str, ...]:
    try:
        return build_requires(None if pyproject is None else pyproject.decode())
    except ValueError as error:
        raise _bad(name, version, f"Its pyproject.toml cannot be read: {error}") from error


def build_requires(pyproject: str | None) -> tuple[str, ...]:
    """What a project must have installed to be built, as PEP 508 lines (PEP 518); ``None``: it has no pyproject.toml.

    Raises:
        ValueError: the text is no TOML, or not of that form.
    """
    lines = tomlread.loads(pyproject or "").get("build-system", {})
    if isinstance(lines, dict):
        lines = lines.get("requires", list(DEFAULT_BUILD_REQUIRES))
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"[build-system] requires is no list of texts: {lines!r}")
    return tuple(lines)


def top_files(name: str, content: bytes, wanted: Sequence[str] = METADATA_FILES) -> dict[str, bytes]:
    """The files directly below the one top folder of an sdist.

    Raises:
        CheckRefusedError: it is no archive.
    """
    found: dict[str, bytes] = {}
    try:
        if content[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                for member in archive.namelist():
                    parts = member.split("/")
                    if len(parts) == 2 and parts[1] in wanted:
                        found[parts[1]] = archive.read(member)
            return found
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:*") as tar:
            for entry in tar:
                parts = entry.name.split("/")
                if entry.isfile() and len(parts) == 2 and parts[1] in wanted:
                    stream = tar.extractfile(entry)
                    found[parts[1]] = stream.read() if stream else b""
                    if len(found) == len(wanted):
                        break
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise _bad(name, "", f"It is no archive: {error}") from error
    return found


def _bad(name: str, version: str, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the sdist of {name} {version} cannot be used".replace("  ", " "),
        why=why,
        fix="Its metadata decides the lock, so nothing is guessed: choose another version of the component.",
    )


def fetch_sdist(package: Mapping[str, Any], folder: Path, site: Site, store: LocalStore) -> tuple[bytes, str]:
    """The sdist of a ``[[package]]`` of a uv.lock, verified, and its digest; kept in the store.

    Args:
        folder: the project's folder, against which paths in uv.lock count.

    Raises:
        ResolutionError: the package has no sdist.
        NetworkError: it cannot be downloaded.
        CheckRefusedError: what came has another hash.
    """
    sdist = package.get("sdist")
    title = f"{package['name']} {package['version']}"
    if sdist is None:
        raise ResolutionError(
            f"{title} has no sdist",
            why="A component of the compile phase is built from its sources.",
            fix='Give it phase = "main" in the stack\'s file if its wheels are meant, or choose another version.',
        )
    return fetch_file(sdist, f"the sdist of {title}", folder, site, store)


def fetch_file(file: Mapping[str, Any], title: str, folder: Path, site: Site, store: LocalStore) -> tuple[bytes, str]:
    """A file that a uv.lock names, verified, and its digest; kept in the store.

    Raises:
        NetworkError: it cannot be downloaded.
        CheckRefusedError: what came has another hash.
    """
    digest = str(file.get("hash", ""))

    def download(entry: Path) -> None:
        content = _read(file, folder, site, title)
        if digest and sha256_bytes(content) != digest:
            raise CheckRefusedError(
                f"{title} is not the file that the index states",
                why=f"Stated {digest}, downloaded {sha256_bytes(content)}.",
                fix="Try again; if it stays, the index or a proxy serves another file.",
            )
        (entry / FILE).write_bytes(content)

    if not digest:
        content = _read(file, folder, site, title)
        return content, sha256_bytes(content)
    return (store.get_or_build("files", digest, download).path / FILE).read_bytes(), digest


def _read(sdist: Mapping[str, Any], folder: Path, site: Site, title: str) -> bytes:
    if "path" in sdist:
        return (folder / str(sdist["path"])).read_bytes()
    url = str(sdist["url"])
    try:
        context = ssl.create_default_context(cafile=str(site.ca_bundle)) if site.ca_bundle else None
        request = request_for(url)
        with urllib.request.urlopen(request, timeout=DOWNLOAD_SECONDS, context=context) as answer:  # noqa: S310 - uv's own URL
            content: bytes = answer.read()
            return content
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise NetworkError(
            f"cannot download {title}",
            why=f"{mask(url)}: {getattr(error, 'reason', error)}",
            fix="Check the network, the proxy and the CA bundle (SSL_CERT_FILE), then run again. Where the index asks "
            "for a password: its URL, UV_INDEX_NAME_USERNAME and UV_INDEX_NAME_PASSWORD, or a netrc file have it.",
        ) from error


def compile_metadata(
    names: Sequence[str],
    locked: Mapping[str, Mapping[str, Any]],
    folder: Path,
    cuda_major: str | None,
    site: Site,
    store: LocalStore,
    on_package: Callable[[str], None],
) -> tuple[CompileMetadata, ...]:
    """The metadata of each package in ``names``, at the version of the throw-away lock ``locked``."""
    packages = [locked[canonicalize_name(name)] for name in names]
    # One without an sdist is a wheel that belongs to this phase (Transformer Engine's core): uv reads it itself.
    built = [package for package in packages if "sdist" in package or not package.get("wheels")]

    def read(package: Mapping[str, Any]) -> CompileMetadata:
        on_package(f"{package['name']} {package['version']}")
        files, digest = _metadata_files(package, folder, site, store)
        return _understood(package["name"], package["version"], files, cuda_major, digest)

    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        return tuple(pool.map(read, built))


def _metadata_files(
    package: Mapping[str, Any], folder: Path, site: Site, store: LocalStore
) -> tuple[dict[str, bytes], str]:
    """The files of an sdist that say what it declares, and the sdist's digest; kept in the store.

    An sdist has thousands of files: reading through it costs most of a lock that has everything else at hand.
    """
    digest = str(package.get("sdist", {}).get("hash", ""))

    def extract(entry: Path) -> None:
        content, _ = fetch_sdist(package, folder, site, store)
        for name, text in top_files(package["name"], content).items():
            (entry / name).write_bytes(text)

    if not digest:
        content, digest = fetch_sdist(package, folder, site, store)
        return top_files(package["name"], content), digest
    kept = store.get_or_build("sdist-metadata", digest, extract).path
    return {name: (kept / name).read_bytes() for name in METADATA_FILES if (kept / name).is_file()}, digest
