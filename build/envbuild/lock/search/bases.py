"""Which base comes next where a stack has no lock on one."""

from __future__ import annotations

from collections.abc import Sequence

from envbuild.catalog.catalog import Selection
from envbuild.lock.inputs.request import LockInputs, LockRequest, has_python_for, is_of_another_cuda, may_help
from envbuild.lock.models import Lock
from envbuild.lock.outcome import Failure
from envbuild.lock.search.blame import summary


def other_bases(selection: Selection) -> list[Selection]:
    """The selection on the other bases that the stack names for the target."""
    builds = selection.stack.builds_for(selection.target_name)
    return [
        Selection(selection.catalog, selection.stack_name, name, selection.target_name)
        for name in (builds.bases if builds else ())
        if name != selection.base_name
    ]


def fallback(bases: Sequence[Selection], locks: Sequence[Lock | None], request: LockRequest) -> Selection | None:
    """The base that was taken with the same inputs in the place of the first one, which has no lock; the newest.

    Args:
        locks: the existing lock on each base.
    """
    if locks[0] is not None:
        return None
    taken = {
        lock.inputs.as_of: base
        for base, lock in zip(bases, locks, strict=True)
        if lock is not None
        and lock.inputs.digest == LockInputs.from_request(base, request).digest
        and lock.fallback_from == bases[0].base_name
    }
    return taken[max(taken)] if taken else None


def next_bases(left: Sequence[Selection], failure: Failure, request: LockRequest) -> list[Selection]:
    """Those of the bases that are left that may cure a failure, the next one first.

    After packages of another CUDA, bases with the same CUDA only where there are no others.
    """
    failed = failure.inputs.selection
    if failure.settled:
        return []
    helpful = [base for base in left if may_help(base.base, failed, request, failure.error)]
    others = [base for base in helpful if base.base.cuda_major != failed.base.cuda_major]
    return others if others and is_of_another_cuda(failure.error) else helpful


def blocking(failures: Sequence[Failure]) -> Failure:
    """The failure to report of several bases: the first one that is not about their CUDA or Python."""
    # That a base has another CUDA says nothing about what blocks the others; another Python, less than what does.
    telling = [failure for failure in failures if not is_of_another_cuda(failure.error)] or failures[:1]
    bases = [failure.inputs.selection.base for failure in failures]
    return min(telling, key=lambda failure: any(has_python_for(base, failure.error) for base in bases))


def why_next(failure: Failure, following: Selection) -> str:
    """Why the next base is taken, for people."""
    failed, error = failure.inputs.selection, failure.error
    other_cuda = is_of_another_cuda(error)
    why = "its packages are of another CUDA than" if other_cuda else f"{summary(error)}: no lock on"
    has = " has" if other_cuda else ""
    taking = f"taking {following.base_name}, which stack {following.stack_name} names too"
    return f"{why} base {failed.base_name}{has}: {taking}"
