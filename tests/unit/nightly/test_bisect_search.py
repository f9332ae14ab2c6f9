"""The search of a bisection: which names it finds, and in how many tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from envbuild.nightly.bisect.search import Culprits, TrialOutcome, bracket, find_culprits

NAMES = [f"n{number:02}" for number in range(12)]


class Counted:
    """A test that counts: what fails is a set that holds all of the culprits."""

    def __init__(self, *culprits: str, unknown: Callable[[frozenset[str]], bool] = lambda _: False) -> None:
        self.culprits = frozenset(culprits)
        self.unknown = unknown
        self.tested: list[frozenset[str]] = []

    def __call__(self, names: frozenset[str]) -> TrialOutcome:
        assert names not in self.tested, "nothing is tested twice"
        self.tested.append(names)
        if self.unknown(names):
            return TrialOutcome.UNKNOWN
        return TrialOutcome.FAILS if self.culprits <= names else TrialOutcome.PASSES


def names_of(culprits: Culprits) -> list[str]:
    assert culprits.decided
    return sorted(culprits.names)


def test_one_of_twelve_is_named_in_four_tests_and_shown_alone() -> None:
    counts = []
    for culprit in NAMES:
        test = Counted(culprit)
        assert names_of(find_culprits(NAMES, test)) == [culprit]
        assert frozenset({culprit}) in test.tested
        counts.append(len(test.tested))
    # Four tests name each. One that was named by elimination takes another, to tell it from two that break together.
    assert sorted(counts) == [3] * 4 + [4] * 4 + [5] * 4
    # The first name is the most suspect.
    assert counts[0] == 3


@pytest.mark.parametrize("count", range(1, 34))
def test_a_search_takes_the_logarithm_and_one_test(count: int) -> None:
    names = [str(number) for number in range(count)]
    for culprit in names:
        test = Counted(culprit)
        assert names_of(find_culprits(names, test)) == [culprit]
        assert len(test.tested) <= math.ceil(math.log2(count)) + 1


def test_names_that_break_only_together_are_all_found() -> None:
    sets = [*itertools.combinations(NAMES, 2), *itertools.combinations(NAMES[::2], 3), tuple(NAMES)]
    for culprits in sets:
        named = find_culprits(NAMES, Counted(*culprits))
        assert (names_of(named), named.all_needed) == (sorted(culprits), True)


def test_with_two_culprits_that_each_break_alone_one_is_found() -> None:
    def test(names: frozenset[str]) -> TrialOutcome:
        return TrialOutcome.FAILS if names & {"n03", "n08"} else TrialOutcome.PASSES

    assert find_culprits(NAMES, test).parts in ((("n03",),), (("n08",),))


def test_what_cannot_be_tested_is_gone_around() -> None:
    for culprit in NAMES:
        # n05 moves only with n04.
        test = Counted(culprit, unknown=lambda names: "n05" in names and "n04" not in names)
        culprits = find_culprits(NAMES, test)
        if culprit == "n05":
            assert (sorted(culprits.names), culprits.all_needed) == (["n04", "n05"], False)
        else:
            assert names_of(culprits) == [culprit]


def test_what_cannot_be_told_apart_is_named_together() -> None:
    test = Counted("n06", unknown=lambda names: len(names & {"n05", "n06", "n07"}) in (1, 2))
    assert find_culprits(NAMES, test).parts == (("n05", "n06", "n07"),)
    nothing_works = Counted("n06", unknown=lambda _: True)
    assert find_culprits(NAMES, nothing_works).parts == (tuple(NAMES),)


def test_a_bracket_closes_to_one_item_or_those_that_cannot_be_tested() -> None:
    for bad in range(1, 20):
        outcomes = [TrialOutcome.FAILS if count >= bad else TrialOutcome.PASSES for count in range(20)]
        assert bracket(19, outcomes.__getitem__) == (bad - 1, bad)

    def test(count: int) -> TrialOutcome:
        return TrialOutcome.UNKNOWN if 7 <= count <= 9 else TrialOutcome.FAILS if count >= 8 else TrialOutcome.PASSES

    assert bracket(19, test) == (6, 10)
