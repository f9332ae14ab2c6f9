"""Makes a lock: the six steps, over one context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core.errors import CheckRefusedError, ResolutionError
from envbuild.lock.checks.api_drift import reading_ahead
from envbuild.lock.checks.check import check_lock, refuse_at_once
from envbuild.lock.components.decide import Decided, decide_components
from envbuild.lock.context import LockContext, Repositories, work_folder
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.request import LockInputs, leaves_open, may_deviate
from envbuild.lock.lockdir import shipped_lock
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.lock.project.plan import LockPlan, make_plan
from envbuild.lock.record.record import write_lock
from envbuild.lock.resolve.builds import to_compile
from envbuild.lock.resolve.declarations import finding_files
from envbuild.lock.resolve.resolve import ResolvedPlan, pin_plan, resolve_plan
from envbuild.lock.uv.program import NoUploadTimesError


@dataclass
class LockProgress:
    """How far a lock came that was not made: what its steps found until one of them failed."""

    inputs: LockInputs
    decided: Decided | None = None
    plan: LockPlan | None = None
    resolved: ResolvedPlan | None = None


@contextlib.contextmanager
def new_lock(
    inputs: LockInputs,
    existing: LockDirectory | None,
    repositories: Repositories,
    context: Context,
    steps: LockProgress | None = None,
) -> Iterator[Path]:
    """A lock made anew, in a folder that goes at the end.

    Args:
        steps: filled as the steps go, for whoever looks at a failure.
        existing: one from the same inputs as of the same moment keeps its versions: an index does not say when it
            yanked one, so a new resolution could come out differently. So does one of the same pins.
    """
    selection, reporter = inputs.selection, context.reporter
    keeps = existing is not None and (
        inputs.pins_stay
        or (existing.lock.inputs.digest == inputs.digest and existing.lock.inputs.as_of_asked != as_of.NOW)
    )
    inputs = replace(inputs, previous=existing if keeps else None, like=existing or _shipped(selection))
    label = f"lock-{selection.stack_name}-{selection.base_name}"
    with work_folder(context, "lock", label) as folder_context:
        work = LockContext(**vars(folder_context), repositories=repositories)
        steps = steps or LockProgress(inputs)
        try:
            _make(inputs, work, steps)
        # A version that was kept can be gone from the index (test_a_dated_lock_whose_release_is_gone_is_resolved_anew).
        except NoUploadTimesError as error:
            # A date that the user names has to hold; and where releases are open, nothing else says which are meant.
            if inputs.request.as_of is not None or leaves_open(selection.stack):
                raise
            reporter.note(f"warning: {error.what}: packages are held to no moment, and another day may lock others")
            _make(replace(inputs, previous=None, no_as_of=True), work, steps)
        except ResolutionError:
            if inputs.previous is None:
                raise
            reporter.note("the versions of the existing lock do not resolve any more: resolving without them")
            _make(replace(inputs, previous=None), work, steps)
        yield work.folder


def _make(inputs: LockInputs, context: LockContext, steps: LockProgress) -> None:
    """The steps of a lock: its files are written into the context's folder."""
    resolved = _resolved(inputs, context, steps)
    # Only a resolution shows what is asked for, and of which releases there are no wheels.
    while more := to_compile(resolved.plan, resolved.resolution, context.repositories) - inputs.compiled:
        # What was found is preferred, so that only these packages change.
        stays = {**inputs.stays, **resolved.resolution.pins}
        inputs = replace(inputs, compiled=inputs.compiled | more, stays=stays)
        context.reporter.note(f"note: {', '.join(sorted(more))} must be compiled: resolving with phase compile for it")
        resolved = _resolved(inputs, context, steps)
    checked = check_lock(resolved, context)
    write_lock(resolved, checked, context)


def _resolved(inputs: LockInputs, context: LockContext, steps: LockProgress) -> ResolvedPlan:
    decided = steps.decided = decide_components(inputs, context)
    plan = steps.plan = make_plan(inputs, decided, context)
    with finding_files(plan, context) as files, reading_ahead(plan.project, files, context) as api_read:
        first = steps.resolved = resolve_plan(plan, files, context)
        # Where nothing else is tried, a person reads all findings together.
        if may_deviate(inputs.selection, inputs.request) or not inputs.request.base_named:
            refuse_at_once(first, context)
        resolved = steps.resolved = pin_plan(first, context)
        # check_lock compares the same pairs: it should find them in the store, and not begin them a second time.
        api_read.result()
    return resolved


def _shipped(selection: Selection) -> LockDirectory | None:
    """The stack's lock that comes with envbuild, as far as it can be read."""
    path = shipped_lock(selection.stack_name, selection.base_name)
    with contextlib.suppress(CheckRefusedError):
        return read_lock(path) if path is not None else None
    return None
