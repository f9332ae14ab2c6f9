"""The API check of a lock: components that call others, held to the very versions that were locked.

Reads wheels, imports nothing. See :mod:`envbuild.lock.drift`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.catalog.models import Base
from envbuild.lock.checks import CheckFinding, base_tags, tags_of, wheel_name
from envbuild.lock.components import Chosen
from envbuild.lock.drift import SourceTree, find_drift
from envbuild.lock.metadata import fetch_file
from envbuild.lock.workplace import Workplace

CODE = "api-drift"


def check_api(
    chosen: Mapping[str, Chosen], packages: Mapping[str, Mapping[str, Any]], base: Base, work: Workplace
) -> Iterator[CheckFinding]:
    """What components ask of the components they use, and do not get.

    Components that come from git, or have no wheel, are not read: they are not checked.

    Args:
        packages: the ``[[package]]`` tables of uv.lock by name.
    """
    trees: dict[str, SourceTree | None] = {}

    def tree(name: str) -> SourceTree | None:
        if name not in trees:
            trees[name] = _tree(packages.get(canonicalize_name(name), {}), base, work)
        return trees[name]

    for name, item in chosen.items():
        for used in item.spec.uses:
            with work.reporter.step(f"check what {name} asks of {used}"):
                consumer, provider = tree(name), tree(used)
                if consumer is None or provider is None:
                    work.reporter.note(f"  not checked: {name} or {used} has no wheel to read")
                    continue
                findings = find_drift(consumer, provider)
            for finding in findings:
                if finding.is_error() and not _unused(finding.file, item.spec.unused):
                    yield CheckFinding(
                        code=CODE,
                        what=f"{finding.consumer}, {finding.file}:{finding.line}: {finding.detail}",
                        fix=f"Choose another version of {used} or {name}; if the stack is not for that part of {name}, "
                        "name its folder under unused.",
                    )


def _unused(file: str, folders: tuple[str, ...]) -> bool:
    return any(file.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _tree(package: Mapping[str, Any], base: Base, work: Workplace) -> SourceTree | None:
    tags = base_tags(base)
    for file in package.get("wheels", []):
        if tags_of(wheel_name(file)) & tags:
            title = f"{package['name']} {package['version']}"
            content, _ = fetch_file(file, title, work.folder, work.site, work.store)
            path = Path(work.folder) / wheel_name(file)
            path.write_bytes(content)
            return SourceTree.from_wheel(path)
    return None
