"""Which node of a run trains which case: each node what shows that it computes as the others, and one node the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from envbuild.certify.cases.case import Case


def home_nodes(cases: Sequence[Case], nodes: int) -> dict[str, int | None]:
    """The home node of each case, by ID; None where every node runs it.

    Cases of a baseline that one node alone runs are at home there, too: they load its weights.
    """
    homes: dict[str, int | None] = {case.id: None for case in cases}
    if nodes == 1:
        return homes
    everywhere = set(_everywhere(cases, nodes))
    # Node 0 has to measure the bands of what all nodes run: on 4 H100 a baseline that does takes as long as a process
    # of another case, and trains five times.
    measured = sum(case.is_baseline and case.id in everywhere for case in cases)
    load = [measured, *[0] * (nodes - 1)]
    groups: dict[str, list[Case]] = {}
    for case in cases:
        if case.id not in everywhere:
            groups.setdefault(case.id if case.baseline_id in everywhere else case.baseline_id, []).append(case)
    # One over all nodes keeps none busier than another.
    weights = {name: sum(case.slots for case in group if case.most_nodes == 1) for name, group in groups.items()}
    for name in sorted(groups, key=lambda name: weights[name], reverse=True):
        node = load.index(min(load)) if weights[name] else 0
        load[node] += weights[name]
        homes.update(dict.fromkeys((case.id for case in groups[name]), node))
    return homes


def _everywhere(cases: Sequence[Case], nodes: int) -> Iterator[str]:
    """The cases that every node runs.

    Of each model and precision they are the first baseline and, of its cases within a node, the one of most processes:
    other cases use the same kernels. Cases over some of the nodes have every node once with each neighbour.
    """
    first: dict[tuple[str, str], Case] = {}
    for case in cases:
        if case.is_baseline:
            first.setdefault((case.model, case.precision), case)
    for baseline in first.values():
        yield baseline.id
        own = [case for case in cases if case.compared_with == baseline.id and case.most_nodes == 1]
        if own:
            yield max(own, key=lambda case: case.slots).id
    for case in cases:
        if 1 < case.most_nodes < nodes:
            yield from (case.id, case.baseline_id)
