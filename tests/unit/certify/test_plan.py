"""The plan is all that the runner gets; its key changes with everything that decides a verdict."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from unit.certify.plans import CASES, CPU, MATRIX, SUBJECT

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.cluster import Floors
from envbuild.catalog.fields import Device
from envbuild.catalog.matrix import BandwidthSweep, MatrixRow
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.expansion import expand
from envbuild.certify.run import plan as plan_module
from envbuild.certify.run.plan import (
    TRANSPORT_BYTES,
    Environment,
    Network,
    Subject,
    certification_key,
    make_plan,
    sweep_of,
)
from envbuild.core.digests import sha256_bytes
from envbuild.launch.launchers import Placement
from envbuild_smoke import drivers
from envbuild_smoke.plan import axes
from envbuild_smoke.plan.reader import parse_plan

H200 = Capabilities(device=Device.CUDA, sm=("90",))


def plan(*, matrix=MATRIX, cases=CASES, subject=SUBJECT, repeats=1, **environment: object) -> dict:
    """A plan; ``environment`` are fields of what it runs in."""
    usual = {"capabilities": CPU, "driver": Driver.MCORE, "versions": {"torch": "2.13.0+cpu"}, "modules": ("torch",)}
    return make_plan(subject, Environment(**usual | environment), matrix, cases, repeats)  # type: ignore[arg-type]


def with_sweep(**changes: object):
    """The matrix with a bandwidth sweep on the CPU."""
    sweep = BandwidthSweep.model_validate({"devices": ("cpu",), "sizes_bytes": (1024, 2048)} | changes)
    return MATRIX.model_copy(update={"bandwidth": sweep})


def test_plan_lists_the_packages_of_the_base():
    brought = plan(versions={"megatron-core": "0.16.1"}, provided=("torch",))
    assert parse_plan(json.dumps(brought).encode()).provided_packages == ("torch",)
    assert parse_plan(json.dumps(plan()).encode()).provided_packages == ()


def test_drivers_are_those_that_smoke_has():
    training = [driver.value for driver in Driver if driver is not Driver.NONE]
    assert training == list(get_args(axes.Driver)) == list(drivers.MODULES)


def test_plan_of_a_case():
    cases = {case["id"]: case for case in plan()["cases"]}
    interleaved, baseline = cases["gpt-fp32-pp2-vp2"], cases["gpt-fp32-baseline"]
    named = {"baseline": "gpt-fp32-baseline", "driver": "mcore", "model": "gpt", "world_size": 2, "perturbed_runs": 0}
    assert named.items() <= interleaved.items()
    assert (interleaved["layout"]["pipeline"], interleaved["training"]) == (2, vars(MATRIX.training))
    batched = [cases[name]["settings"]["batch_p2p_comm"] for name in ("gpt-fp32-pp2-vp2", "gpt-fp32-pp2")]
    assert batched == [False, True]
    assert (baseline["baseline"], baseline["compare_reference"], baseline["perturbed_runs"]) == (None, True, 4)


def test_plan_holds_only_the_models_in_use():
    matrix = MATRIX.model_copy(update={"models": {**MATRIX.models, "unused": MATRIX.models["gpt"]}})
    assert set(plan(matrix=matrix)["models"]) == {"gpt"}


def test_plan_names_the_gpus():
    assert (plan()["device"], plan()["gpu"]) == ("cpu", None)
    there = plan(capabilities=H200)
    assert (there["device"], there["gpu"]) == ("cuda", {"sm": ["90"]})
    parse_plan(json.dumps(there).encode())


def test_plan_with_a_sweep_and_repeats_is_one_of_smoke_s():
    swept = with_sweep(floor_gigabytes_per_second=100.0)
    read = parse_plan(json.dumps(plan(matrix=swept, repeats=3)).encode())
    assert read.bandwidth is not None
    assert (read.repeats, read.bandwidth.ranks, read.bandwidth.sizes_bytes) == (3, 4, (1024, 2048))
    assert read.bandwidth.floor_gigabytes_per_second == 100.0
    assert read.expected_modules == ("torch",)


def network_of(matrix=MATRIX, ranks: int = 8, **fields: object):
    network = Network(**{"transport": "NET/IB", "floors": FLOORS, **fields})  # type: ignore[arg-type]
    return sweep_of(matrix, CPU, ranks, network)


FLOORS = Floors.model_validate({"node": {"all_reduce": 300}, "network": {"all_gather": 180}})
BETWEEN = {"node_floors": {"all_reduce": 300}, "network_floors": {"all_gather": 180}}


def test_sweeps_have_the_floors_of_the_cluster():
    swept = {"sizes_bytes": [1024, 2048], "floor_gigabytes_per_second": None}
    assert network_of(with_sweep(), nodes=2) == {"ranks": 8, **swept, **BETWEEN}
    alone = {**BETWEEN, "network_floors": {}}
    assert network_of(with_sweep()) == {"ranks": 8, **swept, **alone}
    # One GPU on each of two nodes has a network, and one GPU has none.
    assert network_of(with_sweep(), 1, nodes=2)["ranks"] == 1
    assert network_of(with_sweep(), 1) is None


def test_a_transport_is_measured_whatever_the_matrix():
    small = {"sizes_bytes": [TRANSPORT_BYTES], "floor_gigabytes_per_second": None}
    assert network_of(nodes=2) == {"ranks": 8, **small}
    assert network_of(nodes=2, transport=None) is None
    assert network_of() is None


def test_ranks_of_a_sweep_are_those_of_a_node():
    halves = tuple(dataclasses.replace(case, nodes=2) if case.slots > 2 else case for case in CASES)
    environment = Environment(capabilities=CPU, driver=Driver.MCORE)
    ranks = [
        make_plan(SUBJECT, environment, with_sweep(), cases, network=Network(nodes=2))["bandwidth"]["ranks"]  # type: ignore[index, call-overload]
        for cases in (CASES, halves)
    ]
    assert ranks == [4, 2]


def test_plan_expects_a_transport_between_nodes_alone():
    there = {"transport": "NET/IB", "floors": FLOORS}
    environment = Environment(capabilities=CPU, driver=Driver.MCORE)
    for nodes, expected in ((1, None), (2, "NET/IB")):
        made = make_plan(SUBJECT, environment, with_sweep(), CASES, network=Network(nodes=nodes, **there))
        read = parse_plan(json.dumps(made).encode())
        assert (read.transport, read.nodes) == (expected, nodes)
        assert read.bandwidth.node_floors.all_reduce == 300.0
        assert read.bandwidth.network_floors.all_gather == (180.0 if nodes == 2 else None)


def test_plan_names_only_the_digests_that_are_certified():
    assert plan()["subject"] == SUBJECT.as_json()
    assert (plan()["subject"]["form"], plan()["subject"]["launcher"]) == ("sqsh", "bwrap")
    alone = Subject(name="n", stack="s", base="b", target="t", lock_digest="l", place=Placement.parse("venv"))
    assert alone.as_json() == {
        "stack": "s",
        "base": "b",
        "target": "t",
        "form": "none",
        "launcher": "venv",
        "lock_digest": "l",
    }


def key(matrix=MATRIX, smoke: str = "sha256:smoke", scope: str = "quick", **changes: object) -> str:
    return certification_key(plan(matrix=matrix, **changes), matrix, smoke, scope=scope, conflicts={})


def test_key_does_not_depend_on_the_nonce():
    assert plan()["nonce"] != plan()["nonce"]
    assert key() == key()


def subject(**changes: Any) -> Subject:
    return dataclasses.replace(SUBJECT, **changes)


def matrix(**changes: object):
    return MATRIX.model_copy(update=changes)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"subject": subject(**{field: sha256_bytes(b"other")})}
            for field in sorted(set(SUBJECT.as_json()) - {"form", "launcher"})
        ),
        {"subject": subject(place=Placement.parse("venv"))},
        {"subject": subject(sqsh_digest=None)},
        {"capabilities": H200},
        {"capabilities": Capabilities(device=Device.CUDA, sm=("100",))},
        {"repeats": 2},
        {"cases": CASES[:-1]},
        {"versions": {"torch": "2.13.1+cpu"}},
        {"modules": ()},
        {"smoke": "sha256:other"},
        {"matrix": matrix(time_limit_seconds=1)},
        {"cases": expand(matrix(training=replace(MATRIX.training, seed=1)), "m", CPU)},
        {"matrix": matrix(models={"gpt": MATRIX.models["gpt"].model_copy(update={"num_layers": 8})})},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_key_changes_with_each_input(changes):
    assert key(**changes) != key()


@pytest.mark.parametrize("name", ["loss_relative", "grad_norm_relative", "weights_relative"])
def test_key_changes_with_the_tolerance(name):
    changed = MATRIX.tolerance["fp32"].model_copy(update={name: 2e-3})
    assert key(matrix=matrix(tolerance={"fp32": changed})) != key()


def test_planned_case_has_all_settings_of_its_row():
    row = MatrixRow.model_validate(
        {
            "model": "gpt",
            "data": 2,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "recompute": "full",
            "distributed_optimizer": True,
            "resume_at": 2,
            "compare_weights": True,
        }
    )
    baseline = MatrixRow(model="gpt", global_batch_size=4)
    wider = matrix(cases=(baseline, row))
    (_, case) = plan(matrix=wider, cases=expand(wider, "m", CPU))["cases"]
    assert case["id"] == "gpt-fp32-dp2-gb4-mb1-do-rc-full-resume2"
    assert case["baseline"] == "gpt-fp32-baseline-gb4"
    assert case["training"] == vars(MATRIX.training) | {"micro_batch_size": 1, "global_batch_size": 4}
    assert (case["settings"]["distributed_optimizer"], case["settings"]["recompute"]) == (True, "full")
    assert (case["resume_at"], case["compare_weights"]) == (2, True)


def test_key_changes_with_the_sweep_the_judge_and_the_scope(monkeypatch):
    sweeps = [with_sweep(), with_sweep(sizes_bytes=(1024,)), with_sweep(floor_gigabytes_per_second=10.0)]
    keys = {key(), *(key(matrix=swept) for swept in sweeps), key(scope="part of quick")}
    monkeypatch.setattr(plan_module, "JUDGE_VERSION", plan_module.JUDGE_VERSION + 1)
    assert len({*keys, key()}) == 6


def test_plan_of_a_recipe_names_it_and_has_no_reference():
    matrix = Catalog.open(Path("/nonexistent")).matrix("nemo-recipes")
    cases = expand(matrix, "nemo-recipes", CPU)
    planned = plan(matrix=matrix, cases=cases, driver=Driver.NEMO)
    assert {model["recipe"] for model in planned["models"].values()} == {"qwen25_7b"}
    assert not any(case["compare_reference"] for case in planned["cases"])
    assert parse_plan(json.dumps(planned).encode()).models["qwen25-7b-local"].recipe == "qwen25_7b"
