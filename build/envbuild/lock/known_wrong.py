"""What the locked versions are known to train wrongly: warned of by ``lock``, not vouched for by ``certify``."""

from __future__ import annotations

from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.conflict import Conflict, known_wrong
from envbuild.core.digests import Json
from envbuild.lock.lockfile import LockDirectory


def versions_of(lock: LockDirectory) -> dict[str, str]:
    """Every package of the finished environment and its version, by name: the base's, those locked, components."""
    components = {name: component.version for name, component in lock.lock.components.items()}
    brought: dict[str, str] = {canonicalize_name(name): version for name, version in lock.lock.base.provides.items()}
    return {**brought, **lock.packages(), **components}


def known_wrong_in(lock: LockDirectory, catalog: Catalog) -> dict[str, Conflict]:
    """The entries of envs/conflicts/ about cases that the locked versions train wrongly, by name."""
    return known_wrong(catalog.conflicts, versions_of(lock))


def packages_of(entry: Conflict, lock: LockDirectory) -> str:
    """The locked packages that an entry is about: ``megatron-core 0.16.1``."""
    versions = versions_of(lock)
    return ", ".join(f"{name} {versions[name]}" for name in entry.packages)


def warning_of(entry: Conflict, lock: LockDirectory) -> str:
    """One line for people: what trains wrongly, and what to do. ``envbuild list conflicts`` has the rest."""
    return f"{packages_of(entry, lock)} trains wrongly: {entry.setting()}. {entry.fix}"


def as_json(name: str, entry: Conflict) -> dict[str, Json]:
    """What ``lock --json`` prints of an entry."""
    return {
        "name": name,
        "what": entry.setting(),
        "why": entry.summary,
        "evidence": entry.evidence,
        "fix": entry.fix,
        "fixed_in": entry.fixed_in,
        "shown_by": entry.shown_by.model_dump() if entry.shown_by else None,
    }
