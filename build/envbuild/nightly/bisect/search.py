"""The search for what breaks, over names and a test: it knows nothing of locks.

With ``n`` names and one culprit it takes at most ``ceil(log2 n)`` tests to name it. A culprit that was named by
elimination is then tested alone: one that needs a partner would look the same. No search can do without: of 12 names,
four tests can name each, and show 8 alone at most.

What contains a set that fails fails too, and what a set that passes contains passes: such sets are not tested again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class TrialOutcome(str, Enum):
    """The outcome of a test: ``UNKNOWN`` if it cannot be made, or fails for another reason."""

    PASSES = "passes"
    FAILS = "fails"
    UNKNOWN = "unknown"


# Tries what is good with these names moved.
Test: TypeAlias = Callable[[frozenset[str]], TrialOutcome]


@dataclass(frozen=True, kw_only=True)
class Culprits:
    """A set of names that breaks: one part alone, or several only together.

    Attributes:
        parts: each is one name; or several of which no test could tell which one it is.
        all_needed: without any one of the parts the others pass; else some could not be tested without the others.
    """

    parts: tuple[tuple[str, ...], ...]
    all_needed: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for part in self.parts for name in part)

    @property
    def decided(self) -> bool:
        """Whether every part is one name."""
        return all(len(part) == 1 for part in self.parts)


def find_culprits(names: Sequence[str], test: Test) -> Culprits:
    """A smallest set of names that fails, where none of them passes and all of them fail.

    Args:
        names: the most suspect first: those need the fewest tests.
    """
    known = _Known(test, names)
    suspect = _suspect(names, known)
    if suspect and known(frozenset({suspect})) is TrialOutcome.FAILS:
        return Culprits(parts=((suspect,),))
    return _together(names, known)


def bracket(count: int, test: Callable[[int], TrialOutcome]) -> tuple[int, int]:
    """The longest beginning that passes and the shortest that fails, of a list of ``count`` elements.

    Without any item it passes, with all it fails. The two differ by one, or by those that cannot be tested.
    """
    low, high = 0, count
    while high - low > 1:
        # The next size where one cannot be tested; where none can, the two ends stay apart.
        for size in _near_half(high - low):
            outcome = test(low + size)
            if outcome is TrialOutcome.FAILS:
                high = low + size
            elif outcome is TrialOutcome.PASSES:
                low += size
            else:
                continue
            break
        else:
            break
    return low, high


class _Known:
    """A test whose results are kept, and followed to what they imply."""

    def __init__(self, test: Test, names: Sequence[str]) -> None:
        self._test = test
        self._results = {frozenset[str](): TrialOutcome.PASSES, frozenset(names): TrialOutcome.FAILS}

    def __call__(self, names: frozenset[str]) -> TrialOutcome:
        for tested, outcome in self._results.items():
            if (
                tested == names
                or (outcome is TrialOutcome.FAILS and tested < names)
                or (outcome is TrialOutcome.PASSES and names < tested)
            ):
                return outcome
        self._results[names] = self._test(names)
        return self._results[names]


def _suspect(names: Sequence[str], known: _Known) -> str | None:
    """The one name, if it is one; None where too little can be tested."""
    candidates, cleared = list(names), list[str]()
    while len(candidates) > 1:
        for size in _near_half(len(candidates)):
            half = candidates[:size]
            outcome = known(frozenset(half))
            if outcome is TrialOutcome.UNKNOWN and cleared:
                # It may need what else has moved.
                outcome = known(frozenset([*cleared, *half]))
            if outcome is not TrialOutcome.UNKNOWN:
                break
        else:
            return None
        if outcome is TrialOutcome.FAILS:
            candidates = half
        else:
            cleared, candidates = [*cleared, *half], candidates[size:]
    return candidates[0] if candidates else None


def _together(names: Sequence[str], known: _Known) -> Culprits:
    """The names that fail only together: each part is the last that the others, with all before it, need to fail."""
    parts: list[tuple[str, ...]] = []
    rest = list(names)
    while rest:
        fixed = [name for part in parts for name in part]
        if fixed and known(frozenset(fixed)) is TrialOutcome.FAILS:
            break

        # Defaults bind the lists of this round: a closure would see those of the last one.
        def with_first(count: int, fixed: list[str] = fixed, rest: list[str] = rest) -> TrialOutcome:
            return known(frozenset([*fixed, *rest[:count]]))

        low, high = bracket(len(rest), with_first)
        parts.insert(0, _shrunk(tuple(rest[low:high]), [*fixed, *rest[:low]], known))
        rest = rest[:low]
    names_left = [frozenset(name for part in parts if part != without for name in part) for without in parts]
    return Culprits(parts=tuple(parts), all_needed=all(known(left) is TrialOutcome.PASSES for left in names_left))


def _shrunk(part: tuple[str, ...], others: Sequence[str], known: _Known) -> tuple[str, ...]:
    """A part without what it still fails without: a name that only moves with another leaves that one in it."""
    # As ddmin does: halves first, then ever smaller pieces (Zeller and Hildebrandt, "Simplifying and Isolating
    # Failure-Inducing Input", 2002).
    size = len(part) // 2
    while size:
        for start in range(0, len(part), size):
            left = part[:start] + part[start + size :]
            if left and known(frozenset([*others, *left])) is TrialOutcome.FAILS:
                part = left
                break
        else:
            size //= 2
    return part


def _near_half(count: int) -> Iterator[int]:
    """The sizes of a first part, the nearest to half first."""
    yield from sorted(range(1, count), key=lambda size: (abs(2 * size - count), size))
