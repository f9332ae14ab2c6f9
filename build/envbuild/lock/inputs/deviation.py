"""What a lock takes in the place of a pin that does not work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from envbuild.lock.models import Lock


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One thing of a lock that is not what upstream, the stack's file or the newest release say.

    Attributes:
        instead_of: what these say, for people: ``==2.7.*``, ``the newest release``.
        specifier: the releases that are taken instead; empty for any.
        until: nothing uploaded after this moment is taken of it (``2025-09-21T00:00:00Z``); empty: the lock's moment.
        added: nothing asks for it, and something needs it.
        declared_by: the package whose declared range of it is replaced, and no other's; empty: it is for all.
        reason: why, for people.
    """

    package: str
    instead_of: str
    specifier: str = ""
    until: str = ""
    added: bool = False
    declared_by: str = ""
    reason: str

    @property
    def taken(self) -> str:
        """What is taken, for people."""
        parts = [self.specifier, f"as of {self.until}" if self.until else ""]
        return ", ".join(filter(None, parts)) or "any release"

    def text(self, packages: str = "") -> str:
        """One line for people and the record; for several packages that are taken alike, with their names."""
        name = packages or self.package
        if self.added:
            return f"{name} is added: {self.reason}"
        return f"{name} {self.taken} instead of {self.instead_of}: {self.reason}"


def locked_deviations(lock: Lock) -> tuple[Deviation, ...]:
    """What a lock took."""
    return tuple(Deviation(**deviation.model_dump()) for deviation in lock.deviating)


def texts(deviations: Iterable[Deviation]) -> tuple[str, ...]:
    """A line for each, and one for packages that are taken alike: Transformer Engine, its cores and its torch part."""
    names: dict[Deviation, list[str]] = {}
    for deviation in deviations:
        names.setdefault(replace(deviation, package=""), []).append(deviation.package)
    return tuple(item.text(", ".join(packages)) for item, packages in names.items())


def replaced(deviations: Iterable[Deviation]) -> set[str]:
    """The packages of which other releases are taken than those that were asked for."""
    return {
        deviation.package
        for deviation in deviations
        if not (deviation.until or deviation.added or deviation.declared_by)
    }
