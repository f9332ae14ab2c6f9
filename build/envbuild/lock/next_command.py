"""The command that a refusal ends with: what envbuild would try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta

from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Selection, stacks_like
from envbuild.core.digests import short
from envbuild.core.errors import EnvbuildError, ResolutionError
from envbuild.lock.checks.findings import LockRefusedError
from envbuild.lock.inputs.as_of import NOW, RELEASE, parse_date, timestamp
from envbuild.lock.inputs.request import LockRequest, NoReleaseError, leaves_open, may_help, request_options
from envbuild.lock.lockdir import shipped_lock
from envbuild.lock.search.clashes import clashes
from envbuild.lock.uv.explanation import needed_pythons, not_there

# So far back the index and the branches are taken next.
STEP_BACK = timedelta(days=7)


@dataclass(frozen=True)
class GoodLock:
    """The last lock of a stack that a night made, and the moment that it is as of."""

    digest: str
    as_of: datetime

    @property
    def day(self) -> date:
        """The last day that was over by then: a lock as of a day is as of its end."""
        return self.as_of.date() - timedelta(days=1)


def with_next_command(
    error: EnvbuildError,
    selection: Selection,
    request: LockRequest,
    place: Sequence[str],
    now: datetime,
    more: Sequence[str] = (),
    good: GoodLock | None = None,
) -> EnvbuildError:
    """The refusal of a lock, with a command at its end.

    Args:
        place: the options that say where the lock is written.
        now: the current time.
        more: other options that were given and stay.
        good: the last good lock of the same name.
    """
    # Another day or release changes nothing of what a project's own uv.lock says.
    if selection.stack.project is not None and not isinstance(error, LockRefusedError):
        return error

    def line(words: str, following: LockRequest | None) -> str:
        if following is None:
            return words
        command = ["envbuild", "lock", "--stack", selection.stack_name, *_base_options(selection, request, following)]
        # Pins need a name for their lock; that of the anchor alone gives it one.
        named = list(following.pins) in ([], [selection.stack.anchor])
        where = list(place) or ([] if named else ["--name", "NAME"])
        return f"{words}: {shlex.join([*command, *request_options(following), *where, *more])}"

    lines = [error.fix, _override(error)]
    day = _day(selection, request, now)
    known = good is not None and day is not None and good.day < day and not isinstance(error, NoReleaseError)
    if good is not None and known:
        earlier = replace(request, as_of=good.day.isoformat())
        lines.append(line(f"The last good lock, {short(good.digest)}, is as of {timestamp(good.as_of)}", earlier))
    lines.append(line(*_next(error, selection, request, now, step_back=not known)))
    return error.with_context(fix="\n".join(filter(None, lines)))


def _override(error: EnvbuildError) -> str:
    """The table of the stack that cures declared ranges which exclude each other; empty where there are none."""
    for clash in clashes(error.why) if isinstance(error, ResolutionError) else ():
        package = clash.relaxed.package
        return (
            f"{clash.relaxed.by} declares {package}{clash.relaxed.range}, {clash.kept.by} {package}{clash.kept.range}. "
            f"If one of them is wrong, replace it in the stack's file: [overrides.{package}] with version, against = "
            f'["{clash.relaxed.by}"] and reason.'
        )
    return ""


def _base_options(selection: Selection, request: LockRequest, following: LockRequest) -> list[str]:
    """The options with which ``following`` is about the base that was refused, or about the bases of its target."""
    if following.base_named:
        return ["--base", selection.base_name]
    # Without a base the target chooses it, and without a target the stack's first one does.
    is_default = selection.target_name == selection.stack.builds[0].target
    return [] if is_default and not request.base_named else ["--target", selection.target_name]


def _next(
    error: EnvbuildError, selection: Selection, request: LockRequest, now: datetime, *, step_back: bool
) -> tuple[str, LockRequest | None]:
    """What the command is, in words, and what it asks for; None: the words have it."""
    blamed = _blamed_pins(error, selection, request)
    # Of findings other releases may have none, with the same pins.
    of_pins = isinstance(error, NoReleaseError) or _nearest(error) or (blamed and isinstance(error, ResolutionError))
    if request.exact and leaves_open(selection.stack) and not of_pins:
        return "Other releases are tried without --exact", replace(request, exact=False)
    if blamed:
        pins = {name: text for name, text in request.pins.items() if name not in blamed}
        words = f"Without --pin {', '.join(f'{name}={request.pins[name]}' for name in blamed)} other releases are tried"
        return words, replace(request, pins=pins)
    builds = selection.stack.builds_for(selection.target_name)
    others = [
        name
        for name in (builds.bases if builds is not None else ())
        if name != selection.base_name
        and not isinstance(error, NoReleaseError)
        and may_help(selection.catalog.base(name), selection, request, error)
    ]
    if request.base_named and others:
        words = f"The other bases of the stack ({', '.join(others)}) are tried without --base"
        return words, replace(request, base_named=False)
    if isinstance(error, LockRefusedError):
        allow = tuple(dict.fromkeys([*request.allow, *(finding.id for finding in error.findings)]))
        return "The whole command", replace(request, allow=allow)
    return _last(error, selection, request, now, step_back=step_back)


def _nearest(error: EnvbuildError) -> Mapping[str, str]:
    return error.nearest_pins if isinstance(error, ResolutionError) else {}


def _last(
    error: EnvbuildError, selection: Selection, request: LockRequest, now: datetime, *, step_back: bool
) -> tuple[str, LockRequest | None]:
    """What is left where no other choice is: the nearest release, an earlier day, or a lock that is there."""
    if nearest := _nearest(error):
        return "Next, with the nearest release", replace(request, pins={**request.pins, **nearest})
    day = _day(selection, request, now)
    # Another stack of the same anchor is nearer than what there was a week before now.
    if parse_date(request.as_of or "") is None and (command := _locked_stack(selection)):
        return f"A lock of {selection.stack.anchor} that comes with envbuild: {command}", None
    # What the index does not have now it did not have then, and a pinned release needed the same Python.
    same_then = isinstance(error, NoReleaseError) or not_there(error.why) or needed_pythons(error.why)
    if day is None or same_then or not step_back:
        return "", None
    return "Next, with what there was a week earlier", replace(request, as_of=(day - STEP_BACK).isoformat())


def _day(selection: Selection, request: LockRequest, now: datetime) -> date | None:
    """The day that the lock is as of; None where it follows from a release or a commit."""
    stack = selection.stack
    # The stack's date is for its own anchor: with another one it follows from that (as_of_moment).
    text = request.as_of or (stack.as_of if stack.anchor not in request.pins else RELEASE)
    return now.date() if text == NOW else parse_date(text)


def _locked_stack(selection: Selection) -> str:
    """How to take the newest stack with the same anchor of which a lock comes with envbuild; empty without one."""
    for name in stacks_like(selection.catalog, selection.stack_name):
        builds = selection.catalog.stack(name).builds_for(selection.target_name)
        base = next((base for base in builds.bases if shipped_lock(name, base)), None) if builds else None
        if base is not None:
            return shlex.join(["envbuild", "lock", "--stack", name, "--base", base])
    return ""


def _blamed_pins(error: EnvbuildError, selection: Selection, request: LockRequest) -> list[str]:
    """The pins that are left out next: of those that clash the last, else those of companions with findings."""
    anchor = selection.stack.anchor
    if isinstance(error, ResolutionError):
        return [name for name in request.pins if name != anchor and name in error.clashing_pins][-1:]
    # No other base cures these.
    findings = error.findings if isinstance(error, LockRefusedError) else ()
    packages = {package for finding in findings for package in finding.packages}
    return [name for name in request.pins if name != anchor and canonicalize_name(name) in packages]
