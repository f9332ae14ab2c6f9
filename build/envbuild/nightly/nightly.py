"""One night: the chain from lock to publication, for each target by itself, with the ledger as its memory."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from envbuild import __version__
from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core.errors import (
    CertificationFailedError,
    EnvbuildError,
    InternalError,
    InterruptedByUserError,
)
from envbuild.core.interruptions import has_come
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import LockRow, NightRow, Row, StepName, StepRow
from envbuild.lock.lockdir import find_lock, with_locked_base
from envbuild.lock.lockfile import LockDirectory
from envbuild.nightly.faults import counts, is_worth_repeating, step_error
from envbuild.nightly.models import Job, NamedStep, NightRequest, Outcome
from envbuild.nightly.records import failed_case_rows, lock_row, moved
from envbuild.nightly.steps import make_lock

T = TypeVar("T")
# A failure counts when it comes again in new processes.
MOST_ATTEMPTS = 2
# The code of CertificationCannotRunError: nothing failed, and nothing was certified.
WAITING_CODE = 8


@dataclass
class Night:
    """One night.

    Attributes:
        renew: called before each step: raises where another runner has the lease by now.
    """

    request: NightRequest
    steps: Sequence[NamedStep]
    ledger: Ledger
    context: Context
    renew: Callable[[], None] = lambda: None
    rows: list[StepRow] = field(default_factory=list)

    def run(self) -> NightRow:
        """Run the chain for every target; a failure of one stops no other.

        Returns:
            The night's row, with the exit code of what failed first; that of waiting where nothing failed.
        """
        self._night = NightRow(
            stack=self.request.stack,
            id=f"{self.request.stack}-{self.context.moment().replace(':', '')}-{secrets.token_hex(3)}",
            targets=self.request.targets,
            host=socket.gethostname(),
            envbuild=__version__,
            started_at=self.context.moment(),
            lock_name=self.request.name,
        )
        # At once: of a night that is killed the ledger says that it did not end.
        self.ledger.record(self._night)
        # Targets share the lock of their base.
        by_base: dict[str, list[Selection]] = {}
        for selection in self.request.selections:
            by_base.setdefault(selection.base_name, []).append(selection)
        for selections in by_base.values():
            lock = self._lock(selections[0])
            for selection in selections:
                if lock is None:
                    self._skip(selection.target_name, selection.base_name, [step.name for step in self.steps])
                else:
                    # The lock's base may be the stack's next one.
                    self._target(replace(selection, base_name=lock.lock.base.name), lock)
        self._night = self._night.model_copy(
            update={"finished_at": self.context.moment(), "exit_code": self._exit_code()}
        )
        self.ledger.record(self._night)
        return self._night

    def _exit_code(self) -> int:
        failed = [row.error.exit_code for row in self.rows if row.error is not None and row.state == "failed"]
        waiting = any(row.state == "waiting" for row in self.rows)
        return failed[0] if failed else WAITING_CODE if waiting else 0

    def _lock(self, selection: Selection) -> LockDirectory | None:
        """The newest lock that holds together; the one that is there where none can be made now."""
        started, base = _Started(self.context.moment()), selection.base_name

        done, attempts = self._attempts("lock", lambda _: make_lock(selection, self.request, self.context))
        if isinstance(done, EnvbuildError):
            self._failed(self._row("lock", "", base, started, attempts=attempts, state="failed"), done)
            return self._last_good_lock(selection)
        directory = done.directory
        row = lock_row(directory, self.request.name, self.context.moment())
        self._note_lock(row)
        state = "done" if done.built else "nothing"
        about = {"digest": row.digest, "lock_digest": row.digest, "attempts": attempts}
        self._record(self._row("lock", "", directory.lock.base.name, started, state=state, **about), row)
        return directory

    def _last_good_lock(self, selection: Selection) -> LockDirectory | None:
        request, reporter = self.request, self.context.reporter
        try:
            if not request.base_named:
                selection = with_locked_base(
                    selection, request.name, request.project, reporter, target=selection.target_name
                )
            return find_lock(request.project, selection, request.lock_name)
        except EnvbuildError:
            return None

    def _note_lock(self, row: LockRow) -> None:
        """Note in the night what moved since the one before."""
        nights = [
            night for night in self.ledger.rows(NightRow, stack=row.stack, newest=50) if night.id != self._night.id
        ]
        # Of the same name: a stack has locks on several bases, and variants.
        of_name = [night for night in nights if night.lock_name == self.request.name and night.lock_digest]
        previous = next((night for night in reversed(of_name) if night.lock_digest != row.digest), None)
        last = of_name[-1] if of_name else None
        before = self.ledger.get(LockRow, f"{last.lock_digest}/{self.request.name}") if last is not None else None
        self._night = self._night.model_copy(
            update={
                # Of locks on several bases the night names the first; what moved is of all.
                "lock_digest": self._night.lock_digest or row.digest,
                "previous_lock_digest": self._night.previous_lock_digest or (previous.lock_digest if previous else ""),
                "moved": tuple(dict.fromkeys((*self._night.moved, *moved(before, row)))),
            }
        )

    def _target(self, selection: Selection, lock: LockDirectory) -> None:
        """The steps of a target up to the first one that fails or waits."""
        job = Job(selection=selection, lock=lock)
        with self.context.reporter.step(f"{selection.stack_name} for {job.target}"):
            for position, step in enumerate(self.steps):
                outcome = self._step(step, job)
                if outcome is None:
                    self._skip(job.target, selection.base_name, [later.name for later in self.steps[position + 1 :]])
                    return
                job = outcome.job

    def _step(self, step: NamedStep, job: Job) -> Outcome | None:
        """Run a step; None if it failed or waits."""
        self.renew()
        started, base = _Started(self.context.moment()), job.selection.base_name

        def row(**fields: Any) -> StepRow:
            return self._row(step.name, job.target, base, started, lock_digest=job.lock.lock.digest, **fields)

        before = None if self.request.retry else self._failed_before(step, job)
        if before is not None:
            note = f"failed in night {before.night}, and nothing changed since; --retry runs it again"
            # With the digest of that failure, so that the night after finds it in this row.
            self._record(row(attempts=0, state="failed", note=note, digest=before.digest, error=before.error))
            self.context.reporter.note(f"{step.name} for {job.target}: {note}")
            return None
        done, attempts = self._attempts(f"{step.name} for {job.target}", lambda attempt: step.run(job, attempt))
        if isinstance(done, EnvbuildError):
            cases = (
                failed_case_rows(done, job, self._night.id, self.context.moment())
                if isinstance(done, CertificationFailedError)
                else []
            )
            self._failed(row(attempts=attempts, state="failed", digest=self._inputs(step, job)), done, *cases)
            return None
        outcome = {name: getattr(done, name) for name in ("state", "digest", "bytes_sent", "note", "plan")}
        self._record(row(attempts=attempts, **outcome), *done.rows)
        return None if done.state == "waiting" else done

    def _attempts(self, what: str, action: Callable[[int], T]) -> tuple[T | EnvbuildError, int]:
        """The result of an action or its last failure, and the number of attempts."""
        for number in range(1, MOST_ATTEMPTS + 1):
            try:
                return action(number), number
            # It is an EnvbuildError, too.
            except InterruptedByUserError:  # noqa: PERF203 - two attempts
                raise
            except Exception as error:
                # An interruption can come out as another error, that of shutil.rmtree as `Bad file descriptor`.
                if has_come():
                    raise
                # A fault of envbuild stops no other target either.
                failure = error if isinstance(error, EnvbuildError) else InternalError.explaining(error)
                if number == MOST_ATTEMPTS or not is_worth_repeating(failure):
                    return failure, number
                self.context.reporter.note(f"{what} failed: {failure.what}. Trying once more with new processes")
        raise InternalError("a step had no attempt")

    def _failed_before(self, step: NamedStep, job: Job) -> StepRow | None:
        """The last failure of a step that counted, where nothing that decides it changed since."""
        rows = [
            row
            for row in self.ledger.rows(StepRow, stack=self.request.stack, target=job.target)
            if row.name == step.name
        ]
        last = next((row for row in reversed(rows) if row.state != "skipped"), None)
        if last is None or last.error is None or not counts(last.error.fault):
            return None
        inputs = self._inputs(step, job)
        return last if inputs and last.digest == inputs else None

    def _inputs(self, step: NamedStep, job: Job) -> str:
        try:
            return step.inputs(job)
        except EnvbuildError:
            # What decides it cannot be told, so it is tried again.
            return ""

    def _skip(self, target: str, base: str, names: Sequence[StepName]) -> None:
        for name in names:
            self._record(self._row(name, target, base, _Started(self.context.moment()), state="skipped"))

    def _failed(self, row: StepRow, error: EnvbuildError, *rows: Row) -> None:
        failure = step_error(error)
        where = f" for {row.target}" if row.target else ""
        self.context.reporter.note(f"{row.name}{where} failed ({failure.fault}): {error.what}\n{error.why}")
        self._record(row.model_copy(update={"error": failure}), *rows)

    def _record(self, row: StepRow, *rows: Row) -> None:
        self.rows.append(row.model_copy(update={"position": len(self.rows)}))
        self.ledger.record(self.rows[-1], *rows)

    def _row(self, name: StepName, target: str, base: str, started: _Started, **fields: Any) -> StepRow:
        return StepRow(
            stack=self.request.stack,
            night=self._night.id,
            target=target,
            name=name,
            base=base,
            started_at=started.at,
            seconds=round(time.monotonic() - started.clock, 3),
            **fields,
        )


@dataclass(frozen=True)
class _Started:
    at: str
    clock: float = field(default_factory=time.monotonic)
