"""What a lock holds, package by package, and the same packages in uv.lock, pylock.toml and CycloneDX."""

from __future__ import annotations

import json
import urllib.parse
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from packaging.utils import canonicalize_name
from pydantic import BaseModel, Field

from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.core import tomlread
from envbuild.core.digests import Json
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.models import Lock
from envbuild.lock.requirement_lines import read_requirements
from envbuild.lock.uv_lock import UvLock


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package of a lock.

    Attributes:
        version: empty where only a commit is known.
        hashes: of its files, ``sha256:...``; none for what comes from git.
        commit: the commit of what comes from git.
        local: a wheel in a folder of this machine, which uv may leave without a hash.
    """

    version: str = ""
    hashes: frozenset[str] = frozenset()
    commit: str | None = None
    local: bool = False


Content = Mapping[str, Package]


def locked_content(lock: LockDirectory, phases: Collection[str]) -> dict[str, Package]:
    """The packages of some phases of a lock, by canonical name."""
    components = lock.lock.components.items()
    direct: dict[str, str] = {
        canonicalize_name(name): component.version
        for name, component in components
        if component.commit or component.url
    }
    by_name: dict[str, Package] = {}
    for phase in phases:
        if (file := lock.file(phase)) is not None:
            for requirement in read_requirements(file.read_text()):
                by_name[requirement.name] = Package(
                    version=requirement.version or direct.get(requirement.name, ""),
                    hashes=requirement.hashes,
                    commit=requirement.commit,
                )
    return by_name


def packages_by_index(lock: LockDirectory, phase: str) -> dict[str, set[str]]:
    """The packages of a phase by the index of their own that they are locked from; all others under an empty name."""
    by_name: dict[str, set[str]] = {"": set()}
    for name in locked_content(lock, (phase,)):
        component = lock.lock.components.get(name)
        by_name.setdefault((component and component.index) or "", set()).add(name)
    return by_name


def of_uv_lock(uv_lock: UvLock) -> dict[str, Package]:
    """The packages of a uv.lock, the project itself left out."""
    return {
        canonicalize_name(package.name): Package(
            version=package.version,
            hashes=frozenset(file.digest for file in package.files if file.digest),
            commit=package.source["git"].rpartition("#")[2] if "git" in package.source else None,
            local=any("://" not in file.url or file.path for file in package.files),
        )
        for package in uv_lock.locked
    }


class _PylockFile(BaseModel):
    hashes: Mapping[str, str]


class _PylockCommit(BaseModel):
    commit_id: str = Field(alias="commit-id")


class _PylockPackage(BaseModel):
    name: str
    version: str = ""
    wheels: tuple[_PylockFile, ...] = ()
    sdist: _PylockFile | None = None
    archive: _PylockFile | None = None
    vcs: _PylockCommit | None = None


class _Pylock(BaseModel):
    packages: tuple[_PylockPackage, ...] = ()


def of_pylock(text: str) -> dict[str, Package]:
    """The packages of a pylock.toml (PEP 751), which uv wrote."""
    by_name: dict[str, Package] = {}
    for package in _Pylock.model_validate(tomlread.loads(text)).packages:
        # An address is an archive there, whatever kind of file it is.
        files = filter(None, (*package.wheels, package.sdist, package.archive))
        by_name[canonicalize_name(package.name)] = Package(
            version=package.version,
            hashes=frozenset(f"sha256:{digest}" for file in files if (digest := file.hashes.get("sha256"))),
            commit=package.vcs.commit_id if package.vcs is not None else None,
        )
    return by_name


# The name space of the serial numbers of our documents, made once with uuid4.
_SERIAL_NUMBERS = uuid.UUID("5f0f2c3e-6a5c-4f6e-9a3b-6d0d6a1c7b52")


def normalized(text: str, lock: Lock, phases: Sequence[str], wanted: Content) -> str:
    """The document that uv wrote, made a function of the lock.

    The serial number and the time follow from the lock. A file is named by its name and hash: the address that uv
    writes is that of the index of whoever ran it. What comes from git keeps its repository and commit.
    """
    document = json.loads(text)
    document["serialNumber"] = serial_number(lock.digest, *phases)
    metadata = document["metadata"]
    metadata["timestamp"] = timestamp(lock.source_date_epoch)
    metadata["component"] |= {
        "type": "application",
        "name": lock.stack,
        "version": lock.digest,
        "properties": [
            {"name": "envbuild:base", "value": lock.base.name},
            {"name": "envbuild:lock", "value": lock.digest},
            {"name": "envbuild:phases", "value": ",".join(phases)},
        ],
    }
    for component in document["components"]:
        locked = wanted.get(canonicalize_name(component["name"]), Package())
        references = component.get("externalReferences", [])
        files = [reference for reference in references if reference["type"] == "distribution"]
        if locked.commit is None:
            if "purl" in component:  # uv gives none of a wheel in a folder
                component["purl"] = component["purl"].partition("?")[0]  # ?repository_url= is where the index is
            for file in files:
                file["url"] = urllib.parse.urlsplit(file["url"]).path.rsplit("/", 1)[-1]
        if not files and locked.hashes:  # uv gives no hash of a wheel in a folder
            name, version = component["name"], component["version"]
            component["externalReferences"] = [distribution(name, version, digest) for digest in sorted(locked.hashes)]
    return json.dumps(document, indent=2) + "\n"


class _Hash(BaseModel):
    alg: str
    content: str


class _Reference(BaseModel):
    hashes: tuple[_Hash, ...] = ()


class _Component(BaseModel):
    name: str
    version: str
    purl: str = ""
    references: tuple[_Reference, ...] = Field(default=(), alias="externalReferences")


class _CycloneDx(BaseModel):
    components: tuple[_Component, ...]


def of_cyclonedx(text: str) -> dict[str, Package]:
    """The packages of such a document."""
    by_name: dict[str, Package] = {}
    for component in _CycloneDx.model_validate_json(text).components:
        _, _, origin = urllib.parse.unquote(component.purl).partition("vcs_url=")
        hashes = (digest for reference in component.references for digest in reference.hashes)
        by_name[canonicalize_name(component.name)] = Package(
            version=component.version,
            hashes=frozenset(f"sha256:{digest.content}" for digest in hashes if digest.alg == "SHA-256"),
            commit=origin.rpartition("#")[2] or None,
        )
    return by_name


def distribution(name: str, version: str, digest: str) -> dict[str, Json]:
    """The reference to a file of a package: by its hash, since where it lies is the index's own affair."""
    return {
        "type": "distribution",
        "url": f"{name}-{version}",
        "hashes": [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}],
    }


def serial_number(*words: str) -> str:
    """The serial number that follows from what a document is about."""
    # A name-based UUID (RFC 9562, version 5): CycloneDX asks for a UUID, and the same lock should give the same file.
    return f"urn:uuid:{uuid.uuid5(_SERIAL_NUMBERS, ' '.join(words))}"


def timestamp(epoch: int) -> str:
    """The time of a document: that of what it is about."""
    return datetime.fromtimestamp(epoch, timezone.utc).strftime(MOMENT_FORMAT)
