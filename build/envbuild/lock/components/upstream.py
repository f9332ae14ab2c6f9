"""Upstream's own pins: which commits and versions the authors of a component used with it.

Read at the component's commit, with git, without a checkout:

- NeMo (through 2.6): ``requirements/manifest.json``, ``vcs-dependencies``;
- Megatron-Bridge: the submodule ``3rdparty/Megatron-LM``, and ``[tool.uv] override-dependencies`` of pyproject.toml;
- Megatron-LM: ``[tool.uv.sources]`` of pyproject.toml.
"""

from __future__ import annotations

import re
from dataclasses import replace

from packaging.markers import Marker
from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.catalog.fields import MACHINES
from envbuild.core import jsonread
from envbuild.lock.components.models import Companion
from envbuild.lock.components.project_metadata import (
    PYPROJECT,
    UvSettings,
    UvSource,
    readable,
)
from envbuild.lock.components.tree import Tree

MANIFEST = "requirements/manifest.json"
SUBMODULE = "3rdparty/Megatron-LM"
SOURCES = f"{PYPROJECT} [tool.uv.sources]"
OVERRIDES = f"{PYPROJECT} [tool.uv] override-dependencies"
# What the driver ``nemo`` needs of NeMo, and 3.0 has no more.
LLM_COLLECTION = "nemo/collections/llm"
# Upstream's names for repositories where they are others than those of the packages in them.
PACKAGES = {
    "megatron-lm": ("megatron-core",),
    "mcore": ("megatron-core",),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
}
GIT_URL = re.compile(r"^git\+(?P<url>\w+://(?:[^@/]+@)?[^@/#]*/[^@#]*)@(?P<ref>[^@#]+)(?:#.*)?$")


def companions(tree: Tree, base: Base) -> dict[str, Companion]:
    """Upstream's pins in a tree, by package; the first place that names a package wins.

    Args:
        base: pins that upstream states for other platforms or Pythons are left out.

    Raises:
        ConfigurationError: a file is there and cannot be understood.
    """
    by_name: dict[str, Companion] = {}
    for companion in (
        *_manifest(tree),
        *_submodule(tree),
        *overrides(tree),
        *sources(tree),
    ):
        if holds_on(companion.marker, base):
            by_name.setdefault(companion.package, companion)
    return by_name


def holds_on(marker: str, base: Base, extra: str = "") -> bool:
    """Whether a PEP 508 marker (empty: none) holds for a base's platform and Python, and for an extra."""
    if not marker:
        return True
    # A base states no patch release of its Python; .0 is the least that it has.
    python = base.python.version
    environment = {
        "extra": extra,
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": MACHINES[base.platform],
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    return Marker(marker).evaluate(environment)


def _manifest(tree: Tree) -> list[Companion]:
    text = tree.top(MANIFEST)
    if text is None:
        return []
    try:
        # {"vcs-dependencies": {"megatron-lm": {"repo": URL, "ref": COMMIT}, ...}}, as NeMo had it through 2.6.
        entries = jsonread.foreign(text)["vcs-dependencies"]
        return [
            Companion(package=name, where=MANIFEST, git=entry.get("repo"), ref=str(entry["ref"]))
            for raw, entry in entries.items()
            # Of what no stack knows, a pin counts only where it is one.
            if canonicalize_name(raw) in PACKAGES or (isinstance(entry, dict) and "ref" in entry)
            for name in packages_of(raw)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise tree.not_understood(MANIFEST, error) from error


def _submodule(tree: Tree) -> list[Companion]:
    sha = tree.repository.submodule_commit(tree.commit, SUBMODULE)
    if sha is None:
        return []
    url = tree.repository.submodule_url(tree.commit, SUBMODULE)
    return [Companion(package="megatron-core", where=f"submodule {SUBMODULE}", git=url, ref=sha)]


def overrides(tree: Tree) -> list[Companion]:
    """What ``[tool.uv] override-dependencies`` of a tree's pyproject.toml forces, line by line.

    Raises:
        ConfigurationError: the file is there and cannot be understood.
    """
    settings = tree.top_settings()
    try:
        lines = settings.overrides
        # uv takes an overridden package from its source too, whatever the override's range says: Megatron-Bridge
        # 561ae4e has `transformer-engine>=2.9.0a0,<2.10.0` there, rev = "release_v2.11", and 2.11.0 in its uv.lock.
        places = {source.package: source for source in _pinned_sources(settings) if not source.marker}
    except ValueError as error:
        raise tree.not_understood(PYPROJECT, error) from error
    listed = []
    for requirement in readable(lines):
        # sys_platform == 'never': uv's advice before it had exclude-dependencies (astral-sh/uv#12616).
        if requirement.marker and "never" in str(requirement.marker):
            continue  # upstream's way of leaving out what its base image brings
        pinned = Companion(
            package=canonicalize_name(requirement.name), where=OVERRIDES, marker=str(requirement.marker or "")
        )
        place, match = places.get(pinned.package), GIT_URL.match(requirement.url or "")
        if match is not None:
            pinned = replace(pinned, git=match["url"], ref=match["ref"])
        elif place is not None:
            pinned = replace(pinned, git=place.git, ref=place.ref)
        if pinned.ref:
            listed += [replace(pinned, package=name) for name in packages_of(pinned.package)]
        elif requirement.specifier:
            listed.append(replace(pinned, specifier=str(requirement.specifier)))
    return listed


def sources(tree: Tree) -> list[Companion]:
    """The commits and tags that ``[tool.uv.sources]`` of a tree's pyproject.toml takes.

    A branch there is not a pin.

    Raises:
        ConfigurationError: the file is there and cannot be understood.
    """
    try:
        entries = _pinned_sources(tree.top_settings())
    except ValueError as error:
        raise tree.not_understood(PYPROJECT, error) from error
    return [
        Companion(package=name, where=SOURCES, git=entry.git, ref=entry.ref, marker=entry.marker)
        for entry in entries
        for name in packages_of(entry.package)
    ]


def _pinned_sources(settings: UvSettings) -> list[UvSource]:
    return [source for source in settings.sources() if source.ref_kind in ("rev", "tag")]


def packages_of(name: str) -> tuple[str, ...]:
    """The packages that a repository of upstream's name holds."""
    canonical = canonicalize_name(name)
    return PACKAGES.get(canonical, (canonical,))
