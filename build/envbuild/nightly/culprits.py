"""After a night: certified locks are kept, and for a target that failed the package that breaks it is looked for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core.digests import short
from envbuild.core.errors import EnvbuildError, InterruptedByUserError
from envbuild.core.text import shown
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import BisectRow, CaseRow, CertificateRow, Fault, StepRow, StepState
from envbuild.lock.context import run_context
from envbuild.lock.lockdir import lock_path
from envbuild.lock.lockfile import LockDirectory, read_lock, snapshot
from envbuild.nightly.bisect.bisect import BisectRequest, bisect
from envbuild.nightly.bisect.models import Bisected
from envbuild.nightly.bisect.trials import CaseTrial, ImportTrial, LockTrial
from envbuild.nightly.models import NightRequest
from envbuild.nightly.steps import fitting_wheels_of, verifier_of

# Of the store: the locks that were certified, by their digest. A project has the newest one alone.
CERTIFIED_LOCKS = "certified-locks"


@dataclass(frozen=True, kw_only=True)
class CulpritSearch:
    """The search for culprits after the chain of a night.

    Attributes:
        budget_seconds: for all targets together; no trial is begun after it, and the next night goes on.
    """

    request: NightRequest
    ledger: Ledger
    context: Context
    budget_seconds: float

    def keep_locks(self, steps: Iterable[StepRow]) -> None:
        """Keep the locks that were certified, for the night that fails."""
        # `nothing`: an earlier night certified it, or somebody by hand.
        bases = {step.base for step in steps if step.name == "certify" and step.state in ("done", "nothing")}
        for base in sorted(bases):
            lock = self._lock_on(base)
            self.context.store.get_or_build(CERTIFIED_LOCKS, lock.lock.digest, functools.partial(_copy, lock))

    def run(self, steps: Sequence[StepRow]) -> tuple[StepRow, ...]:
        """Bisect between the last certified lock and the one that failed, for each target that did.

        What a failure of the machine, a build or a missing GPU stopped is left alone. A bisection that ended is not
        done again.
        """
        started = self.context.clock()
        listed = []
        for step in steps:
            left = self.budget_seconds - (self.context.clock() - started).total_seconds()
            if left <= 0:
                break
            if (row := self._of_step(step, left)) is not None:
                listed.append(row)
        return tuple(listed)

    def _of_step(self, step: StepRow, seconds: float) -> StepRow | None:
        """The bisection of a step that failed; None where there is nothing to bisect."""
        if step.state != "failed" or step.error is None or not step.target:
            return None
        # The lock may be on the stack's next base, and the step says on which.
        selection = next(selection for selection in self.request.selections if selection.target_name == step.target)
        certified = self.ledger.rows(CertificateRow, stack=step.stack, target=step.target)
        last = next((row.lock_digest for row in reversed(certified) if row.base == step.base), step.lock_digest)
        # Without a certificate on this base `last` is the lock itself: there is nothing to compare with.
        if last == step.lock_digest:
            return None
        if self.ledger.get(BisectRow, f"{last}/{step.lock_digest}/{step.target}") is not None:
            return None
        trial = self._trial(step, step.error.fault, replace(selection, base_name=step.base))
        return None if trial is None else self._bisected(step, last, trial, seconds)

    def _bisected(self, step: StepRow, last: str, trial: LockTrial, seconds: float) -> StepRow:
        """Bisect from the last certified lock, named by its digest."""
        kept, bad = self.context.store.find(CERTIFIED_LOCKS, last), self._lock_on(step.base)
        if kept is None:
            return self._note(step, "skipped", f"the last certified lock {short(last)} is not in the store")
        if bad.lock.digest != step.lock_digest:
            return self._note(step, "skipped", f"lock {short(step.lock_digest)} was replaced in {shown(bad.path)}")
        try:
            with self.context.reporter.step(f"bisect for {step.target}"):
                request = BisectRequest(good=read_lock(kept), bad=bad, trial=trial, budget_seconds=seconds)
                result = bisect(request, run_context(self.context))
        # It is an EnvbuildError, too.
        except InterruptedByUserError:
            raise
        except EnvbuildError as error:
            return self._note(step, "skipped", f"{error.what}. {error.why}")
        return self._found(step, result)

    def _trial(self, step: StepRow, fault: Fault, selection: Selection) -> LockTrial | None:
        """The trial that repeats a failure; None if none can."""
        if step.name == "image" and fault == "check":
            verifier = verifier_of(self.request, self.context, without="envbuild nightly --bisect 0")
            return ImportTrial(selection=selection, verify=verifier)
        if step.name != "certify" or fault != "training":
            return None
        cases = self.ledger.rows(CaseRow, stack=step.stack, target=step.target)
        failed = [row for row in cases if row.lock_digest == step.lock_digest and not row.passed]
        # A baseline that fails takes its cases with it. Of the others the shortest: every trial trains it.
        failed.sort(key=lambda row: (row.baseline is not None, row.seconds or 0.0, row.case))
        if not failed:
            return None
        return CaseTrial(
            selection=selection,
            case=failed[0].case,
            matrix=selection.matrix_for(self._lock_on(step.base).lock.driver),
            wheels_for=functools.partial(fitting_wheels_of, self.request, self.context),
            context=self.context,
        )

    def _lock_on(self, base: str) -> LockDirectory:
        return read_lock(lock_path(self.request.project, self.request.name, base))

    def _found(self, step: StepRow, result: Bisected) -> StepRow:
        text = "\n".join(result.lines())
        self.context.reporter.note(text)
        if not result.finished:
            return self._note(step, "skipped", result.lines()[0], result.seconds)
        packages = [package for culprit in result.culprits for package in culprit.packages]
        commits = [commit for culprit in result.culprits if culprit.commit for commit in culprit.commit.commits]
        self.ledger.record(
            BisectRow(
                stack=step.stack,
                night=step.night,
                target=step.target,
                good=result.good,
                bad=result.bad,
                component=" and ".join(package.name for package in packages),
                before=", ".join(package.old.version for package in packages if package.old),
                after=", ".join(package.new.version for package in packages if package.new),
                commit=" or ".join(commits),
                tests=result.runs + result.reused,
                text=text,
                ended_at=self.context.moment(),
            )
        )
        return self._note(step, "done", text.splitlines()[0], result.seconds)

    def _note(self, step: StepRow, state: StepState, note: str, seconds: float = 0.0) -> StepRow:
        row = StepRow(
            stack=step.stack,
            night=step.night,
            target=step.target,
            name="bisect",
            # After all that the night did before.
            position=sum(row.night == step.night for row in self.ledger.rows(StepRow, stack=step.stack)),
            base=step.base,
            lock_digest=step.lock_digest,
            state=state,
            started_at=self.context.moment(),
            seconds=round(seconds, 3),
            note=note,
        )
        self.ledger.record(row)
        return row


def _copy(lock: LockDirectory, folder: Path) -> None:
    snapshot(lock, folder)
