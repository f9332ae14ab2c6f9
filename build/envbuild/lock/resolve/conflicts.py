"""Which of the user's pins keep a stack from resolving: a smallest set, found by resolving without some of them."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from envbuild.catalog.stack import Phase
from envbuild.core.errors import (
    CheckRefusedError,
    ConfigurationError,
    MachineError,
    NetworkError,
    ResolutionError,
)
from envbuild.lock.components.models import CompileMetadata, DecidedBy
from envbuild.lock.context import LockContext
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import Project
from envbuild.lock.uv.explanation import NO_SOLUTION
from envbuild.lock.uv.program import TookTooLongError
from envbuild.lock.uv.resolution import resolve, throw_away

# Of all together: in 522 s uv had no answer for megatron-core<0.19.1 below Megatron-Bridge's main.
MOST_SECONDS = 60.0


def explain_pins(plan: LockPlan, error: ResolutionError, context: LockContext) -> ResolutionError:
    """The error with the smallest set of the user's pins that exclude each other, or the rest of the stack.

    uv's own explanation stays as it is. Nothing is added where there are no pins, and no failure on the way hides it.
    """
    pins = {name: chosen.asked for name, chosen in plan.project.chosen.items() if chosen.origin is DecidedBy.PIN}
    if not pins or NO_SOLUTION not in error.why:
        return error
    clashing: tuple[str, ...] = ()
    try:
        with context.reporter.step(f"find out which of {len(pins)} pins take part"):
            clashing = _smallest(plan, tuple(pins), context)
    except TookTooLongError:
        lines = [f"Which pins take part was not found out within {MOST_SECONDS:.0f} s."]
    except (CheckRefusedError, ConfigurationError, MachineError, NetworkError, ResolutionError) as other:
        lines = [f"Which pins take part could not be found out: {other.what}"]
    else:
        shown = ", ".join(f"{name}={pins[name]}" for name in clashing)
        idle = ", ".join(name for name in pins if name not in clashing)
        if not clashing:
            lines = [f"Tried: any release of {idle} that the stack allows. That does not resolve either."]
        elif len(clashing) == 1:
            lines = [f"Of the pins, {shown} takes part: without it the rest resolves."]
        else:
            lines = [f"Of the pins, {shown} exclude each other: without any one of them the rest resolves."]
        lines += [f"{idle}: not involved."] * bool(idle and clashing)
    explained = error.with_context(why="\n".join([error.why, *lines]))
    explained.explanation, explained.clashing_pins = error.why, clashing
    return explained


def _smallest(plan: LockPlan, pins: tuple[str, ...], context: LockContext) -> tuple[str, ...]:
    """Pins of which none can be left out; none at all where the stack does not resolve without any pin either."""
    deadline = time.monotonic() + MOST_SECONDS
    if not _resolves(plan, pins, deadline, context):
        return ()
    # One pin after the other is left out for good if the rest still fails.
    clashing = pins
    for name in pins if len(pins) > 1 else ():
        fewer = tuple(other for other in clashing if other != name)
        if not _resolves(plan, [other for other in pins if other not in fewer], deadline, context):
            clashing = fewer
    return clashing


def _resolves(plan: LockPlan, without: Collection[str], deadline: float, context: LockContext) -> bool:
    what = f"try without the pins of {', '.join(without)}"
    context.reporter.update(what)
    seconds_left = deadline - time.monotonic()
    if seconds_left <= 0:
        raise TookTooLongError(f"cannot {what}")
    project = replace(plan, project=_unpinned(plan, without)).project_text({})
    try:
        resolve(throw_away(project, context), plan.torch, what, replace(context, most_seconds=seconds_left))
    except TookTooLongError:
        raise
    except ResolutionError:
        return False
    return True


def _unpinned(plan: LockPlan, pins: Collection[str]) -> Project:
    """The project with what the stack's file says in the place of these pins."""
    project = plan.project
    free = {*pins}
    for name, component in project.chosen.items():
        # What belongs to the anchor belongs to what it was pinned to, and a companion's range to the release that
        # declares it.
        of_anchor = plan.effective.stack.anchor in pins and component.origin in (DecidedBy.UPSTREAM, DecidedBy.TABLE)
        if of_anchor or free.intersection(component.held_by):
            free.add(name)
    chosen = {
        name: replace(component, specifier=component.spec.version, commit=None, git="") if name in free else component
        for name, component in project.chosen.items()
    }
    # uv would have to build other releases of the compile phase to learn what they declare: taken to be nothing.
    unread = (name for name in free if project.chosen[name].phase is Phase.COMPILE)
    metadata = [declared for declared in project.metadata if declared.name not in free]
    metadata += [CompileMetadata(name=name, version="", requires_dist=()) for name in unread]
    return replace(project, chosen=chosen, metadata=tuple(metadata), git_sources=project.git_sources.without(free))
