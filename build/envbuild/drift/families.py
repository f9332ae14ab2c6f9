"""Model families: what only one model's users run into.

A library of models has one module or package for each, below `models` or `model`. Its own packages import them all,
and its recipes offer them; that names none of them. A family that the library itself, or several other families, build
on is no longer one model's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from envbuild.drift.outline import Segment
from envbuild.drift.sources import parents

_HOLDERS = frozenset({"models", "model"})
# What offers a choice of models, and uses each of them for itself alone.
_OFFERS = frozenset({"recipes"})
# So many other families that build on a module make it common to all.
MANY = 2


def family_of(module: str) -> str | None:
    """The module or package of a module's model: ``lib.models.llama`` of ``lib.models.llama.spec``."""
    parts = module.split(".")
    holders = [place for place, part in enumerate(parts[:-1]) if part in _HOLDERS]
    return ".".join(parts[: holders[-1] + 2]) if holders else None


def is_of_one_family(module: str, tops: Collection[Segment], live: Collection[Segment], named: Iterable[str]) -> bool:
    """Whether only the users of one model can run into the functions of a module.

    Args:
        tops: the outlines of the modules in reach.
        live: every segment in reach.
        named: the modules that the stack names.
    """
    family = family_of(module)
    if family is None or any(family_of(name) == family for name in named):
        return False
    by_module = {top.module: top for top in tops}
    # A name that several modules define, such as forward_step, says nothing without its module.
    defined = Counter(name for top in tops for name in _names(top))
    others: set[str] = set()
    waiting, seen = [module], {module}
    while waiting:
        top = by_module[waiting.pop()]
        for user in _users(top, frozenset(name for name in _names(top) if defined[name] == 1), live):
            theirs = family_of(user)
            if theirs is None:
                return False
            if theirs != family:
                others.add(theirs)
            if len(others) >= MANY:
                return False
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return True


def _names(top: Segment) -> frozenset[str]:
    return frozenset(child.name for child in top.children)


def _users(top: Segment, unique: frozenset[str], live: Collection[Segment]) -> Iterator[str]:
    """The modules that use a module, without those that only offer it.

    Args:
        unique: names that no other module defines.
    """
    last = top.module.rpartition(".")[2]
    paths = {f"{package}.{name}" for package in parents(top.module) for name in _names(top)}
    for segment in live:
        if segment.module == top.module or (segment.is_package and not segment.qualname):
            continue
        if (
            not unique.isdisjoint(segment.words)
            or (last in segment.words and _mentions(segment, top.module))
            or not paths.isdisjoint(segment.mentioned)
        ) and _OFFERS.isdisjoint(segment.module.split(".")):
            yield segment.module


def _mentions(segment: Segment, module: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for name in segment.mentioned)
