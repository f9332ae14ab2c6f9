"""The search: which attempt is next on a base, chosen from the failures of those before it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from envbuild.core.errors import CheckRefusedError, ResolutionError
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.context import LockContext
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.deviation import texts
from envbuild.lock.inputs.request import LockInputs, is_curable, is_of_another_cuda, may_deviate
from envbuild.lock.lockdir import shipped_lock
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.lock.models import Deviation
from envbuild.lock.outcome import Failure
from envbuild.lock.search.blame import blame_of, summary
from envbuild.lock.search.candidates import Candidates
from envbuild.lock.search.state import Blame, Move, key_of, moved
from envbuild.lock.uv.program import NoUploadTimesError

# An attempt takes half a minute to two minutes, with its verification.
MOST_ATTEMPTS = 10
_MAY_DIFFER = "and another day may lock others"


def first_attempt(inputs: LockInputs, existing: LockDirectory | None) -> LockInputs:
    """The first attempt at a lock.

    Args:
        existing: one from the same inputs as of the same moment keeps its versions: an index does not say when it
            yanked one, so a new resolution could come out differently. So does one of the same pins.
    """
    keeps = existing is not None and (
        inputs.pins_stay
        or (existing.lock.inputs.digest == inputs.digest and existing.lock.inputs.as_of_asked != as_of.NOW)
    )
    return replace(inputs, previous=existing if keeps else None, like=existing or _shipped(inputs))


def _shipped(inputs: LockInputs) -> LockDirectory | None:
    """The stack's lock that comes with envbuild, as far as it can be read."""
    path = shipped_lock(inputs.selection.stack_name, inputs.selection.base_name)
    with contextlib.suppress(CheckRefusedError):
        return read_lock(path) if path is not None else None
    return None


def made_otherwise(failure: Failure) -> tuple[LockInputs, str] | None:
    """The same releases once more in another way, and why, for people; None: that cures nothing."""
    inputs, error = failure.inputs, failure.error
    # Only a resolution shows what is asked for, and of which releases there are no wheels.
    if failure.to_compile and failure.resolved is not None:
        # What was found is preferred, so that only these packages change.
        stays = {**inputs.stays, **failure.resolved.resolution.pins}
        compiled = replace(inputs, compiled=inputs.compiled | failure.to_compile, stays=stays)
        return compiled, f"note: {error.what}: resolving with phase compile for it"
    if failure.all_undated:
        free = replace(inputs, previous=None, no_as_of=True)
        return free, f"warning: {error.what}: packages are held to no moment, {_MAY_DIFFER}"
    if failure.undated - inputs.undated:
        names = ", ".join(sorted(failure.undated))
        freer = replace(inputs, undated=failure.undated)
        return freer, f"warning: {error.what}: held to no moment, {_MAY_DIFFER}: {names}"
    if isinstance(error, NoUploadTimesError):
        return None  # a date has to hold
    # A version that was kept can be gone from the index (test_a_dated_lock_whose_release_is_gone_is_resolved_anew).
    if isinstance(error, ResolutionError) and inputs.previous is not None:
        without = replace(inputs, previous=None)
        return without, "the versions of the existing lock do not resolve any more: resolving without them"
    return None


@dataclass
class _Frame:
    """An attempt that failed, and what is left to try against its failure.

    Attributes:
        deviations: what it took.
        locked: the packages that it resolved to; empty where it did not.
    """

    deviations: tuple[Deviation, ...]
    blame: Blame
    moves: Iterator[Move]
    locked: frozenset[str] = frozenset()

    def is_no_better(self, blame: Blame) -> bool:
        """Whether a move against this failure led nowhere: to the same one, or to a package of its own that fails.

        NeMo of April 2025 seemed to need nvidia-pytriton, of whose own needs two do not build with Python 3.12.
        """
        brought = {finding.code for finding in blame.findings} == {"install"}
        own = brought and bool(blame.packages and self.locked) and not {*blame.packages} & self.locked
        return own or self.blame.signature == blame.signature


class Search:
    """Chooses the next attempt on a base.

    Args:
        first: the first attempt.
        existing: a lock in whose place one is made.
        context: with a folder for questions to uv.
    """

    def __init__(self, first: LockInputs, existing: LockDirectory | None, context: LockContext) -> None:
        self._start = first
        if first.pins_stay:
            # Without what the existing lock knows: upstream's code, or the index, is another one by now.
            self._start = first_attempt(replace(first, pins_stay=False, deviations=()), existing)
        # Where only a branch moved, most of what failed before still does.
        moved_on = existing is not None and first.stays and not first.pins_stay
        self._known = existing.lock.deviating if existing is not None and moved_on else ()
        self._context = context
        self._frames: list[_Frame] = []
        self._tried: set[tuple[tuple[str, ...], ...]] = set()
        self._lines: list[str] = []
        self._blocking: tuple[Failure, Blame] | None = None

    def after(self, failure: Failure) -> LockInputs | Failure:
        """What to try after a failure; where nothing is left, the failure to report."""
        inputs, error = failure.inputs, failure.error
        if (otherwise := made_otherwise(failure)) is not None:
            following, why = otherwise
            self._context.reporter.note(why)
            return following
        if not is_curable(error):
            return failure
        if inputs.pins_stay:
            return self._start
        # Another base is taken before other releases, where the user leaves it open.
        request = inputs.request
        if not may_deviate(inputs.selection, request) or (is_of_another_cuda(error) and not request.base_named):
            return failure
        blame = replace(blame_of(error, _direct(failure)), resolved=failure.resolved is not None)
        blame = replace(blame, settled=self._settled(blame, failure))
        self._tried.add(key_of(inputs.deviations))
        self._lines.append(f"{_words(inputs)}: {summary(error)}")
        blocking = (failure, blame)
        if self._blocking is not None and not (blame.settled or blame.is_beyond(self._blocking[1])):
            blocking = self._blocking
        self._blocking = blocking
        # Where a move did not help the next one is tried in its place.
        if not self._frames or not self._frames[-1].is_no_better(blame):
            # What was tried against earlier failures is not about this one.
            if blame.of_syntax or blame.of_source or blame.settled:
                self._frames = []
            locked = frozenset(failure.resolved.resolution.pins) if failure.resolved is not None else frozenset()
            moves = iter(()) if blame.settled else self._moves(blame, failure)
            self._frames.append(_Frame(inputs.deviations, blame, moves, locked))
        return self._as_before(failure) or self._next_attempt() or self._nothing_left(*blocking)

    def _as_before(self, failure: Failure) -> LockInputs | None:
        """What the existing lock took in the place of upstream's pins, where these are the same; once."""
        known, self._known = self._known, ()
        if not known or failure.decided is None:
            return None
        if not all(map(Candidates(failure, failure.decided, "", self._context).still_replaces, known)):
            return None
        self._context.reporter.note("trying what the existing lock takes")
        return replace(self._start, deviations=known)

    def _next_attempt(self) -> LockInputs | None:
        while self._frames and len(self._lines) < MOST_ATTEMPTS:
            frame = self._frames[-1]
            move = next(frame.moves, None)
            if move is None:
                self._frames.pop()
                continue
            deviations = moved(frame.deviations, move)
            if key_of(deviations) not in self._tried:
                packages = {(deviation.package, deviation.declared_by) for deviation in move}
                for text in texts(taken for taken in deviations if (taken.package, taken.declared_by) in packages):
                    self._context.reporter.note(f"trying {text}")
                return replace(self._start, deviations=deviations)
        return None

    def _nothing_left(self, failure: Failure, blame: Blame) -> Failure:
        error = failure.error
        tried = [f"Tried {len(self._lines)} times:", *self._lines] if len(self._lines) > 1 else []
        explained = error.with_context(why="\n".join([error.why, *tried]))
        return replace(failure, error=explained, settled=bool(blame.settled))

    def _moves(self, blame: Blame, failure: Failure) -> Iterator[Move]:
        if failure.decided is None:
            return
        candidates = Candidates(failure, failure.decided, summary(blame.error), self._context, without=blame.unbuilt)
        # A generator: each candidate is a question to uv, asked only when its turn comes.
        yield from (candidates.missing(module) for module in blame.missing)
        yield from _in_turn(candidates.without_extra, blame.packages)
        yield from _in_turn(candidates.likely, blame.packages)
        yield from itertools.chain.from_iterable(map(candidates.relaxed, blame.clashes))
        yield from _in_turn(candidates.earlier, blame.packages)

    def _settled(self, blame: Blame, failure: Failure) -> tuple[CheckFinding, ...]:
        """The findings that stay whatever the search takes in the place of releases."""
        if failure.decided is None:
            return ()
        may_move = Candidates(failure, failure.decided, "", self._context).may_move
        closed = [finding for finding in blame.findings if finding.is_closed]
        return tuple(finding for finding in closed if not any(map(may_move, finding.packages)))


def _in_turn(candidates: Callable[[str], Iterator[Move]], packages: Iterable[str]) -> Iterator[Move]:
    """The first candidate of each package, then the second of each."""
    lists = map(candidates, packages)
    for moves in itertools.zip_longest(*lists):
        yield from (move for move in moves if move is not None)


def _direct(failure: Failure) -> Iterable[str]:
    """The packages that the lock's project names itself."""
    if failure.decided is None:
        return ()
    forced = failure.plan.project.overrides if failure.plan is not None else {}
    return (*failure.decided.chosen, *forced, *failure.decided.effective.stack.requirements)


def _words(inputs: LockInputs) -> str:
    return "; ".join(texts(inputs.deviations)) or "upstream's pins"
