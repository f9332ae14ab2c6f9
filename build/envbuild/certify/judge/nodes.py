"""Nodes of a run that are not as the others: in what they run, in their clocks, and in what they compute."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from envbuild.catalog.matrix import Matrix
from envbuild.certify.judge.bands import Bands, GradientBands, compare_gradients, spread_of
from envbuild.certify.judge.numbers import off_by, relative_difference
from envbuild.certify.judge.results import Results
from envbuild.certify.models import Problem
from envbuild_smoke.node_differences import node_differences
from envbuild_smoke.plan.models import Case, Plan
from envbuild_smoke.results import CaseLine

# Nodes that are synchronised are apart by milliseconds; one that is so far off is not, and its logs, files and
# credentials have wrong times.
LARGEST_CLOCK_SECONDS = 5.0
# Of one node's differences; the results have all.
MOST_DIFFERENCES = 5


def node_problems(plan: Plan, results: Results) -> Iterator[Problem]:
    """Where a node does not run what node 0 runs, on the same GPUs, or did not report what it runs."""
    reported = {0, *(line.node for line in results.nodes)}
    for node in range(plan.nodes):
        if node not in reported:
            yield Problem(check="nodes", text=f"node {node} did not report what runs there: it was lost, or left out")
    for line in results.nodes:
        differences = list(node_differences(line, results.run))
        if abs(line.clock_ahead_seconds) - line.clock_error_seconds > LARGEST_CLOCK_SECONDS:
            way = "ahead of" if line.clock_ahead_seconds > 0 else "behind"
            differences.append(f"its clock is {abs(line.clock_ahead_seconds):.0f} s {way} node 0's")
        if differences:
            more = len(differences) - MOST_DIFFERENCES
            text = "; ".join(differences[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
            yield Problem(check="nodes", text=f"{results.name_of(line.node)} is not as node 0: {text}")


def number_problems(matrix: Matrix, plan: Plan, results: Results) -> Iterator[Problem]:
    """Where cases that all nodes ran have other numbers on one of them than on the others, beyond their bands."""
    by_all = [case for case in plan.cases if case.most_nodes == 1 and case.home_node is None]
    off: dict[int, list[str]] = {}
    for case in by_all if plan.nodes > 1 else ():
        for first in range(1, plan.nodes * plan.repeats + 1, plan.nodes):
            lines = {node: results.case(case.id, first + node) for node in range(plan.nodes)}
            whole = {node: line for node, line in lines.items() if line is not None and line.status == "completed"}
            measuring = results.measuring(plan.case(case.baseline or case.id), first, plan)
            if measuring and (bands := _bands(case, matrix, plan, measuring)):
                for node, text in {**_gradients_off(measuring, whole), **_off(case, bands, whole)}.items():
                    off.setdefault(node, []).append(f"{case.id}, {text}")
    for node, texts in sorted(off.items()):
        others = "the other node, and either may be wrong" if plan.nodes == 2 else "the other nodes"
        more = f"; so do {len(texts) - 1} more" if len(texts) > 1 else ""
        text = f"{results.name_of(node)} computes other numbers than {others}: {texts[0]}{more}"
        yield Problem(check="node-numbers", text=text)


def _bands(case: Case, matrix: Matrix, plan: Plan, baseline: CaseLine) -> Bands | None:
    """Those that the case's baseline measured; None where it did not."""
    spread = spread_of(baseline, plan.case(baseline.case).perturbed_runs)
    return None if spread is None else Bands(spread, matrix.tolerance[case.precision])


def _gradients_off(baseline: CaseLine, lines: Mapping[int, CaseLine]) -> dict[int, str]:
    """By node: whose gradients of the first step are not those of the others. Of two nodes both are off."""
    if len(lines) < 2:
        return {}
    bands = GradientBands.measured(baseline)
    # Any will do to compare with: where most differ from it, it is the one that is off.
    first, *others = lines
    texts = {
        node: problems[0].text
        for node in others
        if (problems := compare_gradients(lines[node], lines[first], bands)[1])
    }
    own = {first: next(iter(texts.values()))} if texts else {}
    most = len(texts) * 2 - len(lines)
    return own if most > 0 else texts if most < 0 else texts | own


def _off(case: Case, bands: Bands, lines: Mapping[int, CaseLine]) -> dict[int, str]:
    """By node that is off from the middle one: the first step in which it is. Of two nodes both are."""
    texts: dict[int, str] = {}
    for index in range(case.training.steps):
        for name in ("loss", "grad_norm"):
            values = {
                node: value
                for node, line in lines.items()
                if index < len(line.steps) and (value := getattr(line.steps[index], name)) is not None
            }
            if len(values) < 2:
                continue
            middle, limit = statistics.median_low(values.values()), bands.of_step(name, index)
            wrong = [node for node, value in values.items() if not relative_difference(middle, value) <= limit]
            # Of two, either may be the wrong one.
            for node in values if wrong and len(values) == 2 else wrong:
                other = next((value for value in values.values() if value != values[node]), middle)
                expected = other if len(values) == 2 else middle
                texts.setdefault(node, f"step {index + 1}: {name} {off_by(expected, values[node], limit)}")
    return texts
