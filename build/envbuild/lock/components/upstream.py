"""Upstream's own pins: which commits and versions the authors of a component used with it.

Read at the component's commit, with git, without a checkout:

- NeMo (through 2.6): ``requirements/manifest.json``, ``vcs-dependencies``;
- Megatron-Bridge: the submodule ``3rdparty/Megatron-LM``, and ``[tool.uv] override-dependencies`` of pyproject.toml;
- Megatron-LM: ``[tool.uv.sources]`` of pyproject.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from packaging.markers import Marker
from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.catalog.fields import MACHINES
from envbuild.core import jsonread
from envbuild.core.errors import ConfigurationError
from envbuild.git.refs import Commit
from envbuild.git.repository import GitRepository
from envbuild.lock.components.models import Chosen, Companion
from envbuild.lock.components.project_metadata import (
    PYPROJECT,
    UvSource,
    read_sources,
    readable,
    refuse_unreadable,
    uv_settings,
)
from envbuild.lock.context import Repositories

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


def trees_of(items: Iterable[Chosen], repositories: Repositories) -> Iterator[tuple[Chosen, GitRepository, Commit]]:
    """The components that come from git, each with its repository and its commit."""
    for item in items:
        if item.commit is not None:
            yield item, repositories.at(item.git), item.commit


def companions(repository: GitRepository, commit: Commit, base: Base) -> dict[str, Companion]:
    """Upstream's pins at a commit, by package; the first place that names a package wins.

    Args:
        base: pins that upstream states for other platforms or Pythons are left out.

    Raises:
        ConfigurationError: a file is there and cannot be understood.
    """
    by_name: dict[str, Companion] = {}
    for companion in (
        *_manifest(repository, commit),
        *_submodule(repository, commit),
        *overrides(repository, commit),
        *sources(repository, commit),
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


def has_folder(repository: GitRepository, commit: Commit, folder: str) -> bool:
    """Whether the tree has files in ``folder``."""
    return bool(repository.list_tree(commit, folder))


def _manifest(repository: GitRepository, commit: Commit) -> list[Companion]:
    text = repository.read_file(commit, MANIFEST)
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
        raise not_understood(repository, commit, MANIFEST, error) from error


def _submodule(repository: GitRepository, commit: Commit) -> list[Companion]:
    sha = repository.submodule_commit(commit, SUBMODULE)
    if sha is None:
        return []
    url = repository.submodule_url(commit, SUBMODULE)
    return [Companion(package="megatron-core", where=f"submodule {SUBMODULE}", git=url, ref=sha)]


def overrides(repository: GitRepository, commit: Commit) -> list[Companion]:
    """What ``[tool.uv] override-dependencies`` of the pyproject.toml at a commit forces, line by line.

    Raises:
        ConfigurationError: the file is there and cannot be understood.
    """
    settings = _uv_settings(repository, commit)
    try:
        lines = settings.get("override-dependencies", [])
        refuse_unreadable(lines, ())
        # uv takes an overridden package from its source too, whatever the override's range says: Megatron-Bridge
        # 561ae4e has `transformer-engine>=2.9.0a0,<2.10.0` there, rev = "release_v2.11", and 2.11.0 in its uv.lock.
        places = {source.package: source for source in _pinned_sources(settings) if not source.marker}
    except (TypeError, ValueError) as error:
        raise not_understood(repository, commit, PYPROJECT, error) from error
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


def sources(repository: GitRepository, commit: Commit) -> list[Companion]:
    """The commits and tags that ``[tool.uv.sources]`` of the pyproject.toml at a commit takes.

    A branch there is not a pin.

    Raises:
        ConfigurationError: the file is there and cannot be understood.
    """
    try:
        entries = _pinned_sources(_uv_settings(repository, commit))
    except ValueError as error:
        raise not_understood(repository, commit, PYPROJECT, error) from error
    return [
        Companion(package=name, where=SOURCES, git=entry.git, ref=entry.ref, marker=entry.marker)
        for entry in entries
        for name in packages_of(entry.package)
    ]


def _pinned_sources(settings: dict[str, Any]) -> list[UvSource]:
    return [source for source in read_sources(settings) if source.ref_kind in ("rev", "tag")]


def packages_of(name: str) -> tuple[str, ...]:
    """The packages that a repository of upstream's name holds."""
    canonical = canonicalize_name(name)
    return PACKAGES.get(canonical, (canonical,))


def _uv_settings(repository: GitRepository, commit: Commit) -> dict[str, Any]:
    try:
        return uv_settings(repository.read_file(commit, PYPROJECT))
    except ValueError as error:
        raise not_understood(repository, commit, PYPROJECT, error) from error


def not_understood(
    repository: GitRepository, commit: Commit, file: str, error: Exception, fix: str = ""
) -> ConfigurationError:
    """That a file of upstream's at a commit has another form than this reads."""
    return ConfigurationError(
        f"cannot understand {file} of {repository.url} at {commit.sha[:12]}",
        why=f"{type(error).__name__}: {error}",
        fix=fix
        or "Upstream changed the file's form. Take a commit from before: envbuild lock --as-of DATE --name NAME.",
    ).at_upstream()
