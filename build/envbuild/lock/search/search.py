"""The search: attempts until one passes, each with what the failure of the last one calls for."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.core.errors import EnvbuildError, ResolutionError
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.context import Repositories, WorkContext, work_folder
from envbuild.lock.inputs.deviation import texts
from envbuild.lock.inputs.request import LockInputs, is_curable, is_of_another_cuda, may_deviate
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.make import LockProgress, new_lock
from envbuild.lock.search.blame import blame_of
from envbuild.lock.search.candidates import Candidates
from envbuild.lock.search.clashes import in_plain_ranges
from envbuild.lock.search.state import Blame, Move, State

# The first reason of uv 0.13's explanation, which goes on for pages.
_BECAUSE = re.compile(r"Because (.{1,200}?)(?:,? we can conclude| and because|$)", re.IGNORECASE)
_NOT_BUILT = re.compile(r"error: (Failed to [^`]{1,40}`[^`]{1,200}`)")
# An attempt takes half a minute to two minutes, with its verification.
MOST_ATTEMPTS = 10
# For one failure, so many candidates of each package.
MOST_CANDIDATES = 6


@contextlib.contextmanager
def searched_lock(
    inputs: LockInputs,
    existing: LockDirectory | None,
    accept: Callable[[Path], None],
    repositories: Repositories,
    context: Context,
) -> Iterator[Path]:
    """A lock that every check and ``accept`` pass, in a folder that goes at the end.

    Args:
        accept: tries a finished lock; raises what it is refused by.

    Raises:
        EnvbuildError: nothing passes: the failure that stands in the way, with what was tried.
    """
    selection, moment = inputs.selection, context.clock()
    # All attempts are as of one moment, whatever they take.
    context = replace(context, clock=lambda: moment)
    with work_folder(context, "search", f"search-{selection.stack_name}-{selection.base_name}") as work:
        search = Search(inputs, work)
        state = State().with_move(inputs.deviations)
        while True:
            steps = LockProgress(state.of(inputs))
            with contextlib.ExitStack() as attempt:
                try:
                    folder = attempt.enter_context(new_lock(steps.inputs, existing, repositories, context, steps))
                    accept(folder)
                except EnvbuildError as error:
                    if not is_curable(error):
                        raise
                    failure = error
                else:
                    yield folder
                    return
            if inputs.pins_stay:
                # Without what the existing lock knows: upstream's code, or the index, is another one by now.
                inputs, state = replace(inputs, pins_stay=False, deviations=()), State()
            else:
                state = search.after(state, steps, failure)


@dataclass
class _Frame:
    """A state that failed, and what is left to try against its failure.

    Attributes:
        locked: the packages that it resolved to; empty where it did not.
    """

    state: State
    blame: Blame
    moves: Iterator[Move]
    locked: frozenset[str] = frozenset()

    def is_no_better(self, blame: Blame) -> bool:
        """Whether a move against this failure led nowhere: to the same one, or to a package of its own that fails.

        NeMo of April 2025 seemed to need nvidia-pytriton, of whose own needs two do not build with Python 3.12.
        """
        brought = {item.code for item in blame.findings} == {"install"}
        own = brought and bool(blame.packages and self.locked) and not {*blame.packages} & self.locked
        return own or self.blame.signature == blame.signature


class Search:
    """What to try next.

    Args:
        context: with a folder for questions to uv.
    """

    def __init__(self, inputs: LockInputs, context: WorkContext) -> None:
        self._inputs = inputs
        self._context = context
        self._frames: list[_Frame] = []
        self._tried: set[tuple[object, ...]] = set()
        self._lines: list[str] = []
        self._blocking: Blame | None = None
        self._attempts = 0

    def after(self, state: State, steps: LockProgress, error: EnvbuildError) -> State:
        """The state to try after one that failed.

        Raises:
            EnvbuildError: nothing is left.
        """
        request = self._inputs.request
        # Another base is taken before other releases, where the user leaves it open.
        if not may_deviate(self._inputs.selection, request) or (is_of_another_cuda(error) and not request.base_named):
            raise error
        blame = replace(blame_of(error, _direct(steps)), resolved=steps.resolved is not None)
        blame = replace(blame, settled=self._settled(blame, steps))
        if isinstance(error, LockRefusedError):
            error.settled = bool(blame.settled)
        self._tried.add(state.key)
        self._attempts += 1
        self._lines.append(f"{_words(state)}: {summary(error)}")
        if self._blocking is None or blame.is_beyond(self._blocking):
            self._blocking = blame
        # Where a move did not help the next one is tried in its place.
        if not self._frames or not self._frames[-1].is_no_better(blame):
            locked = frozenset(steps.resolved.resolution.pins) if steps.resolved is not None else frozenset()
            # What was tried against earlier failures is not about this one.
            if blame.of_syntax or blame.of_source or blame.settled:
                self._frames = []
            moves = iter(()) if blame.settled else self._moves(blame, steps)
            self._frames.append(_Frame(state, blame, moves, locked))
        return self._next()

    def _next(self) -> State:
        while self._frames and self._attempts < MOST_ATTEMPTS:
            frame = self._frames[-1]
            move = next(frame.moves, None)
            if move is None:
                self._frames.pop()
                continue
            state = frame.state.with_move(move)
            if state.key not in self._tried:
                for text in texts(state.deviations[item.package, item.declared_by] for item in move):
                    self._context.reporter.note(f"trying {text}")
                return state
        raise self._nothing_left()

    def _moves(self, blame: Blame, steps: LockProgress) -> Iterator[Move]:
        if steps.decided is None:
            return
        candidates = Candidates(steps, summary(blame.error), self._context, without=blame.unbuilt)
        # A generator: each candidate is a question to uv, asked only when its turn comes.
        yield from (candidates.missing(module) for module in blame.missing)
        yield from _in_turn(candidates.without_extra, blame.packages)
        yield from _in_turn(candidates.likely, blame.packages)
        yield from itertools.chain.from_iterable(map(candidates.relaxed, blame.clashes[:MOST_CANDIDATES]))
        yield from _in_turn(candidates.earlier, blame.packages)

    def _settled(self, blame: Blame, steps: LockProgress) -> tuple[CheckFinding, ...]:
        """The findings that stay whatever the search takes in the place of releases."""
        if steps.decided is None:
            return ()
        may_move = Candidates(steps, "", self._context).may_move
        closed = [item for item in blame.findings if item.is_closed]
        return tuple(item for item in closed if not any(map(may_move, item.packages)))

    def _nothing_left(self) -> EnvbuildError:
        assert self._blocking is not None  # noqa: S101 - for the type checker: something failed
        error = self._blocking.error
        tried = [f"Tried {len(self._lines)} times:", *self._lines] if len(self._lines) > 1 else []
        return error.with_context(why="\n".join([error.why, *tried]))


def _in_turn(candidates: Callable[[str], Iterator[Move]], packages: Iterable[str]) -> Iterator[Move]:
    """The first candidate of each package, then the second of each."""
    lists = [itertools.islice(candidates(package), MOST_CANDIDATES) for package in packages]
    for moves in itertools.zip_longest(*lists):
        yield from (move for move in moves if move is not None)


def _direct(steps: LockProgress) -> Iterable[str]:
    """The packages that the lock's project names itself."""
    if steps.decided is None:
        return ()
    forced = steps.plan.project.overrides if steps.plan is not None else {}
    return (*steps.decided.chosen, *forced, *steps.decided.effective.stack.requirements)


def summary(error: EnvbuildError) -> str:
    """A failure in one line: the first thing that is wrong."""
    if isinstance(error, LockRefusedError):
        return error.findings[0].what.splitlines()[0]
    if isinstance(error, ResolutionError):
        text = in_plain_ranges(" ".join(error.why.split()))
        if match := _BECAUSE.search(text) or _NOT_BUILT.search(text):
            return f"{error.what}: {match[1]}"
    return error.what


def _words(state: State) -> str:
    return "; ".join(texts(state.deviations.values())) or "upstream's pins"
