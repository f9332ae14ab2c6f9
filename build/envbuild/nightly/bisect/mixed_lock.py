"""A lock between two others: the packages of the good one, with some as the bad one has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.core.digests import sha256_bytes
from envbuild.core.files import machine_errors, write_atomic
from envbuild.lock.lockfile import (
    BUILDS_FILE,
    PHASE_FILES,
    PROJECT_FILE,
    RECORD_FILE,
    LockDirectory,
    content_digest,
    read_lock,
    render,
    sealed,
)
from envbuild.lock.models import Lock, LockedComponent, LockedPhase
from envbuild.nightly.bisect.moved import PinnedPackage, pins_of

_TORCH = "torch"


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The packages that are as in the bad lock.

    Attributes:
        moved: by canonical name.
        commits: packages from git at a commit between the two locks' own, by canonical name.
    """

    moved: frozenset[str]
    commits: Mapping[str, str]


def write_mixed(folder: Path, good: LockDirectory, bad: LockDirectory, mix: Mix) -> LockDirectory:
    """Write the lock of a mix. Its digest says which versions it has, and nothing of the two locks.

    It is installed without being resolved, as every lock is: what is in it need not fit. It is on the bad lock's base.
    """
    pins = _mixed_pins(good, bad, mix)
    components = _mixed_components(good.lock, bad.lock, mix)
    # git-build.txt holds what builds packages from git; of two the newer one knows more of them.
    builds = bad.builds if mix.moved and bad.builds else good.builds or bad.builds
    with machine_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        phases = {}
        for phase, file in PHASE_FILES.items():
            texts = [pin.text for _, pin in sorted(pins.items()) if pin.phase == phase]
            content = "".join(texts).encode()
            phases[phase] = LockedPhase(file=file, packages=len(texts), digest=sha256_bytes(content))
            write_atomic(folder / file, content)
        if builds is not None and phases["git"].packages:
            content = builds.read_bytes()
            write_atomic(folder / BUILDS_FILE, content)
            phases["git"] = phases["git"].model_copy(update={"builds": sha256_bytes(content)})
        # A lock has a project file; nothing is resolved by this one.
        project = (bad.path / PROJECT_FILE).read_bytes()
        write_atomic(folder / PROJECT_FILE, project)
        torch = (bad if _TORCH in mix.moved else good).lock.torch
        environment = {**good.lock.environment, **(bad.lock.environment if mix.moved else {})}
        files = {**good.lock.files, **(bad.lock.files if mix.moved else {})}
        base_digest = bad.lock.base.definition_digest
        lock = bad.lock.model_copy(
            update={
                "digest": content_digest(base_digest, torch, components, phases, environment, files),
                "pyproject_digest": sha256_bytes(project),
                "torch": torch,
                "components": components,
                "phases": phases,
                "environment": environment,
                "files": files,
            }
        )
        write_atomic(folder / RECORD_FILE, render(sealed(lock)))
    return read_lock(folder)


def _mixed_pins(good: LockDirectory, bad: LockDirectory, mix: Mix) -> dict[str, PinnedPackage]:
    new = pins_of(bad)
    pins = {name: pin for name, pin in pins_of(good).items() if name not in mix.moved}
    pins |= {name: pin for name, pin in new.items() if name in mix.moved}
    for name, commit in mix.commits.items():
        pin = new[name]
        if (own := pin.package.commit) is not None:
            pins[name] = replace(pin, text=pin.text.replace(own, commit))
    return pins


def _mixed_components(good: Lock, bad: Lock, mix: Mix) -> dict[str, LockedComponent]:
    components = {
        name: component for name, component in good.components.items() if canonicalize_name(name) not in mix.moved
    }
    moved = {name: component for name, component in bad.components.items() if canonicalize_name(name) in mix.moved}
    for name, component in moved.items():
        commit = mix.commits.get(canonicalize_name(name))
        components[name] = component.model_copy(update={"commit": commit}) if commit else component
    return dict(sorted(components.items()))
