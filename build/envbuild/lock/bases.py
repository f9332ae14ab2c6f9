"""Which base a lock is on: the stack's default one, or the next where nothing works there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core.errors import EnvbuildError
from envbuild.lock.checks.findings import LockRefusedError
from envbuild.lock.inputs.request import LockInputs, LockRequest, is_curable, is_of_another_cuda, may_help
from envbuild.lock.lock import LockOptions, LockResult, lock_stack
from envbuild.lock.lockdir import lock_on_base


def lock_on_fitting_base(
    selection: Selection,
    request: LockRequest,
    options_for: Callable[[Selection], LockOptions],
    context: Context,
) -> LockResult:
    """Lock a stack on its base; where the user named none and nothing works there, on the next base of the stack.

    The base that an earlier run with the same inputs fell back to comes first.

    Args:
        request: ``base_named`` where the user named the base.
        options_for: the options for a stack and a base, with the lock directory.

    Raises:
        EnvbuildError: see :func:`lock_stack`; of the first base of the packages' CUDA.
    """
    bases = [selection, *([] if request.base_named else _other_bases(selection))]
    default = selection.base_name
    if (remembered := _fallback(bases, request, options_for)) and not options_for(remembered).upgrade:
        bases = [remembered, *(item for item in bases if item is not remembered)]
        context.reporter.note(f"note: the lock is on base {remembered.base_name}, since {default} had none")
    failures: list[tuple[Selection, EnvbuildError]] = []
    while bases:
        item, *bases = bases
        following = bases[0] if bases else None
        fallback_from = default if item.base_name != default else ""
        # The last one counts as named: there is no base to go on to, so other releases are tried there (Search.after).
        own = replace(request, base_named=following is None, fallback_from=fallback_from)
        done = _tried(item, own, options_for(item), context)
        if isinstance(done, LockResult):
            return done
        bases = [other for other in bases if may_help(other.base, item, request, done)]
        if following is not None and not bases:
            raise done
        failures.append((item, done))
        if bases := _next_bases(bases, item, done):
            context.reporter.note(_next_base(item, bases[0], done))
    # That a base has another CUDA says nothing about what blocks the others.
    telling = [one for one in failures if not is_of_another_cuda(one[1])] or failures[:1]
    raise telling[0][1]


def _fallback(
    bases: Sequence[Selection], request: LockRequest, options_for: Callable[[Selection], LockOptions]
) -> Selection | None:
    """The base that was taken with the same inputs in the place of the first one, which has no lock; the newest."""
    found = []
    for item in bases:
        lock = lock_on_base(options_for(item).path, item.base_name)
        if lock is not None and item is bases[0]:
            return None
        same = lock is not None and lock.inputs.digest == LockInputs.of(item, request).digest
        if lock is not None and same and lock.fallback_from == bases[0].base_name:
            found.append((lock.inputs.as_of, item))
    return max(found, key=lambda one: one[0])[1] if found else None


def _tried(
    selection: Selection, request: LockRequest, options: LockOptions, context: Context
) -> LockResult | EnvbuildError:
    """The lock, or the failure that another base may not have."""
    try:
        return lock_stack(selection, request, options, context)
    except EnvbuildError as error:
        if not is_curable(error):
            raise
        return error


def _next_bases(following: list[Selection], failed: Selection, error: EnvbuildError) -> list[Selection]:
    """What is left to try: after packages of another CUDA, bases with the same CUDA only where there are no others."""
    if isinstance(error, LockRefusedError) and error.settled:
        return []
    others = [item for item in following if item.base.cuda_major != failed.base.cuda_major]
    return others if others and is_of_another_cuda(error) else following


def _next_base(item: Selection, following: Selection, error: EnvbuildError) -> str:
    from envbuild.lock.search.search import summary  # slow to import

    why = "its packages are of another CUDA than" if is_of_another_cuda(error) else f"{summary(error)}: no lock on"
    has = " has" if is_of_another_cuda(error) else ""
    return (
        f"{why} base {item.base_name}{has}: taking {following.base_name}, which stack {following.stack_name} names too"
    )


def _other_bases(selection: Selection) -> list[Selection]:
    """The selection on the other bases that the stack names for the target."""
    builds = selection.stack.builds_for(selection.target_name)
    return [
        Selection(selection.catalog, selection.stack_name, name, selection.target_name)
        for name in (builds.bases if builds else ())
        if name != selection.base_name
    ]
