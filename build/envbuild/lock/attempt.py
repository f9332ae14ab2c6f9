"""One attempt at a lock: the six steps, and its verification."""

from __future__ import annotations

from dataclasses import replace

from envbuild.core.errors import EnvbuildError, ResolutionError
from envbuild.lock.checks.api_drift import reading_ahead
from envbuild.lock.checks.check import check_lock, refuse_at_once
from envbuild.lock.components.decide import Decided, decide_components
from envbuild.lock.context import LockContext
from envbuild.lock.inputs.request import LockInputs, leaves_open, may_deviate
from envbuild.lock.lockfile import read_lock
from envbuild.lock.outcome import Failure, NewLock
from envbuild.lock.project.plan import LockPlan, make_plan
from envbuild.lock.record.record import write_lock
from envbuild.lock.resolve.builds import to_compile
from envbuild.lock.resolve.declarations import finding_files
from envbuild.lock.resolve.resolve import ResolvedPlan, pin_plan, resolve_plan
from envbuild.lock.uv.program import NoUploadTimesError
from envbuild.lock.uv_project.resolve import resolve_project
from envbuild.lock.verification import UNVERIFIED, LockVerifier, VerifiedLock, note_verified, verify_lock


def attempt(inputs: LockInputs, context: LockContext, verifier: LockVerifier | None) -> NewLock | Failure:
    """Make a lock in the context's folder, and verify it.

    Args:
        verifier: None: the lock is not verified.
    """
    decided: Decided | None = None
    plan: LockPlan | None = None
    resolved: ResolvedPlan | None = None
    try:
        if (definition := inputs.selection.stack.project) is not None:
            resolved = resolve_project(inputs, definition, context)
            return _finished(resolved, inputs, context, verifier)
        decided = decide_components(inputs, context)
        plan = make_plan(inputs, decided, context)
        with finding_files(plan, context) as files, reading_ahead(plan.project, files, context) as api_read:
            resolved = resolve_plan(plan, files, context)
            # Where nothing else is tried, a person reads all findings together.
            if may_deviate(inputs.selection, inputs.request) or not inputs.request.base_named:
                refuse_at_once(resolved, context)
            resolved = pin_plan(resolved, context)
            # check_lock compares the same pairs: it should find them in the store, and not begin them a second time.
            api_read.result()
        more = to_compile(resolved.plan, resolved.resolution, context.repositories) - inputs.compiled
        if more:
            error = ResolutionError(f"{', '.join(sorted(more))} must be compiled")
            return Failure(inputs=inputs, error=error, decided=decided, plan=plan, resolved=resolved, to_compile=more)
        return _finished(resolved, inputs, context, verifier)
    except NoUploadTimesError as failed:
        return _undated(inputs, failed, context)
    except EnvbuildError as failed:
        return Failure(inputs=inputs, error=failed, decided=decided, plan=plan, resolved=resolved)


def _finished(
    resolved: ResolvedPlan, inputs: LockInputs, context: LockContext, verifier: LockVerifier | None
) -> NewLock:
    """Check, write and verify what was resolved."""
    checked = check_lock(resolved, context)
    write_lock(resolved, checked, context)
    directory = read_lock(context.folder)
    verified = verify_lock(directory, inputs, verifier)
    unverified = VerifiedLock(where=UNVERIFIED) if leaves_open(inputs.selection.stack) else None
    note_verified(directory, verified or unverified)
    return NewLock(context.folder, verified)


def _undated(inputs: LockInputs, error: NoUploadTimesError, context: LockContext) -> Failure:
    """The failure with the packages of which the index states no upload times, where these need not be held.

    uv names those only that it looked at first: all packages are resolved once, held to nothing.
    """
    failure = Failure(inputs=inputs, error=error)
    # A date that the user names has to hold; and where releases are open, nothing else says which are meant.
    if inputs.request.as_of is not None or inputs.selection.stack.undecided():
        return failure
    named = inputs.undated | frozenset(error.packages)
    if inputs.undated:
        return replace(failure, undated=named)
    free = replace(inputs, previous=None, no_as_of=True)
    try:
        plan = make_plan(free, decide_components(free, context), context)
        with finding_files(plan, context) as files:
            resolution = resolve_plan(plan, files, context).resolution
    except EnvbuildError as other:
        return Failure(inputs=free, error=other)
    released = {name: package for name, package in resolution.packages.items() if "registry" in package.source}
    undated = named | {name for name, package in released.items() if not package.upload_seconds}
    return replace(failure, undated=undated, all_undated=undated >= released.keys())
