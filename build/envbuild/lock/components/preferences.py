"""Versions that upstream tested with: taken where everything accepts them, and where nothing decides another.

In the order of authority: the lead's files before those of other leads, and in one tree

1. uv.lock, without what its authors leave to their image (an override with a marker that never holds);
2. the scripts and Dockerfiles of its CI: releases and tags that they install;
3. the NGC image that these begin from: it says which line of torch upstream's tests run on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from envbuild.catalog import knowledge
from envbuild.catalog.base import Base
from envbuild.catalog.catalog import Catalog
from envbuild.core import jsonread
from envbuild.core.progress import Reporter
from envbuild.lock.components.install_scripts import NGC_IMAGE, Installs, read_installs, release_of
from envbuild.lock.components.models import Chosen, Companion, Forced, Lead, Preference
from envbuild.lock.components.tree import Tree, trees_of
from envbuild.lock.components.upstream import MANIFEST, holds_on, packages_of
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs.request import NGC_TABLE
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv_lock import UvLock, parse_uv_lock

UV_LOCK = "uv.lock"
# Of some versions there PyPI has only a stub, whose build fetches the wheel from there by means of wheel_stub: of
# nvdlfw-inspect 0.2.1, which so does not install without build isolation. 0.2.2 is a wheel on PyPI.
NVIDIA_INDEX = "https://pypi.nvidia.com"


def upstream_preferences(leads: Sequence[Lead], base: Base, context: LockContext) -> dict[str, Preference]:
    """The versions of packages that upstream's files name, by canonical name; the first file that names one wins."""
    by_name: dict[str, Preference] = {}
    for tree in trees_of((lead.chosen for lead in leads), context.repositories):
        lead = tree.component
        with context.reporter.step(f"read which versions {lead.title} was tested with"):
            for where, versions in ((UV_LOCK, _of_uv_lock(tree, base, context.reporter)), *_of_scripts(tree, base)):
                for name, version in versions.items():
                    preference = Preference(version=version, because=f"{where} of {lead.title}", by=lead.name)
                    by_name.setdefault(name, preference)
    return by_name


def without_overruled(
    forced: Mapping[str, Forced], preferences: Mapping[str, Preference], lead: str, base: Base
) -> dict[str, Forced]:
    """What upstream forces, without what another tree than the lead's forces against a version of the lead's files.

    NeMo 3's tree forces wandb>=0.27.1, which Megatron-Bridge's lock of the same day does not have.
    """
    return {
        name: forced_range
        for name, forced_range in forced.items()
        if forced_range.by == lead or not _is_against(forced_range, preferences.get(name), lead, base)
    }


def _is_against(forced_range: Forced, preference: Preference | None, lead: str, base: Base) -> bool:
    if preference is None or preference.by != lead:
        return False
    parts = (text.partition(";") for text in forced_range.texts)
    ranges = [SpecifierSet(text) for text, _, marker in parts if holds_on(marker.strip(), base)]
    return any(not allowed.contains(preference.version, prereleases=True) for allowed in ranges)


def _of_uv_lock(tree: Tree, base: Base, reporter: Reporter) -> dict[str, str]:
    text = tree.top(UV_LOCK)
    if text is None:
        return {}
    try:
        return locked_versions(parse_uv_lock(text), base)
    except ValueError as error:
        # Preferences may be missing: a form that uv invents tomorrow must not stop every lock.
        reporter.note(f"note: {UV_LOCK} of {tree.component.title} is not understood: {error}")
        return {}


def locked_versions(uv_lock: UvLock, base: Base) -> dict[str, str]:
    """The versions that a uv.lock has for a base, by name; without those from its own tree, or NVIDIA's index.

    Of a package that is there once per marker, the one for the base; what comes from git with the release that its
    version is of.
    """
    left_out = _left_to_the_image(uv_lock, base)
    by_name: dict[str, str] = {}
    for package in uv_lock.packages:
        name, markers = canonicalize_name(package.name), package.resolution_markers
        in_tree = package.source.keys() & {"directory", "editable", "virtual", "path"}
        if name in left_out or in_tree or not package.version:
            continue
        if package.source.get("registry", "").startswith(NVIDIA_INDEX):
            continue
        if markers and not any(holds_on(marker, base) for marker in markers):
            continue
        try:
            # 2.11.0+c188b533 was built from a commit of 2.11.0.
            by_name.setdefault(name, Version(package.version).public)
        except InvalidVersion:
            continue
    return by_name


def _left_to_the_image(uv_lock: UvLock, base: Base) -> set[str]:
    """The packages of which every override is for another platform: their image brings them."""
    # A marker that never holds left a package out before uv had exclude-dependencies (astral-sh/uv#12616).
    every, holding = set[str](), set[str]()
    for override in uv_lock.manifest.overrides:
        name = canonicalize_name(override.name)
        every.add(name)
        if holds_on(override.marker, base):
            holding.add(name)
    return every - holding


def _scripts(tree: Tree, base: Base) -> Iterator[tuple[str, Installs]]:
    """The scripts and Dockerfiles that are there, each with what it installs."""
    for file in knowledge.install_scripts().files:
        text = tree.top(file)
        if text is not None:
            yield file, read_installs(text, base)


def _of_scripts(tree: Tree, base: Base) -> Iterator[tuple[str, dict[str, str]]]:
    for file, installs in _scripts(tree, base):
        tagged = {name: release for name, ref in installs.refs.items() if (release := release_of(ref))}
        yield file, installs.releases | tagged


def script_companions(tree: Tree, base: Base) -> list[Companion]:
    """What upstream's scripts build from git: as a release where the tag is of one, else at the commit."""
    listed = []
    repositories = knowledge.install_scripts().repositories
    for file, installs in _scripts(tree, base):
        for name, ref in installs.refs.items():
            release = release_of(ref)
            for package in packages_of(name):
                bare = Companion(package=package, where=file)
                pin = replace(bare, specifier=f"=={release}") if release else None
                listed.append(pin or replace(bare, git=repositories.get(name), ref=ref))
    return listed


@dataclass(frozen=True, kw_only=True)
class NgcImage:
    """The NGC image that upstream's CI runs in.

    Attributes:
        release: ``25.06``.
        because: the file that says so.
    """

    release: str
    because: str


def upstream_image(leads: Sequence[Lead], base: Base, repositories: Repositories) -> NgcImage | None:
    """The image of the first lead that names one: in requirements/manifest.json, else in a Dockerfile."""
    for tree in trees_of((lead.chosen for lead in leads), repositories):
        scripts = ((file, installs.image) for file, installs in _scripts(tree, base))
        for where, image in ((MANIFEST, _of_manifest(tree.top(MANIFEST) or "")), *scripts):
            if match := NGC_IMAGE.match(image):
                return NgcImage(release=match["release"], because=f"{where} of {tree.component.title}")
    return None


def _of_manifest(text: str) -> str:
    try:
        return str(jsonread.foreign(text)["ngc-pytorch"])
    except (ValueError, KeyError, TypeError):
        return ""


def torch_preference(torch: Chosen, image: NgcImage, catalog: Catalog, index: PackageIndex) -> Preference | None:
    """The release of torch that is nearest to the one of upstream's image; None: nothing says which torch it has.

    The newest of the image's line or before it; where the component may be none of these (for the base's CUDA), the
    newest of the first line after it.
    """
    table = catalog.companions(NGC_TABLE)
    entry = table.for_release(image.release) if table is not None else None
    if entry is None or "torch" not in entry.components:
        return None
    line = Version(entry.components["torch"].removeprefix("==").removesuffix(".*"))

    def torch_within(limit: str, where: PackageIndex) -> str | None:
        return where.version("torch", ",".join(filter(None, (torch.specifier, limit))))

    version = torch_within(f"<{_after(line)}", index)
    if version is None:
        # None on a base for CUDA 13, say, for which torch has releases from 2.11 on, and the image an older one.
        later = torch_within(f">={_after(line)}", index.lowest())
        version = later and torch_within(f"<{_after(Version(later))}", index)
    because = f"torch {line} of the image {image.release} ({image.because})"
    return Preference(version=version, because=because) if version else None


def _after(version: Version) -> str:
    return f"{version.major}.{version.minor + 1}"
