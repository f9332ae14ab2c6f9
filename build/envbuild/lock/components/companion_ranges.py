"""Companions held to the ranges that the components which use them declare.

The user's pin wins; then the stack's file; then upstream's own pins, or a table of companions. Where none of them says
anything, it is what a component declares of those that it ``uses``. And where the user pinned another release of that
component, the stack's version of a companion, which was meant for the stack's release, gives way to the declared range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from packaging.specifiers import SpecifierSet

from envbuild.catalog.models import Base, Stack
from envbuild.lock.components.declarations import Declarations, Range
from envbuild.lock.components.models import Chosen, DecidedBy
from envbuild.lock.components.releases import EXACT


def hold_to_declared(stack: Stack, chosen: Mapping[str, Chosen], declarations: Declarations) -> dict[str, Chosen]:
    """The components, with the companions of which declared ranges decide held to these; says which.

    Of a range of releases, what the release declares that uv takes by itself; what is locked is checked later. A
    companion that is held or pinned declares in turn, for the extras that were asked of it:
    ``transformer-engine[pytorch]`` brings its transformer-engine-torch.
    """
    base = declarations.base
    holding = _Holding(stack, base, declarations, dict(chosen))
    declaring: dict[str, frozenset[str]] = {
        name: frozenset() for name, item in chosen.items() if item.spec.uses and name not in base.provides
    }
    while declaring:
        holding.done |= declaring.keys()
        declaring = holding.level(declaring)
    for name, item in holding.found.items():
        if item is not chosen[name]:
            declarations.context.reporter.note(f"{name} {item.asked}: {item.because}")
    return holding.found


@dataclass
class _Holding:
    """The components as far as they are held.

    Attributes:
        done: whose declarations were followed.
    """

    stack: Stack
    base: Base
    declarations: Declarations
    found: dict[str, Chosen]
    done: set[str] = field(default_factory=set)

    def level(self, declaring: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
        """Hold what these components declare; returns who declares next, and for which extras of it.

        Args:
            declaring: the components, with the extras of them that count for those that they do not use.
        """
        following: dict[str, frozenset[str]] = {}
        for name, item in list(self.found.items()):
            if not self._may_be_held(name, item):
                continue
            asking = [who for who in declaring if who != name and (name in self.found[who].spec.uses or declaring[who])]
            if item.origin is DecidedBy.STACK and item.spec.version and not any(map(self._is_moved, asking)):
                continue  # the stack's version of both
            ranges = {who: found for who in asking if (found := self._ranges(who, name, declaring[who]))}
            if not ranges:
                continue
            if item.origin is not DecidedBy.PIN:
                if (held := self._held(item, ranges)) is None:
                    continue
                self.found[name] = held
            if name not in self.done:
                following[name] = frozenset(extra for found in ranges.values() for extra in found[0].asks)
        return following

    def _may_be_held(self, name: str, item: Chosen) -> bool:
        """Whether neither upstream, nor a table, nor an override, nor the base decides it; a pin lets others follow."""
        if item.is_direct or name in self.base.provides or name in self.stack.overrides:
            return False
        return item.origin is DecidedBy.STACK or (item.origin is DecidedBy.PIN and name not in self.done)

    def _is_moved(self, name: str) -> bool:
        """Whether the user pinned another one than the stack's, or such a pin led to it."""
        item = self.found[name]
        own = item.spec.ref or item.spec.version.removeprefix("==")
        return item.origin is DecidedBy.DECLARED or (item.origin is DecidedBy.PIN and item.asked != own)

    def _ranges(self, who: str, name: str, extras: frozenset[str]) -> list[Range]:
        item = self.found[who]
        declared = self.declarations.of(item)
        if declared is None:
            return []
        if name in item.spec.uses:
            return declared.of(name, self.base, first=item.extras(self.base))
        return declared.of(name, self.base, only=extras)

    def _held(self, item: Chosen, ranges: Mapping[str, list[Range]]) -> Chosen | None:
        """A component within what others declare of it; None: nothing they declare is against what it is."""
        stated = item.spec.version
        limits = {who: [part for part in found if part.specifier] for who, found in ranges.items()}
        limits = {who: found for who, found in limits.items() if found}
        if not limits or (stated and not self._is_outside(item, limits)):
            return None
        declared = SpecifierSet()
        for found in limits.values():
            declared &= found[0].specifier
        because = f"declared by {' and '.join(found[0].where for found in limits.values())}"
        both = SpecifierSet(item.specifier) & declared
        if not stated:
            declared = both
        elif EXACT.match(stated) is None and self.declarations.version(item.name, str(both)):
            declared, because = both, f"{because}, within the stack's {stated}"
        else:
            because += f", in the place of the stack's {stated}"
        by = dict.fromkeys(name for who in limits for name in (who, *self.found[who].held_by))
        return replace(
            item,
            asked=str(declared),
            specifier=str(declared),
            origin=DecidedBy.DECLARED,
            because=because,
            held_by=tuple(by),
        )

    def _is_outside(self, item: Chosen, limits: Mapping[str, list[Range]]) -> bool:
        """Whether what the stack states is none of the versions that a component declares which the user moved."""
        exact = EXACT.match(item.spec.version)
        version = exact[1] if exact else self.declarations.version(item.name, item.spec.version)
        if version is None:
            return False  # the resolution will say so
        return any(
            self._is_moved(who) and not any(part.has(version) for part in found) for who, found in limits.items()
        )
