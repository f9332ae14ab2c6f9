"""``envbuild lock``: attempts on a stack's bases until one gives a lock, which is then published.

An attempt (:mod:`envbuild.lock.attempt`) ends with a lock or a failure. What is tried after a failure on the same base
is chosen in :mod:`envbuild.lock.search.search`, the next base in :mod:`envbuild.lock.search.bases`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core.errors import MachineError
from envbuild.core.files import refuse_unwritable
from envbuild.core.progress import Reporter
from envbuild.lock.checks.findings import LockRefusedError
from envbuild.lock.context import RunContext, run_context, work_folder
from envbuild.lock.existing import existing_lock, is_up_to_date, moved_inputs, only_writer
from envbuild.lock.inputs.request import LockInputs, LockRequest, is_curable
from envbuild.lock.lockdir import lock_on_base, publish, refuse_to_replace, refuse_what_is_no_lock, tidy
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.lock.outcome import Failure, NewLock
from envbuild.lock.search.bases import blocking, fallback, next_bases, other_bases, why_next
from envbuild.lock.verification import LockVerifier, VerifiedLock, note_verified, verify_lock


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """Where a lock is written, and when it is made anew.

    Attributes:
        path: the lock directory.
        by_base: ``path`` has such a directory for each base.
        upgrade: resolve anew, as of now, even if nothing changed.
        named: the user named the path; otherwise no lock is replaced by one that is made in another way than the
            stack's file and the base say.
    """

    path: Path
    by_base: bool = False
    upgrade: bool = False
    named: bool = True

    def path_on(self, base: str) -> Path:
        """The lock directory on a base."""
        return self.path / base if self.by_base else self.path


@dataclass(frozen=True)
class LockResult:
    """A lock directory, and whether this call made it.

    Attributes:
        verified: what its verification showed; None: it was not verified now.
    """

    directory: LockDirectory
    built: bool
    verified: VerifiedLock | None = None


def lock_stack(
    selection: Selection,
    request: LockRequest,
    options: LockOptions,
    context: Context,
    verifier: LockVerifier | None = None,
) -> LockResult:
    """Lock a stack on its base, unless its lock exists already and nothing that decides it changed.

    Where the user named no base and nothing works there, on the next base of the stack; the base that an earlier run
    with the same inputs fell back to comes first.

    Args:
        request: ``base_named`` where the user named the base.
        verifier: tries a lock before it is published, and also an existing one.

    Raises:
        UsageError: the existing lock was made in another way, and its path was not named.
        CheckRefusedError: nothing that was tried passes the checks; the existing lock stays.
        ResolutionError: the stack does not resolve.
        NetworkError: an index, a repository, or the place of torch's build cannot be reached.
    """
    run = LockRun(run_context(context), verifier)
    bases = _bases(selection, request, options, context.reporter)
    failures: list[Failure] = []
    while bases:
        current, *left = bases
        # The last one counts as named: there is no base to go on to, so other releases are tried there (Search.after).
        fallback_from = selection.base_name if current.base_name != selection.base_name else ""
        own = replace(request, base_named=not left, fallback_from=fallback_from)
        outcome = run.lock_on_base(LockInputs.from_request(current, own), options)
        if isinstance(outcome, LockResult):
            return outcome
        if not is_curable(outcome.error):
            raise outcome.error
        failures.append(outcome)
        bases = next_bases(left, outcome, request)
        if bases:
            context.reporter.note(why_next(outcome, bases[0]))
        elif left and not outcome.settled:
            # The other bases cannot have what it lacks.
            raise outcome.error
    raise blocking(failures).error


def _bases(selection: Selection, request: LockRequest, options: LockOptions, reporter: Reporter) -> list[Selection]:
    """The bases to try, in their order."""
    if request.base_named:
        return [selection]
    bases = [selection, *other_bases(selection)]
    locks = [lock_on_base(options.path_on(base.base_name), base.base_name) for base in bases]
    first = fallback(bases, locks, request)
    if first is None or options.upgrade:
        return bases
    reporter.note(f"note: the lock is on base {first.base_name}, since {selection.base_name} had none")
    return [first, *(base for base in bases if base is not first)]


@dataclass(frozen=True)
class LockRun:
    """Makes locks, all of them as of one moment.

    Attributes:
        verifier: tries locks; None: they are not verified.
    """

    context: RunContext
    verifier: LockVerifier | None

    def lock_on_base(self, inputs: LockInputs, options: LockOptions) -> LockResult | Failure:
        """Lock a stack on one base, unless its lock exists already and nothing that decides it changed."""
        path, context = options.path_on(inputs.selection.base_name), self.context
        refuse_what_is_no_lock(path)
        # Every command takes lockfiles/STACK/BASE when no name is given: options alone must not change what that is.
        if not options.named:
            refuse_to_replace(path, inputs.selection, inputs.request)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(only_writer(path, context))
            except MachineError:
                # No permission to write in the store. An up-to-date lock needs none: what was read whole is whole,
                # whoever writes another one at this moment.
                known = None if options.upgrade or self.verifier else existing_lock(path, upgrade=False)
                if known is None or not is_up_to_date(known, inputs, context):
                    raise
                return LockResult(known, built=False)
            # With the file lock held: the process that left something next to the lock has ended.
            tidy(path)
            existing = existing_lock(path, upgrade=options.upgrade)
            reused = None if options.upgrade else existing
            if reused is not None and is_up_to_date(reused, inputs, context):
                try:
                    verified = verify_lock(reused, inputs, self.verifier)
                except LockRefusedError as error:
                    return Failure(inputs=inputs, error=error)
                note_verified(reused, verified)
                return LockResult(read_lock(path), built=False, verified=verified)
            refuse_unwritable(path)
            with self.new_lock(moved_inputs(inputs, reused, context), existing) as outcome:
                if isinstance(outcome, Failure):
                    return outcome
                publish(outcome.folder, path)
                return LockResult(read_lock(path), built=True, verified=outcome.verified)

    @contextlib.contextmanager
    def new_lock(self, inputs: LockInputs, existing: LockDirectory | None) -> Iterator[NewLock | Failure]:
        """A lock that passes every check and the verification, in a folder that goes at the end; else the failure.

        Args:
            existing: one in whose place it is made.
        """
        # A lock that is up to date takes 0.50 s of processor time on a busy machine, and 0.93 s with these imports.
        from envbuild.lock.attempt import attempt
        from envbuild.lock.search.search import Search, first_attempt

        selection, verifier = inputs.selection, self.verifier
        label = f"{selection.stack_name}-{selection.base_name}"
        # Not sooner: apt and mmdebstrap are asked, 0.6 s of processor time, and what was verified once is known.
        preparing = verifier.preparing(selection) if verifier is not None else contextlib.nullcontext(_go_on)
        with preparing as refuse_without_place, work_folder(self.context, "search", f"search-{label}") as questions:
            following: LockInputs | Failure
            following = first = first_attempt(inputs, existing)
            search = Search(first, existing, questions)
            while not isinstance(following, Failure):
                refuse_without_place()
                with work_folder(self.context, "lock", f"lock-{label}") as work:
                    outcome = attempt(following, work, verifier)
                    if isinstance(outcome, NewLock):
                        yield outcome
                        return
                following = search.after(outcome)
            yield following


def _go_on() -> None:
    """Where nothing is verified, nothing is to be prepared."""
