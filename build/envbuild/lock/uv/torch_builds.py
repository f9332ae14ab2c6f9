"""Where a named build of torch (``2.13.0+cpu``) is found: the site's find-links, or an index of such builds."""

from __future__ import annotations

import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from envbuild.catalog.site import Site
from envbuild.core.errors import ConfigurationError, NetworkError
from envbuild.core.exit_status import mask
from envbuild.lock.models import Lock
from envbuild.lock.uv.named_index import NamedIndex, OwnIndexes
from envbuild.lock.uv.simple_page import PAGE_LIMITS, listed_files

PACKAGE_INDEX_BUILD = "index"
_PROBE = replace(PAGE_LIMITS, seconds=60, idle_seconds=10)


@dataclass(frozen=True)
class TorchSource:
    """A place that has the build.

    ``location`` is an absolute folder or the URL of a page for ``find-links``, a URL for ``torch-index``, None for
    ``package-index``. ``not_these`` are versions that other places of the site have and that are not meant.
    ``indexes`` are those that components have for other packages.
    """

    kind: Literal["find-links", "torch-index", "package-index"]
    location: str | None
    not_these: tuple[str, ...] = ()
    indexes: tuple[NamedIndex, ...] = ()

    def uv_args(self) -> list[str]:
        """What ``uv pip install`` of exactly pinned, hashed packages needs to find the build."""
        if self.kind == "find-links":
            return ["--find-links", self.location or ""]
        # Everything is pinned and hashed, so looking on several indexes can choose nothing else.
        strategy = ["--index-strategy", "unsafe-best-match"]
        return ["--index", self.location or "", *strategy] if self.kind == "torch-index" else []

    def args_for(self, index: str) -> list[str]:
        """The same for the packages of an index of their own; an empty name: for all others."""
        named = [named.argument for named in self.indexes if named.name == index]
        # The default one's place is taken, so that it is not asked.
        return ["--index", *named, "--default-index", *named] if named else self.uv_args()

    def folder(self) -> Path | None:
        """The local folder, when it is one."""
        if self.kind != "find-links" or self.location is None or "://" in self.location:
            return None
        return Path(self.location)


PACKAGE_INDEX = TorchSource("package-index", None)


def torch_source(site: Site, version: str, build: str, python: str) -> TorchSource:
    """The first place of the site that has torch ``version`` (a specifier) in ``build`` for ``python`` (``3.11``).

    Raises:
        NetworkError: none has it; names what was tried and the way out.
    """
    if build == PACKAGE_INDEX_BUILD:
        return PACKAGE_INDEX
    tried: list[str] = []
    for source, page in torch_places(site, build):
        names, problem = _wheels_at(page, site)
        if any(_fits(name, version, build, python) for name in names):
            return source
        kind = source.kind.removeprefix("torch-")
        why = problem or f"no torch {version} +{build} for Python {python}"
        tried.append(f"{kind} {mask(source.location or '')}: {why}")
    raise NetworkError(
        f"no place has torch {version} as its +{build} build for Python {python}",
        why="Tried:\n" + "\n".join(f"  {line}" for line in tried),
        fix="Name a place that has it: UV_FIND_LINKS, PIP_FIND_LINKS, ENVBUILD_TORCH_INDEX or [torch_builds] in the "
        "site configuration.\nOr take the package index's own build, made for CUDA and about 10 times the size: "
        "--torch-build index (with --name, where a lock with another build is there)",
    )


def torch_places(site: Site, build: str) -> list[tuple[TorchSource, str]]:
    """Where a site may have a build of torch, in the order of asking, each with the page or folder that lists it."""
    # replace and not format: an address may have other braces
    # (test_index_without_a_place_for_the_build_and_with_other_braces).
    url = site.torch_index.replace("{build}", build)
    places = [(TorchSource("find-links", place), place) for place in map(_absolute, site.find_links)]
    return [*places, (TorchSource("torch-index", url), _absolute(url.rstrip("/") + "/torch/"))]


def locked_torch(site: Site, lock: Lock) -> TorchSource:
    """Where this site has the build of torch that a lock states, and the indexes that it names.

    Raises:
        ConfigurationError: the site does not say where an index is.
        NetworkError: no place has it.
    """
    indexes = tuple(dict.fromkeys(locked_indexes(site, lock.indexes, lock.title).places.values()))
    if not lock.torch.version or "torch" in lock.base.provides:
        return replace(PACKAGE_INDEX, indexes=indexes)  # a stack without torch, or a base that brings it
    public = lock.torch.version.split("+")[0]
    return replace(torch_source(site, f"=={public}", lock.torch.build, lock.base.python), indexes=indexes)


def locked_indexes(site: Site, indexes: Mapping[str, Sequence[str]], title: str) -> OwnIndexes:
    """The packages that are locked from an index of their own, and where this site has it.

    Args:
        indexes: the packages, by the index's name.
        title: what is locked, for messages.

    Raises:
        ConfigurationError: the site does not say where an index is.
    """
    for name, packages in indexes.items():
        if name not in site.indexes:
            raise ConfigurationError(
                f"the site's configuration does not name index {name!r}",
                why=f"{title} takes {', '.join(packages)} from it.",
                fix="Write into the configuration file where it is, or where a mirror of it is:\n"
                f'[indexes]\n{name} = "URL"',
            )
    return OwnIndexes(
        places={package: NamedIndex(name, site.indexes[name]) for name, every in indexes.items() for package in every}
    )


def _absolute(place: str) -> str:
    """A folder as an absolute path (uv runs in another directory), also when given as a file:// URL; pages as is."""
    if place.startswith("file://"):
        return urllib.request.url2pathname(urllib.parse.urlsplit(place).path)
    return place if "://" in place else str(Path(place).expanduser().absolute())


def _wheels_at(place: str, site: Site) -> tuple[list[str], str]:
    """The torch wheels a folder or page lists, and why not, when it could not be read."""
    if "://" not in place:
        folder = Path(place)
        if not folder.is_dir():
            return [], "no such folder"
        return [path.name for path in folder.glob("torch-*.whl")], ""
    try:
        return [file.name for file in listed_files(place, site, _PROBE) if file.name.startswith("torch-")], ""
    except NetworkError as error:
        return [], f"cannot be reached ({error.why.removeprefix(f'{mask(place)}: ')})"


def _fits(wheel: str, version: str, build: str, python: str) -> bool:
    try:
        _, released, _, tags = parse_wheel_filename(wheel)
    except InvalidWheelFilename:
        return False
    # torch has no abi3 wheels: both tags are those of the Python.
    wanted = "cp" + python.replace(".", "")
    return (
        released.local == build
        and SpecifierSet(version).contains(released.public, prereleases=True)
        and any(tag.interpreter == wanted and tag.abi == wanted and "x86_64" in tag.platform for tag in tags)
    )
