"""``envbuild lock --check --online``: whether the indexes still have every file that is locked, by its hash."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from envbuild.catalog.context import Context
from envbuild.catalog.site import Site
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError, NetworkError
from envbuild.core.text import printable, shown
from envbuild.lock.lockfile import UV_LOCK, LockDirectory, read_lock
from envbuild.lock.record.content import locked_content
from envbuild.lock.uv.fetch import GoneError
from envbuild.lock.uv.index_settings import asked_indexes, find_links
from envbuild.lock.uv.simple_page import PAGE_LIMITS, ListedFile, listed_files, project_url
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX_BUILD, locked_indexes, torch_places
from envbuild.lock.uv_lock import parse_uv_lock

_HASHED = ("main", "compile")
_AT_ONCE = 8
_MOST_SECONDS = 900
_Page: TypeAlias = list[ListedFile] | NetworkError


@dataclass(frozen=True, kw_only=True)
class _LockedFiles:
    """The files of a package of a lock.

    Attributes:
        names: of files by hash, as far as they are known: a lock has hashes alone.
        places: pages and folders that may list them.
        any_place: one of these is enough, and others need not be reachable.
    """

    package: str
    version: str
    hashes: frozenset[str]
    names: Mapping[str, str]
    places: tuple[str, ...]
    any_place: bool = False

    @property
    def title(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def release(self) -> tuple[str, Version]:
        return self.package, Version(self.version)

    def problems(self, listed: Sequence[ListedFile]) -> Iterator[str]:
        """What of it is gone or was replaced."""
        gone = self.hashes - {file.sha256 for file in listed}
        own = {file.name: file for file in listed if _release(file.name) == self.release}
        if gone == self.hashes and not any(file.sha256 for file in own.values()):
            why = "states no sha256 of its files" if own else "does not have the release"
            yield f"{self.title}: the index {why}"
            return
        for digest in sorted(gone):
            name = self.names.get(digest, "")
            if name in own:
                yield f"{self.title}: {name} was replaced: locked {digest}, now {own[name].sha256 or 'without a hash'}"
            else:
                yield f"{self.title}: {name or 'a file'} is gone: {digest}"


def refuse_gone(paths: Sequence[Path], context: Context) -> None:
    """Compare every hash of these locks with what the indexes list; warn of yanked releases.

    Raises:
        CheckRefusedError: a file that a lock names is gone, or was replaced.
        ConfigurationError: the site does not say where an index is.
        NetworkError: an index cannot be reached.
    """
    directories = {path: read_lock(path) for path in paths}
    locks = {path: list(_locked_files(lock, _site(lock, context.site))) for path, lock in directories.items()}
    every = [locked for packages in locks.values() for locked in packages]
    with context.reporter.step("compare the locked files with the indexes"):
        pages = _pages(every, context.site)
    problems: dict[Path, list[str]] = {}
    for path, packages in locks.items():
        for locked in packages:
            files = [file for place in locked.places for file in _files(place, locked, pages)]
            yanked = [file for file in files if file.sha256 in locked.hashes and file.yanked is not None]
            if yanked:
                reason = f": {printable(yanked[0].yanked)}" if yanked[0].yanked else ""
                context.reporter.note(f"warning: {shown(path)}: {locked.title} is yanked{reason}")
            lines = [*locked.problems(files)]
            for place in locked.places if lines else ():
                if isinstance(page := pages.get(place), NetworkError):
                    raise page  # it may have them
            problems.setdefault(path, []).extend(lines)
    if refused := {path: lines for path, lines in problems.items() if lines}:
        raise CheckRefusedError(
            f"{len(refused)} of {len(paths)} locks name files that the index does not have any more",
            why="\n".join(f"{shown(path)}: {line}" for path, lines in refused.items() for line in lines),
            fix="Lock again (envbuild lock --stack STACK --upgrade); or keep the files: a folder of find-links, or an "
            "index that drops nothing.",
        )


def _site(lock: LockDirectory, site: Site) -> Site:
    return site.model_copy(update={"indexes": {**lock.addresses, **site.indexes}})


def _locked_files(lock: LockDirectory, site: Site) -> Iterator[_LockedFiles]:
    own = locked_indexes(site, lock.lock.indexes, lock.lock.title).places
    general, folders = asked_indexes(), find_links()
    names = _names(lock)
    for package, content in locked_content(lock, _HASHED).items():
        if not content.hashes or package in lock.own_wheels:
            continue  # what an address names itself, or the lock has
        if package in own:
            places: tuple[str, ...] = (project_url(own[package].url, package),)
        elif package == "torch" and lock.lock.torch.build != PACKAGE_INDEX_BUILD:
            places = tuple(place for _, place in torch_places(site, lock.lock.torch.build))
        else:
            places = (*(project_url(index, package) for index in general), *folders)
        yield _LockedFiles(
            package=package,
            version=content.version,
            hashes=content.hashes,
            names=names,
            places=places,
            any_place=package == "torch",
        )


def _names(lock: LockDirectory) -> dict[str, str]:
    """The names of files by hash, of the uv.lock that may be next to a lock."""
    try:
        packages = parse_uv_lock((lock.path / UV_LOCK).read_text()).packages
        return {file.digest: file.name for package in packages for file in package.files if file.digest}
    except (OSError, ValueError):
        return {}  # it is not committed, and not reviewed


def _pages(packages: Sequence[_LockedFiles], site: Site) -> dict[str, _Page]:
    """What the pages list; nothing where there is no such page."""
    deadline = time.monotonic() + _MOST_SECONDS
    needed = {place for locked in packages if not locked.any_place for place in locked.places}

    def read(url: str) -> _Page:
        seconds = min(PAGE_LIMITS.seconds, deadline - time.monotonic())
        try:
            return listed_files(url, site, replace(PAGE_LIMITS, seconds=max(seconds, 0.0)))
        except GoneError:
            return []
        except NetworkError as error:
            if url in needed:
                raise
            return error

    urls = sorted({place for locked in packages for place in locked.places if "://" in place})
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        return dict(zip(urls, pool.map(read, urls), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def _files(place: str, locked: _LockedFiles, pages: Mapping[str, _Page]) -> Iterator[ListedFile]:
    """The files that a page lists, or those of a package in a local folder."""
    if "://" in place:
        page = pages[place]
        yield from () if isinstance(page, NetworkError) else page
        return
    for path in sorted(Path(place).glob("*")):
        if _release(path.name) == locked.release:
            yield ListedFile(name=path.name, url=str(path), sha256=sha256_file(path))


def _release(file: str) -> tuple[str, Version] | None:
    """The package and the version of a file; None: it is not one of a package."""
    try:
        parsed = parse_wheel_filename(file) if file.endswith(".whl") else parse_sdist_filename(file)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None
    return parsed[0], parsed[1]
