"""Which sweeps of a run come next, from those that are done. Pure: no processes, no clock.

First every node by itself, all side by side. Then pairs of nodes, each node in one; a node whose pairs all failed is
paired again, with one that has passed where there is any, until it passes or has failed with two. Then 4, 8, ... and
all of the nodes that passed, up to the first that fails. Each step is a round of sweeps that run at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from envbuild_smoke.results import Sweep

# A pair that fails says nothing of which of the two it is.
PARTNERS_TO_FAIL_WITH = 2


@dataclass(frozen=True, order=True)
class Group:
    """Nodes whose ranks measure together."""

    sweep: Sweep
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """A sweep that is done, and whether it reached what it had to."""

    group: Group
    passed: bool


@dataclass
class _Partners:
    """With whom a node has passed, and failed."""

    passed: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    def is_settled(self, good: Sequence[int]) -> bool:
        """Whether the node passed, or failed with two: of these one has to be good where there are such nodes."""
        enough = len(self.failed) >= PARTNERS_TO_FAIL_WITH and (not good or not self.failed.isdisjoint(good))
        return bool(self.passed) or enough


def next_round(nodes: Sequence[int], ranks: int, done: Sequence[Outcome]) -> tuple[Group, ...]:
    """Return the sweeps that come next; none when all are done. `ranks` are those of a node."""
    measured = {outcome.group for outcome in done}
    alone = [Group("node", (node,)) for node in nodes] if ranks > 1 else []
    if missing := [group for group in alone if group not in measured]:
        return tuple(missing)
    partners = _partners(nodes, done)
    unpaired = [node for node in nodes if partners[node] == _Partners()]
    if len(unpaired) > 1:
        return tuple(Group("pair", pair) for pair in zip(unpaired[::2], unpaired[1::2], strict=False))
    return _paired_again(partners) or _ramp(partners, done)


def bad_nodes(nodes: Sequence[int], done: Sequence[Outcome]) -> dict[int, tuple[Group, ...]]:
    """Return the nodes that are bad, with the sweeps that show it.

    By itself, where another node passed that; or with two partners and in no pair, where one of them passed with
    another node. Where nobody passed, it is no single node.
    """
    alone = {outcome.group: outcome.passed for outcome in done if outcome.group.sweep == "node"}
    bad = {group.nodes[0]: (group,) for group, passed in alone.items() if not passed and any(alone.values())}
    partners = _partners(nodes, done)
    good = [node for node, met in partners.items() if met.passed]
    for node, met in partners.items():
        if good and not met.passed and met.is_settled(good):
            bad[node] = (*bad.get(node, ()), *(_pair(node, partner) for partner in sorted(met.failed)))
    return dict(sorted(bad.items()))


def _is_pair(outcome: Outcome) -> bool:
    return outcome.group.sweep == "pair"


def _pair(node: int, partner: int) -> Group:
    return Group("pair", (min(node, partner), max(node, partner)))


def _partners(nodes: Sequence[int], done: Sequence[Outcome]) -> dict[int, _Partners]:
    partners = {node: _Partners() for node in nodes}
    for outcome in filter(_is_pair, done):
        one, other = outcome.group.nodes
        for node, partner in ((one, other), (other, one)):
            met = partners.setdefault(node, _Partners())
            (met.passed if outcome.passed else met.failed).add(partner)
    return partners


def _paired_again(partners: dict[int, _Partners]) -> tuple[Group, ...]:
    """Each node that is in doubt with one that passed; with another in doubt only where none has passed at all."""
    good = [node for node, met in partners.items() if met.passed]
    suspects = [node for node, met in partners.items() if not met.is_settled(good)]
    free = good or suspects
    pairs: list[Group] = []
    for node in suspects:
        taken = {each for group in pairs for each in group.nodes}
        partner = next((each for each in free if each not in {node, *taken, *partners[node].failed}), None)
        if node not in taken and partner is not None:
            pairs.append(_pair(node, partner))
    return tuple(pairs)


def _ramp(partners: dict[int, _Partners], done: Sequence[Outcome]) -> tuple[Group, ...]:
    """The smallest that is not done: a larger one would fail by the same link."""
    good = [node for node, met in partners.items() if met.passed]
    ramp = {outcome.group: outcome.passed for outcome in done if outcome.group.sweep == "ramp"}
    if not all(ramp.values()):
        return ()
    # Two nodes are a pair.
    sizes = [2**power for power in range(2, len(good).bit_length()) if 2**power < len(good)]
    sizes += [len(good)] if len(good) > 2 else []
    return next(((group,) for size in sizes if (group := Group("ramp", tuple(good[:size]))) not in ramp), ())
