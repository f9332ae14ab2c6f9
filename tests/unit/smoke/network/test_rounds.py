"""Which sweeps follow from which results: nodes, pairs, pairs again, and the ramp."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from envbuild_smoke.network.rounds import Group, Outcome, bad_nodes, next_round

Passes = Callable[[tuple[int, ...]], bool]


def sweep(nodes: int, passes: Passes, ranks: int = 2) -> tuple[list[list[Group]], list[Outcome]]:
    """All rounds of a run, and their outcomes."""
    rounds: list[list[Group]] = []
    done: list[Outcome] = []
    while groups := next_round(range(nodes), ranks, done):
        used = [node for group in groups for node in group.nodes]
        assert len(used) == len(set(used)), f"a node is in two sweeps at once: {groups}"
        assert not set(groups) & {outcome.group for outcome in done}, "a sweep is done twice"
        rounds.append(list(groups))
        done += [Outcome(group, passes(group.nodes)) for group in groups]
    return rounds, done


def without(bad: Collection[int]) -> Passes:
    return lambda nodes: len(nodes) == 1 or not set(nodes) & set(bad)


def shown(rounds: list[list[Group]]) -> list[str]:
    return [" ".join(f"{group.sweep}:{','.join(map(str, group.nodes))}" for group in groups) for groups in rounds]


@pytest.mark.parametrize(
    ("nodes", "bad", "expected"),
    [
        (1, (), ["node:0"]),
        (2, (), ["node:0 node:1", "pair:0,1"]),
        (3, (), ["node:0 node:1 node:2", "pair:0,1", "pair:0,2", "ramp:0,1,2"]),
        (4, (), ["node:0 node:1 node:2 node:3", "pair:0,1 pair:2,3", "ramp:0,1,2,3"]),
        # The failed pair's nodes each get one that passed, and what is left is measured without the bad one.
        (4, (3,), ["node:0 node:1 node:2 node:3", "pair:0,1 pair:2,3", "pair:0,2 pair:1,3", "ramp:0,1,2"]),
        (2, (1,), ["node:0 node:1", "pair:0,1"]),
        # No pair passed: those in doubt are paired with each other.
        (4, (0, 2), ["node:0 node:1 node:2 node:3", "pair:0,1 pair:2,3", "pair:0,2 pair:1,3"]),
    ],
)
def test_rounds(nodes: int, bad: Collection[int], expected: list[str]) -> None:
    assert shown(sweep(nodes, without(bad))[0]) == expected


def test_a_ramp_doubles_up_to_all_nodes_and_ends_where_it_fails() -> None:
    assert [len(groups[0].nodes) for groups in sweep(11, without(()), ranks=1)[0][2:]] == [4, 8, 11]
    rounds, _ = sweep(16, lambda nodes: len(nodes) <= 4)
    assert [len(groups[0].nodes) for groups in rounds[2:]] == [4, 8]


def test_one_gpu_on_a_node_has_nothing_to_measure_by_itself() -> None:
    assert shown(sweep(2, without(()), ranks=1)[0]) == ["pair:0,1"]
    assert sweep(1, without(()), ranks=1)[0] == []


@pytest.mark.parametrize(
    ("nodes", "bad"),
    [
        (4, ()),
        (4, (3,)),
        (4, (0,)),
        (5, (4,)),
        (3, (2,)),
        (3, (0,)),
        (8, (2, 5)),
        (9, (0, 1, 8)),
        (8, (0, 3, 4, 6)),
        (64, (7, 8, 9, 63)),
    ],
)
def test_nodes_are_named_that_fail_with_two_partners_and_no_other(nodes: int, bad: tuple[int, ...]) -> None:
    _, done = sweep(nodes, without(bad))
    named = bad_nodes(range(nodes), done)
    assert tuple(named) == bad
    for node, groups in named.items():
        assert len({frozenset(group.nodes) for group in groups}) >= 2
        assert all(Outcome(group, False) in done and node in group.nodes for group in groups)


@pytest.mark.parametrize("nodes", [2, 3, 4, 7])
def test_where_no_pair_passes_it_is_no_single_node(nodes: int) -> None:
    rounds, done = sweep(nodes, lambda group: len(group) == 1)
    assert bad_nodes(range(nodes), done) == {}
    assert not any(group.sweep == "ramp" for groups in rounds for group in groups)


def test_one_link_that_is_bad_names_no_node() -> None:
    _, done = sweep(4, lambda nodes: nodes != (2, 3))
    assert bad_nodes(range(4), done) == {}


def test_a_node_that_met_two_bad_ones_first_is_not_named() -> None:
    """Nobody had passed by then; later pairs clear it, or leave it open."""
    done = [Outcome(Group("pair", pair), False) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))]
    assert bad_nodes(range(4), done) == {}


def test_a_node_is_named_by_itself_where_another_one_passes() -> None:
    _, done = sweep(4, lambda nodes: nodes != (2,))
    assert bad_nodes(range(4), done) == {2: (Group("node", (2,)),)}
    _, done = sweep(4, lambda nodes: len(nodes) > 1)
    assert bad_nodes(range(4), done) == {}


def test_what_was_measured_before_an_interruption_is_not_measured_again() -> None:
    _, done = sweep(7, without((3,)))
    for kept in range(len(done)):
        rest = done[:kept]
        while groups := next_round(range(7), 2, rest):
            rest = [*rest, *(Outcome(group, without((3,))(group.nodes)) for group in groups)]
        assert len({outcome.group for outcome in rest}) == len(rest)
        assert tuple(bad_nodes(range(7), rest)) == (3,)
