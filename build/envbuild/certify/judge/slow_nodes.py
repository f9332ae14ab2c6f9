"""Nodes that compute slower than others, by the time that ranks take until the first collective of a step.

After it ranks wait for each other, and a slow one makes all slow.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from envbuild.certify.judge.results import Results
from envbuild.certify.models import Problem
from envbuild_smoke.plan.models import Case, Plan

# Than the median: what people drain nodes for, see docs/guides/clusters.md.
SLOWER = 1.1
# The first step compiles and fills caches.
FIRST_STEP = 1
# With how many sets of other nodes it has to be slow; on its own counts as one.
COMPANIES = 2


def slow_node_problems(plan: Plan, results: Results) -> Iterator[Problem]:
    """Nodes that are the slowest by more than a tenth in most steps, and again with other nodes."""
    # On CPUs other processes of the machine decide.
    if plan.nodes == 1 or plan.device == "cpu":
        return
    # By node and the nodes with it: how many steps it was slow in, of how many, and how slow.
    slow: dict[int, dict[frozenset[int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in plan.cases:
        for stage in range(case.layout.pipeline):
            for node, company, slower in _steps(case, stage, plan, results):
                slow[node][company].append(slower)
    for node, companies in sorted(slow.items()):
        times = [each for each in companies.values() if sum(slower > SLOWER for slower in each) * 2 > len(each)]
        if len(times) >= COMPANIES:
            steps = [slower for each in times for slower in each]
            count = sum(slower > SLOWER for slower in steps)
            text = f"is the slowest in {count} of {len(steps)} steps, with {len(times)} sets of other nodes: "
            text += f"its ranks take {statistics.median(steps) - 1:.0%} longer than the median until they communicate"
            yield Problem(check="node-slow", text=f"{results.name_of(node)} {text}")


def _steps(case: Case, stage: int, plan: Plan, results: Results) -> Iterator[tuple[int, frozenset[int], float]]:
    """By step and run of a case: a node, the nodes with it, and how slow it is; 0 where another one is slower.

    Ranks of one pipeline stage do the same work, in all runs of a case, as long as it is in its first layout.
    """
    first, ranks_of_all = case.parts[0], case.layout.world_size
    each, on_stage = first.ranks_on_node, ranks_of_all // case.layout.pipeline
    lines = [results.case(case.id, repeat) for repeat in plan.runs_of(case)]
    for step in range(FIRST_STEP, first.until):
        times: dict[tuple[int, frozenset[int]], list[float]] = defaultdict(list)
        for line in lines:
            if line is None or len(line.compute_seconds) != ranks_of_all or len(line.nodes) != case.most_nodes:
                continue
            nodes = line.nodes[: first.nodes]
            for rank in range(stage * on_stage, (stage + 1) * on_stage):
                node, seconds = nodes[rank // each], line.compute_seconds[rank]
                if step < len(seconds):
                    times[node, frozenset(nodes) - {node}].append(seconds[step])
        if len({node for node, _ in times}) < 2:
            continue
        median = statistics.median(time for ranks in times.values() for time in ranks)
        slowest = max(times, key=lambda key: max(times[key]))[0]
        for (node, company), ranks in times.items():
            yield node, company, max(ranks) / median if node == slowest and median > 0 else 0.0
