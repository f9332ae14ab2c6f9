"""Which node runs which case: what names a node that computes otherwise runs on each, and all else once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.certify.plans import SUBJECT

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.expansion import expand
from envbuild.certify.run.home_nodes import home_nodes
from envbuild.certify.run.plan import Environment, Network, make_plan
from envbuild_smoke.plan.reader import parse_plan

CATALOG = Catalog.open(Path("/nonexistent"))
MACHINES = {
    "cpu": Capabilities(device=Device.CPU),
    "h200": Capabilities(
        device=Device.CUDA, sm=("90",), packages=frozenset({"transformer-engine", "mamba-ssm", "causal-conv1d"})
    ),
}
RUNS = [
    (name, machine, nodes) for name in ("certify-quick", "certify-full") for machine in MACHINES for nodes in (2, 5)
]


def cases_of(name: str, machine: str, nodes: int) -> tuple[Case, ...]:
    return tuple(case for case in expand(CATALOG.matrix(name), name, MACHINES[machine]) if case.most_nodes <= nodes)


def test_one_node_runs_all():
    assert set(home_nodes(cases_of("certify-quick", "cpu", 1), 1).values()) == {None}


@pytest.mark.parametrize(("name", "machine", "nodes"), RUNS)
def test_every_node_runs_of_each_model_and_precision_a_baseline_and_the_case_of_most_processes(name, machine, nodes):
    cases = cases_of(name, machine, nodes)
    homes = home_nodes(cases, nodes)
    arithmetics = {(case.model, case.precision) for case in cases}
    everywhere = [case for case in cases if homes[case.id] is None and case.most_nodes == 1]
    assert {(case.model, case.precision) for case in everywhere if case.is_baseline} == arithmetics
    for model, precision in arithmetics:
        own = [case for case in everywhere if (case.model, case.precision) == (model, precision)]
        (first, *_) = [case for case in own if case.is_baseline]
        alone = [case for case in cases if case.compared_with == first.id and case.most_nodes == 1]
        most = max((case.slots for case in alone), default=0)
        assert [case.slots for case in own if case.compared_with == first.id] == [most][: len(alone)]


@pytest.mark.parametrize(("name", "machine", "nodes"), RUNS)
def test_all_else_runs_once_and_where_its_baseline_runs(name, machine, nodes):
    cases = cases_of(name, machine, nodes)
    environment = Environment(capabilities=MACHINES[machine], driver=Driver.MCORE)
    made = make_plan(SUBJECT, environment, CATALOG.matrix(name), cases, network=Network(nodes=nodes))
    # The runner refuses a plan in which a case has no baseline on its node.
    plan = parse_plan(json.dumps(made).encode())
    homes = home_nodes(cases, nodes)
    assert {case.id: case.home_node for case in plan.cases} == homes
    once = [case for case in plan.cases if homes[case.id] is not None]
    assert all(len(plan.runs_of(case)) == 1 for case in once)
    assert {plan.nodes_of(case, 1 + case.home_node) for case in once if case.most_nodes == nodes} <= {
        tuple((first + step) % nodes for step in range(nodes)) for first in range(nodes)
    }
    # Cases over some nodes have each node with each of its neighbours.
    some = [case for case in plan.cases if 1 < case.most_nodes < nodes]
    assert all(len(plan.runs_of(case)) == nodes for case in some)


@pytest.mark.parametrize("machine", MACHINES)
def test_work_is_split_evenly(machine):
    cases = cases_of("certify-full", machine, 2)
    homes = home_nodes(cases, 2)
    alone = [case for case in cases if case.most_nodes == 1]
    work = [sum(case.slots for case in alone if homes[case.id] == node) for node in (0, 1)]
    assert max(work) < 1.2 * min(work)
