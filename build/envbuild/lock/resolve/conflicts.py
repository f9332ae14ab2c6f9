"""Which of the user's pins keep a stack from resolving, and the nearest versions that resolve.

Every answer is a real resolution, so none is guessed. Their number and their time are bounded, and what fails among
them never hides the error that was to be explained.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from packaging.version import Version

from envbuild.catalog.stack import Phase
from envbuild.core.errors import (
    CheckRefusedError,
    ConfigurationError,
    MachineError,
    NetworkError,
    ResolutionError,
)
from envbuild.lock.components.models import Chosen, CompileMetadata, DecidedBy
from envbuild.lock.components.releases import EXACT
from envbuild.lock.components.sdist_metadata import compile_metadata
from envbuild.lock.context import LockContext
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import Project
from envbuild.lock.resolve.declarations import releases_as_of
from envbuild.lock.uv.explanation import NO_SOLUTION
from envbuild.lock.uv.program import TookTooLongError
from envbuild.lock.uv.resolution import resolve, throw_away
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX_BUILD

MOST_ATTEMPTS = 20
# Of all together: in 522 s uv had no answer for megatron-core<0.19.1 below Megatron-Bridge's main.
MOST_SECONDS = 60.0
# Of how many versions of a compile-phase package the metadata is read: older ones are not looked at.
VERSIONS_READ = 10


class _OutOfBoundsError(Exception):
    """The attempts, or the time for them, are used up."""


def explain_pins(plan: LockPlan, error: ResolutionError, context: LockContext) -> ResolutionError:
    """The error with which of the user's pins take part, and what resolves instead.

    uv's own explanation stays as it is. Nothing is added where there are no pins.
    """
    pins = {name: item for name, item in plan.project.chosen.items() if item.origin is DecidedBy.PIN}
    if not pins or NO_SOLUTION not in error.why:
        return error
    trials = _Trials(plan, context)
    lines: list[str] = []
    resolving: dict[str, str] = {}
    try:
        with context.reporter.step(f"find out which of {len(pins)} pins take part"):
            resolving = _explain(trials, pins, lines)
    except _OutOfBoundsError:
        lines.append(f"More was not tried: {MOST_ATTEMPTS} attempts or {MOST_SECONDS:.0f} s are used up.")
    except (CheckRefusedError, ConfigurationError, MachineError, NetworkError, ResolutionError) as other:
        lines.append(f"More could not be found out: {other.what}")
    explained = error.with_context(why="\n".join([error.why, *lines]))
    explained.explanation, explained.resolving_pins = error.why, resolving
    return explained


def _explain(trials: _Trials, pins: Mapping[str, Chosen], lines: list[str]) -> dict[str, str]:
    """Report what resolves instead; returns pins that do, if any."""
    if trials.attempt(relaxed=dict.fromkeys(pins)) is None:
        # Not without the pins at all: what else the anchor's commit brought stays.
        lines.append(f"Tried: any release of {', '.join(pins)} that the stack allows. That does not resolve either.")
        return {}
    taking_part = _minimal(trials, list(pins))
    idle = [name for name in pins if name not in taking_part]
    shown = ", ".join(f"{name}={pins[name].asked}" for name in taking_part)
    if len(taking_part) == 1:
        lines.append(f"Of the pins, {shown} takes part: without it the rest resolves.")
    else:
        lines.append(f"Of the pins, {shown} exclude each other: without any one of them the rest resolves.")
    if idle:
        lines.append(f"{', '.join(idle)}: not involved.")
    found = [(name, version) for name in taking_part if (version := _nearest(trials, pins, name)) is not None]
    for name, version in found:
        others = [f"{other} {pins[other].asked}" for other in taking_part if other != name]
        others = others or [f"{other} {pins[other].asked}" for other in idle] or ["what the stack says"]
        lines.append(f"{name} {version} resolves with {', '.join(others)}.")
    if found:
        # Each of them resolved with all other pins as they are: one is enough.
        return dict(found[:1])
    # No single one is enough: what the resolver finds when each may be older.
    older = {name: f"<={version}" for name, item in pins.items() if (version := _exact(item)) is not None}
    versions = trials.attempt(relaxed=older) if len(older) > 1 else None
    if versions is None:
        return {}
    pair = {name: versions[name] for name in older if name in versions}
    lines.append(f"{', '.join(f'{name} {version}' for name, version in pair.items())} resolve together.")
    return pair


def _minimal(trials: _Trials, pins: Sequence[str]) -> list[str]:
    """Pins that exclude each other (or the rest) and of which none can be left out."""
    # One pin after the other is left out for good if the rest still fails: one resolution a pin, and of what stays none
    # can go.
    kept = list(pins)
    for name in pins if len(pins) > 1 else ():
        without = [other for other in pins if other == name or other not in kept]
        if trials.attempt(relaxed=dict.fromkeys(without)) is None:
            kept.remove(name)
    return kept


def _nearest(trials: _Trials, pins: Mapping[str, Chosen], name: str) -> str | None:
    """The version nearest to a pin that resolves with all the other pins; None: no version does.

    Of the newest below it and what the stack's file gives; the newest above it only where neither resolves.
    """
    version = _exact(pins[name])
    # Only an exact version can name a build of torch (torch_specifier): no range of it is tried.
    fixed = name == "torch" and trials.plan.project.torch_build != PACKAGE_INDEX_BUILD
    if version is None or fixed:
        return _version_of(name, trials.attempt(relaxed={name: None}))
    found = [_version_of(name, trials.attempt(relaxed={name: text})) for text in (f"<{version}", None)]
    if not any(found):
        found = [_version_of(name, trials.attempt(relaxed={name: f">{version}"}))]
    return closest(version, [item for item in found if item is not None])


def _version_of(name: str, versions: Mapping[str, str] | None) -> str | None:
    return (versions or {}).get(name)


def closest(wanted: str, versions: Sequence[str]) -> str | None:
    """The version that shares the most leading numbers with ``wanted``; of equals the first."""

    def shared(version: str) -> int:
        pairs = zip(Version(wanted).release, Version(version).release, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(versions, key=shared, default=None)


def _exact(item: Chosen) -> str | None:
    match = EXACT.match(item.specifier)
    return match[1] if match and item.commit is None else None


@dataclass
class _Trials:
    """Resolutions with some pins relaxed."""

    plan: LockPlan
    context: LockContext
    attempts: int = 0
    started: float = field(default_factory=time.monotonic)
    _read: dict[tuple[str, str], tuple[CompileMetadata, ...]] = field(default_factory=dict)

    def attempt(self, relaxed: Mapping[str, str | None]) -> Mapping[str, str] | None:
        """The versions that uv finds; None when it finds none.

        Args:
            relaxed: specifiers to take instead of pins; None: what the stack's file says.
        """
        if self.attempts >= MOST_ATTEMPTS or time.monotonic() - self.started > MOST_SECONDS:
            raise _OutOfBoundsError
        self.attempts += 1
        words = ", ".join(f"{name} {text or 'without its pin'}" for name, text in relaxed.items())
        left = MOST_SECONDS - (time.monotonic() - self.started)
        self.context.reporter.update(f"attempt {self.attempts}: {words}")
        relaxed_plan = replace(self.plan, project=self._relax(relaxed))
        folder = throw_away(relaxed_plan.project_text({}), self.context)
        try:
            return resolve(folder, self.plan.torch, f"try {words}", replace(self.context, most_seconds=left)).pins
        except TookTooLongError:
            raise _OutOfBoundsError from None
        except ResolutionError:
            return None

    def _relax(self, relaxed: Mapping[str, str | None]) -> Project:
        project = self.plan.project
        chosen = dict(project.chosen)
        if project_anchor := self.plan.effective.stack.anchor:
            # What belongs to the anchor is what the anchor was pinned to.
            free = [name for name, item in chosen.items() if item.origin in (DecidedBy.UPSTREAM, DecidedBy.TABLE)]
            relaxed = {**(dict.fromkeys(free) if project_anchor in relaxed else {}), **relaxed}
        # Nor is a companion held to what another release declares than the one that was pinned.
        held = [name for name, item in chosen.items() if relaxed.keys() & set(item.held_by)]
        relaxed = {**dict.fromkeys(held), **relaxed}
        metadata = [item for item in project.metadata if item.name not in relaxed]
        for name, text in relaxed.items():
            item = chosen[name]
            specifier = item.spec.version if text is None else text
            if item.phase is Phase.COMPILE:
                read = self._metadata(name, specifier)
                metadata += read
                if read:
                    # uv would have to build what is older, to learn what it declares.
                    specifier = ",".join(filter(None, (specifier, f">={read[-1].version}")))
            chosen[name] = replace(item, specifier=specifier, commit=None, git="")
        sources = project.git_sources.without(relaxed)
        return replace(project, chosen=chosen, metadata=tuple(metadata), git_sources=sources)

    def _metadata(self, name: str, specifier: str) -> tuple[CompileMetadata, ...]:
        """What the newest versions of a compile-phase package declare, newest first; nothing for wheels."""
        key = (name, specifier)
        if key not in self._read:
            self._read[key] = tuple(self._newest(name, specifier))
        return self._read[key]

    def _newest(self, name: str, specifier: str) -> list[CompileMetadata]:
        found: list[CompileMetadata] = []
        text = specifier
        while len(found) < VERSIONS_READ and time.monotonic() - self.started < MOST_SECONDS:
            try:
                locked = releases_as_of(self.plan, {name: text}, f"find {name} {text}", self.context)
            except ResolutionError:
                break  # there is no older one
            read = compile_metadata([name], locked, self.plan.project.base.cuda_major, self.context)
            if not read:
                break
            found += read
            text = ",".join(filter(None, (specifier, f"<{read[0].version}")))
        return found
