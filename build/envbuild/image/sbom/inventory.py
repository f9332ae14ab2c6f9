"""The packages of an image with their origin: from the lock, from what is installed, and from dpkg."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from packageurl import PackageURL

from envbuild.image.scan.models import LayerScan
from envbuild.image.scan.packages import DebianPackage, PythonPackage
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.models import LockedBase, LockedComponent
from envbuild.lock.record.content import Package, locked_content
from envbuild.wheels.cache.wheelhouse import Built


@dataclass(frozen=True, kw_only=True)
class ListedPackage:
    """A package of an image.

    Attributes:
        hashes: ``sha256:...`` of the file it was installed from; of several, any of them may be it.
        repository, commit: where it comes from, if from git.
        licence: an SPDX expression; ``licence_names``: other words for it.
        component: it is named by the stack.
        wheel: the file name of the wheelhouse's wheel it was installed from; ``sdist``: what that was built from.
    """

    kind: str
    name: str
    version: str
    purl: str
    hashes: tuple[str, ...] = ()
    repository: str = ""
    commit: str = ""
    licence: str = ""
    licence_names: tuple[str, ...] = ()
    component: bool = False
    wheel: str = ""
    sdist: str = ""


def inventory(
    lock: LockDirectory, scans: Iterable[LayerScan], venv: str, wheels: Mapping[str, Built]
) -> tuple[ListedPackage, ...]:
    """Every package of an image, the stack's components first.

    Args:
        scans: of the image's layers, lowest first.
        venv: the folder of the environment, as layers have it.
        wheels: wheels of the wheelhouse that were installed, by package.
    """
    python: dict[str, PythonPackage] = {}
    debian: tuple[DebianPackage, ...] = ()
    for scan in scans:
        # By folder: a package of an upper layer takes the place of the same one below.
        python.update({package.folder: package for package in scan.python})
        debian = scan.debian if scan.debian is not None else debian
    locked = locked_content(lock, PHASE_FILES)
    components = lock.lock.components
    listed = []
    for package in python.values():
        if _is_installed(package, venv):
            listed.append(_locked(package, locked.get(package.name, Package()), components.get(package.name), wheels))
        else:
            listed.append(_python(package))
    listed += [_debian(package, lock.lock.base) for package in debian]
    # A copy that another package brings along of what is installed by itself is no second package.
    # The last of a key stays: False sorts before True, so the entry with hashes or a commit.
    unique = {
        package.purl: package for package in sorted(listed, key=lambda package: bool(package.hashes or package.commit))
    }
    return tuple(
        sorted(unique.values(), key=lambda package: (not package.component, package.kind != "pypi", package.purl))
    )


def _is_installed(package: PythonPackage, venv: str) -> bool:
    """Whether it is in the environment by itself, and not within another package."""
    return package.folder.startswith(f"{venv}/") and package.folder.split("/")[-2] == "site-packages"


def _python(package: PythonPackage) -> ListedPackage:
    purl = PackageURL(type="pypi", name=package.name, version=package.version).to_string()
    names = (package.licence_text,) if package.licence_text else ()
    return ListedPackage(
        kind="pypi", name=package.name, version=package.version, purl=purl, licence=package.licence, licence_names=names
    )


def _locked(
    package: PythonPackage, locked: Package, component: LockedComponent | None, built: Mapping[str, Built]
) -> ListedPackage:
    plain = _python(package)
    wheel = built.get(package.name)
    # A wheel of the wheelhouse was built here: the lock has the hashes of what it was built from.
    hashes = (wheel.record.digest,) if wheel else tuple(sorted(locked.hashes))
    return replace(
        plain,
        purl=_git_purl(package, component) if component and component.git and component.commit else plain.purl,
        hashes=hashes,
        repository=component.git or "" if component else "",
        commit=component.commit or "" if component else "",
        component=component is not None and not component.transitive,
        wheel=wheel.record.file if wheel else "",
        sdist=component.sdist or "" if component and wheel else "",
    )


def _git_purl(package: PythonPackage, component: LockedComponent) -> str:
    """``pkg:github/OWNER/REPOSITORY@COMMIT`` where the purl specification has a type for the place."""
    address = urllib.parse.urlsplit(component.git or "")
    owner, _, repository = address.path.strip("/").removesuffix(".git").rpartition("/")
    kinds = {"github.com": "github", "bitbucket.org": "bitbucket"}
    if address.hostname in kinds and owner and "/" not in owner:
        return PackageURL(
            type=kinds[address.hostname],
            namespace=owner,
            name=repository,
            version=component.commit,
            subpath=component.subdirectory,
        ).to_string()
    origin = f"git+{component.git}@{component.commit}"
    return PackageURL(
        type="pypi", name=package.name, version=package.version, qualifiers={"vcs_url": origin}
    ).to_string()


def _debian(package: DebianPackage, base: LockedBase) -> ListedPackage:
    qualifiers = {"distro": f"{base.distribution}-{base.release}"}
    if package.architecture:
        qualifiers["arch"] = package.architecture
    purl = PackageURL(
        type="deb", namespace=base.distribution, name=package.name, version=package.version, qualifiers=qualifiers
    )
    return ListedPackage(
        kind="deb",
        name=package.name,
        version=package.version,
        purl=purl.to_string(),
        licence_names=package.licences,
    )
