"""What the packages of the compile phase declare, read from their sdists and never typed in.

uv would have to build such a package to learn its requirements, which needs torch and a compiler. So a throw-away lock
with empty metadata finds which sdist it is; its PKG-INFO, egg-info and pyproject.toml say the rest, and go into the
project as ``[[tool.uv.dependency-metadata]]``, pinned to that version: wrong metadata would hide real conflicts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name, canonicalize_version

from envbuild.core.errors import CheckRefusedError
from envbuild.lock.components.downloads import NOT_AN_ARCHIVE, archive_members, fetch_sdist
from envbuild.lock.components.models import CompileMetadata
from envbuild.lock.components.project_metadata import (
    PYPROJECT,
    before_build,
    build_requires,
    marked_line,
    refuse_unreadable,
    with_cuda_names,
)
from envbuild.lock.context import LockContext
from envbuild.lock.uv_lock import Packages, ResolvedPackage
from envbuild.store.local import LocalStore

if TYPE_CHECKING:
    from packaging.metadata import RawMetadata

DOWNLOADS_AT_ONCE = 4
PKG_INFO, REQUIRES = "PKG-INFO", "requires.txt"
# An empty file among the others: the sdist has an egg-info of its own.
EGG_INFO = "egg-info"
METADATA_FILES = (PKG_INFO, PYPROJECT, EGG_INFO, REQUIRES)
# Another name whenever other files are kept: what is in the store was read by the rules of its time.
_KIND = "sdist-declared"
# Since this version of the metadata a PKG-INFO says which fields it leaves open, and the others hold (PEP 643).
_OPEN_FIELDS_ARE_STATED = (2, 2)


def read_metadata(
    name: str, version: str, files: Mapping[str, bytes], cuda_major: str | None, sdist_digest: str
) -> CompileMetadata:
    """What the files of an sdist declare.

    Args:
        files: see :func:`declaring_files`.
        cuda_major: the major version of the base's CUDA (``13``); requirements on packages of another one are
            rewritten to it. None: nothing is rewritten.

    Raises:
        CheckRefusedError: they state another name or version than the index, or not what is required.
    """
    if PKG_INFO not in files:
        raise _bad(name, version, "It has no PKG-INFO.")
    from packaging.metadata import parse_email  # not needed where nothing is to be read

    raw, _ = parse_email(files[PKG_INFO])
    stated = (canonicalize_name(raw.get("name", "")), canonicalize_version(raw.get("version", "")))
    # Spellings differ between index and sdist: flash_attn and flash-attn, 2.0 and 2.0.0.
    if stated != (canonicalize_name(name), canonicalize_version(version)):
        raise _bad(name, version, f"Its PKG-INFO is of {raw.get('name', 'no name')} {raw.get('version', '')}.")
    try:
        lines, extras = _declared(raw, files)
        needed = build_requires(_text(files, PYPROJECT))
        refuse_unreadable([*lines, *needed], extras)
    except ValueError as error:
        raise _bad(name, version, str(error)) from error
    requires, rewritten = with_cuda_names(lines, cuda_major)
    return CompileMetadata(
        name=canonicalize_name(name),
        version=version,
        sdist_digest=sdist_digest,
        requires_dist=tuple(requires),
        provides_extra=tuple(extras),
        build_requires=needed,
        rewritten=tuple(rewritten),
    )


def _declared(raw: RawMetadata, files: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """The requirements and the extras, from the first place that states them.

    A PKG-INFO of old metadata, or one that leaves its requirements open, need not name any for there to be some: then
    what setuptools noted in the egg-info counts, and else what pyproject.toml says before a build.

    Raises:
        ValueError: nothing states them, or what does cannot be read.
    """
    lines, extras = raw.get("requires_dist", []), raw.get("provides_extra", [])
    if lines or _holds(raw):
        return lines, extras
    stated = _requires_txt(_text(files, REQUIRES)) if EGG_INFO in files else before_build(_text(files, PYPROJECT))
    if stated is None:
        raise ValueError(
            f"What it requires is not known: its PKG-INFO (metadata {raw.get('metadata_version', 'without version')}) "
            f"names nothing, it has no egg-info, and no [project] of a {PYPROJECT} states it. Only a build would tell."
        )
    return stated[0], list(dict.fromkeys([*extras, *stated[1]]))


def _holds(raw: RawMetadata) -> bool:
    """Whether a PKG-INFO without requirements means that there are none."""
    numbers = re.match(r"(\d+)\.(\d+)$", raw.get("metadata_version", ""))
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OPEN_FIELDS_ARE_STATED:
        return False
    # uv 0.13 takes the metadata from 2.2 on as complete even where Dynamic names Requires-Dist; PEP 643 says that it is
    # not.
    return "requires-dist" not in {field.lower() for field in raw.get("dynamic", [])}


def _text(files: Mapping[str, bytes], name: str) -> str:
    try:
        return files.get(name, b"").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"Its {name} is not UTF-8 text: {error}") from error


def _requires_txt(text: str) -> tuple[list[str], list[str]]:
    """The requirements and the extras of setuptools' requires.txt: lines, below ``[extra:marker]`` as far as they hold.

    Raises:
        ValueError: it is not of that form.
    """
    lines, extras = [], []
    extra = marker = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("#"):
            continue
        if not line.startswith("["):
            lines.append(marked_line(line, marker, extra))
            continue
        if not line.endswith("]"):
            raise ValueError(f"Its {REQUIRES} has a section without an end: {line!r}")
        extra, _, marker = (part.strip() for part in line[1:-1].partition(":"))
        if extra:
            # setuptools writes names of extras into PKG-INFO in this form (safe_extra).
            extra = re.sub(r"[^A-Za-z0-9._-]+", "_", extra)
            extras.append(extra)
    return lines, list(dict.fromkeys(extras))


def declaring_files(name: str, content: bytes) -> dict[str, bytes]:
    """Those of METADATA_FILES that an sdist has: from its one top folder, and from its egg-info wherever that is.

    Raises:
        CheckRefusedError: it is not an archive.
    """
    by_name: dict[str, bytes] = {}
    # By folder (below src/, for example). An egg-info of another name belongs to another package.
    eggs: dict[str, bytes | None] = {}
    try:
        for path, read in archive_members(content):
            folder, _, file = path.rpartition("/")
            if file in (PKG_INFO, PYPROJECT) and folder and "/" not in folder:
                by_name[file] = read()
            elif _is_egg_info(folder, name):
                eggs[folder] = read() if file == REQUIRES else eggs.get(folder)
    except NOT_AN_ARCHIVE as error:
        raise _bad(name, "", f"It is not an archive: {error}") from error
    if eggs:
        by_name[EGG_INFO] = b""
        if (requires := eggs[min(eggs, key=lambda folder: folder.count("/"))]) is not None:
            by_name[REQUIRES] = requires
    return by_name


def _is_egg_info(folder: str, name: str) -> bool:
    top, _, last = folder.rpartition("/")
    stem = last.removesuffix(".egg-info")
    return bool(top) and stem != last and canonicalize_name(stem) == canonicalize_name(name)


def _bad(name: str, version: str, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the sdist of {name} {version} cannot be used".replace("  ", " "),
        why=why,
        fix="Its metadata decides the lock, so nothing is guessed: choose another version of the component.",
    )


def compile_metadata(
    names: Sequence[str],
    locked: Packages,
    cuda_major: str | None,
    context: LockContext,
) -> tuple[CompileMetadata, ...]:
    """The metadata of each package in ``names``, at the version of the throw-away lock ``locked``."""
    packages = [locked[name] for name in names]
    # One without an sdist is a wheel that belongs to this phase (Transformer Engine's core): uv reads it itself.
    built = [package for package in packages if package.sdist is not None or not package.wheels]

    def read(package: ResolvedPackage) -> CompileMetadata:
        context.reporter.update(package.title)
        files, digest = metadata_files(package, context)
        return read_metadata(package.name, package.version, files, cuda_major, digest)

    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        return tuple(pool.map(read, built))


def metadata_files(package: ResolvedPackage, context: LockContext) -> tuple[dict[str, bytes], str]:
    """The files of an sdist that say what it declares, and the sdist's digest; kept in the store.

    An sdist has thousands of files: reading through it costs most of a lock that has everything else at hand.
    """
    digest = package.sdist.sha256 if package.sdist is not None else ""
    if not digest:
        content, digest = fetch_sdist(package, context)
        return declaring_files(package.name, content), digest

    def content_of() -> bytes:
        return fetch_sdist(package, context)[0]

    return kept_declarations(package.name, digest, content_of, context.store), digest


def kept_declarations(name: str, digest: str, content_of: Callable[[], bytes], store: LocalStore) -> dict[str, bytes]:
    """:func:`declaring_files` of the sdist with a digest, whose content is asked for only once."""

    def extract(entry: Path) -> None:
        for file, text in declaring_files(name, content_of()).items():
            (entry / file).write_bytes(text)

    kept = store.get_or_build(_KIND, digest, extract).path
    return {file: (kept / file).read_bytes() for file in METADATA_FILES if (kept / file).is_file()}
