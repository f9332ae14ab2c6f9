"""Questions to uv about a lock: does a locked package accept this version of another one?

uv.lock states which packages need which, but not in which versions. So uv is asked again, about these declarations
alone; all else is left out. The answer comes from the metadata that uv just read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomlkit

from envbuild.core.errors import ResolutionError
from envbuild.lock.context import LockContext
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import requirement_of
from envbuild.lock.uv.explanation import NO_SOLUTION, names_in
from envbuild.lock.uv.resolution import Resolution, resolve, throw_away


@dataclass(frozen=True, kw_only=True)
class Need:
    """A locked package (its table in uv.lock) that needs another one, with the extras that do."""

    package: Mapping[str, Any]
    name: str
    extras: tuple[str, ...]

    @property
    def title(self) -> str:
        """Name and version, as findings print it."""
        return f"{self.package['name']} {self.package.get('version', '')}".strip()


def needs_of(packages: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Need]:
    """Who needs any of these packages."""
    return [
        Need(package=package, name=name, extras=extras)
        for package in packages
        for name in names
        if (extras := _extras_that_need(package, name)) is not None
    ]


def _extras_that_need(package: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """The extras through which a package needs ``name``; none when it does without; None: it does not need it."""
    if any(edge["name"] == name for edge in package.get("dependencies", [])):
        return ()
    extras = [
        str(extra)
        for extra, edges in package.get("optional-dependencies", {}).items()
        if any(edge["name"] == name for edge in edges)
    ]
    return tuple(extras) or None


def contradicted(
    plan: LockPlan,
    resolution: Resolution,
    needs: Sequence[Need],
    context: LockContext,
    what: str,
    instead: Mapping[str, str] | None = None,
) -> list[tuple[Need, str]]:
    """The needs that are not met by the versions of what is needed, each with uv's explanation.

    All of them are one question first, which mostly is the only one. Where it does not resolve, those that uv names are
    asked one by one, and then the rest at once: a question takes a second, and a lock has dozens of needs.

    Args:
        what: is asked, for messages.
        instead: requirements of what is needed, by name, in the place of the locked versions.
    """

    def explanation(asked: Sequence[Need]) -> str:
        return _contradiction(plan, _question(plan, resolution, asked, instead or {}), context, what)

    # Asked one by one from the start, Megatron-Bridge's lock took 80 s for three declarations among dozens.
    found: dict[int, str] = {}
    rest = [*range(len(needs))]
    while rest and (why := explanation([needs[number] for number in rest])):
        words = set(names_in(why))
        named = [number for number in rest if {needs[number].name, str(needs[number].package["name"])} <= words] or rest
        found |= {number: text for number in named if (text := explanation([needs[number]]))}
        rest = [number for number in rest if number not in named]
    return [(needs[number], found[number]) for number in sorted(found)]


def _contradiction(plan: LockPlan, question: str, context: LockContext, what: str) -> str:
    """Uv's explanation why a project does not resolve; empty: it does."""
    try:
        resolve(throw_away(question, context), plan.torch, what, context)
    except ResolutionError as error:
        if NO_SOLUTION not in error.why:  # other failures of the question are failures
            raise
        return error.why
    return ""


def _question(plan: LockPlan, resolution: Resolution, needs: Sequence[Need], instead: Mapping[str, str]) -> str:
    """The project that resolves if these packages accept the versions: no overrides, and nothing else."""
    chosen = {name: item for name, item in plan.project.every.items() if item.is_direct}
    document = tomlkit.parse(plan.project_text(resolution.pins)).unwrap()

    def line(name: str, version: str, extras: tuple[str, ...] = ()) -> str:
        item = chosen.get(name)
        return requirement_of(name, f"=={version}" if item is None else item.wanted, extras)

    wanted = {need.name: instead.get(need.name) or line(need.name, resolution.pins[need.name]) for need in needs}
    for need in needs:
        name = str(need.package["name"])
        extras = {extra for other in needs if other.package["name"] == name for extra in other.extras}
        wanted[name] = line(name, str(need.package.get("version", "")), tuple(sorted(extras)))
    settings = document["tool"]["uv"]
    # Without the project itself: excluded, it would need nothing at all.
    every = {str(package["name"]) for package in resolution.packages}
    left_out = every | set(plan.project.overrides) | set(settings.get("exclude-dependencies", ()))
    settings.pop("override-dependencies", None)
    # Exclusions hold for what the project asks for itself, too (astral-sh/uv#19699).
    settings["exclude-dependencies"] = sorted(left_out - set(wanted))
    # A pinned version would contradict the commit or address that is asked for.
    settings["constraint-dependencies"] = [
        text for text in settings.get("constraint-dependencies", ()) if text.partition("==")[0] not in chosen
    ]
    document["project"].pop("optional-dependencies", None)
    document["project"]["dependencies"] = list(wanted.values())
    return tomlkit.dumps(document)


def declared_range(why: str, name: str, version: str) -> str:
    """The declared range in uv's explanation, which names the bound that the version is beyond."""
    text = " ".join(why.split())
    ranges = re.findall(rf"depends? on {re.escape(name)}(?:\{{[^}}]*\}})?([<>=!~][^\s]*?)[.,]?(?: |$)", text)
    found = [text for text in ranges if text != f"=={version}"]
    # uv lists a range with holes piece by piece.
    return found[0] if found and "one of:" not in text else " in another range"
