"""The API check of a lock: components that call others, held to the very versions that were locked.

Reads wheels, imports nothing. See :mod:`envbuild.lock.drift`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.catalog.models import Base
from envbuild.core.digests import canonical_json, digest_of, sha256_file
from envbuild.core.errors import EnvbuildError
from envbuild.core.progress import SilentReporter
from envbuild.lock import drift
from envbuild.lock.checks import CheckFinding, base_tags, tags_of, wheel_name
from envbuild.lock.components import Chosen
from envbuild.lock.drift import Finding, SourceTree, find_drift, read_finding
from envbuild.lock.metadata import fetch_file
from envbuild.lock.project import Project
from envbuild.lock.releases import likely
from envbuild.lock.workplace import Workplace
from envbuild.store.local import LocalStore

CODE = "api-drift"


# Findings are kept by what was read and by the code that read it.
KIND = "drift"
FILE = "findings.json"


def check_api(
    chosen: Mapping[str, Chosen], packages: Mapping[str, Mapping[str, Any]], base: Base, work: Workplace
) -> Iterator[CheckFinding]:
    """What components ask of the components they use, and do not get.

    Components that come from git, or have no wheel, are not read: they are not checked.

    Args:
        packages: the ``[[package]]`` tables of uv.lock by name.
    """
    wheels = _Wheels(packages, base, work)
    for name, item in chosen.items():
        for used in item.spec.uses:
            with work.reporter.step(f"check what {name} asks of {used}"):
                consumer, provider = wheels.file(name), wheels.file(used)
                if consumer is None or provider is None:
                    work.reporter.note(f"  not checked: {name} or {used} has no wheel to read")
                    continue
                findings = _findings(wheels, name, used, work.store)
            for finding in findings:
                if finding.is_error() and not _unused(finding.file, item.spec.unused):
                    yield CheckFinding(
                        code=CODE,
                        what=f"{finding.consumer}, {finding.file}:{finding.line}: {finding.detail}",
                        fix=f"Choose another version of {used} or {name}; if the stack is not for that part of {name}, "
                        "name its folder under unused.",
                    )


def read_ahead(project: Project, keep: Mapping[str, str], work: Workplace) -> None:
    """Compare the releases that the lock is going to take unless something else holds them back.

    For a thread beside the resolution, which waits for the index most of the time: :func:`check_api` then finds the
    answer in the store. Where this fails or guesses wrong, nothing is lost but its work.
    """
    work = replace(work, reporter=SilentReporter())
    pairs = [
        (name, used)
        for name, item in project.chosen.items()
        for used in item.spec.uses
        if used in project.chosen and item.commit is None and project.chosen[used].commit is None
    ]
    if not pairs:
        return
    with contextlib.suppress(EnvbuildError):
        names = list(dict.fromkeys(name for pair in pairs for name in pair))
        packages = likely(project, names, keep, "find what the API check reads", work)
        wheels = _Wheels(packages, project.base, work)
        for name, used in pairs:
            if wheels.file(name) is not None and wheels.file(used) is not None:
                _findings(wheels, name, used, work.store)


class _Wheels:
    """The wheels of a lock that the base can install; each is read once."""

    def __init__(self, packages: Mapping[str, Mapping[str, Any]], base: Base, work: Workplace) -> None:
        self._packages = packages
        self._tags = base_tags(base)
        self._work = work
        self._trees: dict[str, SourceTree] = {}

    def file(self, name: str) -> Mapping[str, Any] | None:
        """The entry of uv.lock for the wheel of a package; None when it has none for the base."""
        wheels: list[Mapping[str, Any]] = self._packages.get(canonicalize_name(name), {}).get("wheels", [])
        return next((file for file in wheels if tags_of(wheel_name(file)) & self._tags), None)

    def tree(self, name: str) -> SourceTree:
        """The sources in the wheel of a package that has one."""
        file, work = self.file(name), self._work
        if name not in self._trees and file is not None:
            package = self._packages[canonicalize_name(name)]
            title = f"{package['name']} {package['version']}"
            content, _ = fetch_file(file, title, work.folder, work.site, work.store)
            path = Path(work.folder) / wheel_name(file)
            path.write_bytes(content)
            self._trees[name] = SourceTree.from_wheel(path)
        return self._trees[name]


def _findings(wheels: _Wheels, name: str, used: str, store: LocalStore) -> list[Finding]:
    """What drift there is between two packages, read once for each pair of wheels."""
    hashes = [str((wheels.file(package) or {}).get("hash", "")) for package in (name, used)]
    if not all(hashes):
        return find_drift(wheels.tree(name), wheels.tree(used))

    def compare(entry: Path) -> None:
        findings = find_drift(wheels.tree(name), wheels.tree(used))
        (entry / FILE).write_bytes(canonical_json([asdict(finding) for finding in findings]))

    entry = store.get_or_build(KIND, digest_of({"wheels": (*hashes,), "code": _code_digest()}), compare).path
    return [read_finding(item) for item in json.loads((entry / FILE).read_bytes())]


@cache
def _code_digest() -> str:
    """The digest of the check itself: another way of reading finds other things."""
    folder = Path(drift.__file__).parent
    return digest_of({file.name: sha256_file(file) for file in sorted(folder.glob("*.py"))})


def _unused(file: str, folders: tuple[str, ...]) -> bool:
    return any(file.startswith(f"{folder.rstrip('/')}/") for folder in folders)
