"""Between a lock that works and one that does not: which package breaks it, and for git which commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from envbuild.catalog.context import Context
from envbuild.core.digests import digest_of, short
from envbuild.core.errors import CheckRefusedError, EnvbuildError, UsageError
from envbuild.core.files import write_atomic
from envbuild.git.refs import GitRef
from envbuild.lock.context import Repositories, RunContext
from envbuild.lock.lockfile import LockDirectory
from envbuild.nightly.bisect.mixed_lock import Mix, write_mixed
from envbuild.nightly.bisect.models import Bisected, Culprit, CulpritCommit
from envbuild.nightly.bisect.moved import MovedGroup, component_of, moved_groups, moved_summary
from envbuild.nightly.bisect.search import TrialOutcome, bracket, find_culprits
from envbuild.nightly.bisect.trials import LockTrial, Tried

KIND, RESULT_FILE = "bisections", "tried.json"
_TRIED = TypeAdapter(Tried)


@dataclass(frozen=True, kw_only=True)
class BisectRequest:
    """The two locks of a bisection, and its trial.

    Attributes:
        good: a lock that passes the trial.
        bad: one of the same base that does not.
        budget_seconds: no trial is begun after them; None: no limit.
    """

    good: LockDirectory
    bad: LockDirectory
    trial: LockTrial
    budget_seconds: float | None = None


def bisect(request: BisectRequest, context: RunContext) -> Bisected:
    """Confirm both ends, then move one group of packages after the other until what breaks is found.

    Nothing is resolved again: a trial has the good lock's packages with some as the bad one has them. One that does
    not install, or fails in another way than the bad lock, tells nothing and is gone around. Results are kept in the
    store by what was installed.

    Raises:
        UsageError: the locks are of two bases, or hold the same packages.
        CheckRefusedError: an end is not what it is meant to be.
    """
    good, bad = request.good, request.bad
    _refuse_other_base(good, bad)
    groups = moved_groups(good, bad)
    if not groups:
        raise UsageError(
            "the two locks hold the same packages",
            why=f"{good.path} and {bad.path} pin the same files and commits.",
            fix="What breaks is not a package: compare the bases, the wheels or the machines.",
        )
    context.reporter.note(moved_summary(good, bad, groups))
    trials = _Trials(request, context)
    culprits: tuple[Culprit, ...] = ()
    only_together, finished = False, True
    try:
        failure = trials.confirm_ends(groups)
        # The failure may name packages: they are tried first.
        groups = moved_groups(good, bad, failure.suspects)
        culprits, only_together = _culprits(groups, trials, context.repositories)
    except _TimeIsUpError:
        finished = False
    return Bisected(
        good=good.lock.digest,
        bad=bad.lock.digest,
        trial=request.trial.text,
        groups=groups,
        failure=trials.failure.what,
        culprits=culprits,
        only_together=only_together,
        runs=trials.runs,
        reused=trials.reused,
        seconds=trials.seconds,
        finished=finished,
    )


def _refuse_other_base(good: LockDirectory, bad: LockDirectory) -> None:
    one, two = good.lock.base, bad.lock.base
    if (one.name, one.platform, one.python) != (two.name, two.platform, two.python):
        raise UsageError(
            f"the locks are of two bases: {one.name} (Python {one.python}) and {two.name} (Python {two.python})",
            why="A bisection exchanges packages, and cannot exchange a base.",
            fix="Name two locks of one base.",
        )


def _culprits(
    groups: tuple[MovedGroup, ...], trials: _Trials, repositories: Repositories
) -> tuple[tuple[Culprit, ...], bool]:
    """The culprits, and whether they break the lock only together."""
    by_name = {group.name: group for group in groups}
    packages = {group.name: frozenset(package.name for package in group.packages) for group in groups}

    def expanded(names: frozenset[str]) -> frozenset[str]:
        return frozenset(name for group in names for name in packages[group])

    names_that_break = find_culprits([*by_name], lambda names: trials.outcome(expanded(names)))
    culprits: list[Culprit] = []
    for part in names_that_break.parts:
        # With the other parts moved: without them nothing fails.
        others = expanded(names_that_break.names - {*part})
        if len(part) > 1:
            culprits.append(Culprit(packages=tuple(package for name in part for package in by_name[name].packages[:1])))
            continue
        inner = _within(by_name[part[0]], others, trials)
        culprits += [_with_commit(package, others, trials, repositories) for package in inner]
    return tuple(culprits), names_that_break.all_needed and len(culprits) > 1


def _within(group: MovedGroup, others: frozenset[str], trials: _Trials) -> list[Culprit]:
    """The packages of a group that break; the one that leads it, where the trials cannot tell."""
    items = {package.name: package for package in group.packages}
    if len(items) == 1:
        return [Culprit(packages=group.packages)]
    names_that_break = find_culprits([*items], lambda names: trials.outcome(names | others))
    if not names_that_break.decided or not names_that_break.all_needed:
        return [Culprit(packages=group.packages[:1])]
    return [Culprit(packages=(items[name],)) for part in names_that_break.parts for name in part]


def _with_commit(culprit: Culprit, others: frozenset[str], trials: _Trials, repositories: Repositories) -> Culprit:
    """The culprit with the commit that breaks, where it is one package from git that moved along a branch."""
    if len(culprit.packages) != 1:
        return culprit
    (package,) = culprit.packages
    good, bad = trials.request.good, trials.request.bad
    old, new = component_of(good, package.name), component_of(bad, package.name)
    if old is None or new is None or not (old.git == new.git and new.git and old.commit and new.commit):
        return culprit
    try:
        repository = repositories.open(new.git)
        ends = [repository.resolve(GitRef(sha)) for sha in (old.commit, new.commit)]
        # Along first parents: a commit that a merge brought never was the branch's tip.
        commits = repository.first_parents(*ends)
    except EnvbuildError as error:
        trials.context.reporter.note(f"note: the commits of {package.name} cannot be had: {error.what}")
        return culprit
    moved = others | {package.name}

    def with_first(count: int) -> TrialOutcome:
        return trials.outcome(moved, {package.name: commits[count - 1]})

    if not commits:
        return culprit
    low, high = bracket(len(commits), with_first)
    shas = tuple(commits[low:high])
    return Culprit(packages=culprit.packages, commit=CulpritCommit(git=new.git, commits=shas, of=len(commits)))


class _TimeIsUpError(Exception):
    """No trial may be begun any more."""


@dataclass
class _Trials:
    """Runs trials of mixes of two locks, each once."""

    request: BisectRequest
    context: Context
    failure: Tried = field(default_factory=lambda: Tried(passed=None))
    runs: int = 0
    reused: int = 0

    def __post_init__(self) -> None:
        self._started = self.context.clock()
        self._trial_key = self.request.trial.key()

    @property
    def seconds(self) -> float:
        return (self.context.clock() - self._started).total_seconds()

    def confirm_ends(self, groups: tuple[MovedGroup, ...]) -> Tried:
        """Try both locks themselves; returns the bad one's failure.

        Raises:
            CheckRefusedError: the bad one passes, or the good one does not, or one cannot be tried.
        """
        everything = frozenset(package.name for group in groups for package in group.packages)
        self.failure = self._tried(Mix(moved=everything, commits={}))
        # None is neither: it could not be tried.
        if self.failure.passed is not False:
            raise self._not_an_end(self.request.bad, self.failure, "fails")
        good = self._tried(Mix(moved=frozenset(), commits={}))
        if good.passed is not True:
            raise self._not_an_end(self.request.good, good, "passes")
        return self.failure

    def outcome(self, moved: frozenset[str], commits: Mapping[str, str] | None = None) -> TrialOutcome:
        """The outcome of the good lock with these packages moved."""
        tried = self._tried(Mix(moved=moved, commits=commits or {}))
        if tried.passed is None or (tried.passed is False and not tried.signs & self.failure.signs):
            return TrialOutcome.UNKNOWN
        return TrialOutcome.PASSES if tried.passed else TrialOutcome.FAILS

    def _tried(self, mix: Mix) -> Tried:
        request, store, reporter = self.request, self.context.store, self.context.reporter
        with store.staging("mixed-lock") as folder:
            lock = write_mixed(folder / "lock", request.good, request.bad, mix)
            key = digest_of({"lock": lock.lock.digest, "trial": self._trial_key})
            # Before the budget: what is known takes no time, so that a bisection that ran out of it gets on.
            if (entry := store.find(KIND, key)) is not None:
                self.reused += 1
                return _TRIED.validate_json((entry / RESULT_FILE).read_bytes())
            if request.budget_seconds is not None and self.seconds >= request.budget_seconds:
                raise _TimeIsUpError
            self.runs += 1
            with reporter.step(f"trial {self.runs}: {_named(mix)}"):
                tried = request.trial(lock)
            reporter.note(f"trial {self.runs}, {_named(mix)}: {tried.text}")
            if tried.lasting:
                content = _TRIED.dump_json(tried)
                store.get_or_build(KIND, key, lambda place: write_atomic(place / RESULT_FILE, content))
            return tried

    def _not_an_end(self, lock: LockDirectory, tried: Tried, wanted: str) -> CheckRefusedError:
        return CheckRefusedError(
            f"the {'bad' if wanted == 'fails' else 'good'} lock {short(lock.lock.digest)} {tried.text}",
            why=f"A bisection by {self.request.trial.text} needs one that {wanted}: {lock.path}",
            fix="Name another lock, or another trial: --case, or --matrix and --target.",
        )


def _named(mix: Mix) -> str:
    commits = [f"{name} at {sha[:12]}" for name, sha in mix.commits.items()]
    names = [*commits, *sorted(mix.moved - mix.commits.keys())]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"the good lock with {', '.join(names[:4])}{more} moved" if names else "the good lock"
