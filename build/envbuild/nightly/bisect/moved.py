"""The difference between two locks, in groups of packages that move together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from envbuild.core.digests import short
from envbuild.lock.components.families import family_of
from envbuild.lock.diff import needed_by
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.models import LockedComponent
from envbuild.lock.record.content import Package, locked_content

# A requirement at the beginning of a line, with the indented lines below it (hashes, `# via`).
_BLOCK = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class PinnedPackage:
    """A package as a lock pins it.

    Attributes:
        text: its requirement with its hashes, without comments; ends with a line break.
    """

    phase: str
    text: str
    package: Package

    @property
    def version(self) -> str:
        """For people: the version, with the commit of what comes from git."""
        commit = self.package.commit
        return " at ".join(filter(None, (self.package.version, commit[:12] if commit else "")))


@dataclass(frozen=True, kw_only=True)
class MovedPackage:
    """A package that two locks pin differently; None where a lock has none of it."""

    name: str
    old: PinnedPackage | None
    new: PinnedPackage | None

    @property
    def text(self) -> str:
        """For people: ``numpy 2.4.6 -> 2.5.0``."""
        old, new = self.old, self.new
        if old is None or new is None:
            return f"{self.name} {new.version} (added)" if new else f"{self.name} {old.version if old else ''} (gone)"
        return f"{self.name} {old.version}" + (f" -> {new.version}" if old.version != new.version else " (other files)")


@dataclass(frozen=True, kw_only=True)
class MovedGroup:
    """Packages that move together: a family of one version, or one package and what it alone needs.

    Attributes:
        name: of the package that the others go with.
        packages: that package first.
    """

    name: str
    packages: tuple[MovedPackage, ...]

    @property
    def text(self) -> str:
        more = len(self.packages) - 1
        return self.packages[0].text + (f" and {more} that move with it" if more else "")


def pins_of(lock: LockDirectory) -> dict[str, PinnedPackage]:
    """Every package of a lock, by canonical name."""
    content = locked_content(lock, tuple(PHASE_FILES))
    pins: dict[str, PinnedPackage] = {}
    for phase in PHASE_FILES:
        if (file := lock.file(phase)) is None:
            continue
        for block in _BLOCK.split(file.read_text()):
            if (match := _NAME.match(block)) is None:
                continue
            name = canonicalize_name(match[0])
            lines = [line.rstrip() for line in block.splitlines() if line.strip() and not line.lstrip().startswith("#")]
            text = "\n".join(lines).rstrip("\\ ") + "\n"
            pins[name] = PinnedPackage(phase=phase, text=text, package=content.get(name, Package()))
    return pins


def component_of(lock: LockDirectory, name: str) -> LockedComponent | None:
    """The component of a canonical name, if it is one."""
    components = lock.lock.components.items()
    return next((component for key, component in components if canonicalize_name(key) == name), None)


def moved_packages(good: LockDirectory, bad: LockDirectory) -> dict[str, MovedPackage]:
    """The packages that two locks pin differently, by canonical name."""
    old, new = pins_of(good), pins_of(bad)
    return {
        name: MovedPackage(name=name, old=old.get(name), new=new.get(name))
        for name in sorted({*old, *new})
        if _content(old.get(name)) != _content(new.get(name))
    }


def _content(pin: PinnedPackage | None) -> tuple[str, str] | None:
    return (pin.phase, pin.text) if pin else None


def moved_groups(good: LockDirectory, bad: LockDirectory, suspects: Iterable[str] = ()) -> tuple[MovedGroup, ...]:
    """The moved packages in groups: the suspects first, then the components of the stack, then the others by name."""
    moved = moved_packages(good, bad)
    leaders = _leaders(moved, [needed_by(good), needed_by(bad)])
    groups: dict[str, list[str]] = {}
    for name, leader in leaders.items():
        groups.setdefault(leader, []).append(name)
    suspected = {canonicalize_name(name) for name in suspects}

    def rank(leader: str) -> tuple[int, str]:
        if suspected & {*groups[leader]}:
            return 0, leader
        return (2, leader) if component_of(bad, leader) is None and component_of(good, leader) is None else (1, leader)

    return tuple(
        MovedGroup(
            name=leader, packages=tuple(moved[name] for name in sorted(groups[leader], key=lambda n: (n != leader, n)))
        )
        for leader in sorted(groups, key=rank)
    )


def _leaders(moved: Mapping[str, MovedPackage], needed: Iterable[Mapping[str, tuple[str, ...]]]) -> dict[str, str]:
    """By package, the one that it moves with."""
    leaders = {name: min(family_of(name) & moved.keys()) for name in moved}
    needed_in = list(needed)
    changed = True
    while changed:
        changed = False
        for name in moved:
            by = {canonicalize_name(one) for table in needed_in for one in table.get(name, ())}
            # Of what several need, or one that stayed (which has no leader), the version is its own affair.
            above = {leaders.get(one, "") for one in by}
            if len(above) == 1 and (leader := above.pop()) and leader != leaders[name] and leaders[leader] == leader:
                for member in [one for one, of in leaders.items() if of == leaders[name]]:
                    leaders[member] = leader
                changed = True
    return leaders


def moved_summary(good: LockDirectory, bad: LockDirectory, groups: tuple[MovedGroup, ...]) -> str:
    """One line: how much moved."""
    packages = sum(len(group.packages) for group in groups)
    locks = f"lock {short(good.lock.digest)} -> {short(bad.lock.digest)}"
    return f"{locks}: {packages} packages moved, in {len(groups)} groups"
