"""The matrices that ship: what they hold on a CPU, on an H200 and on an A100."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.rows import CAPABILITIES

from envbuild.catalog.catalog import Catalog, HostDistribution, Selection, select
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Device
from envbuild.certify.cases.case import Capabilities, Case, same_arithmetic
from envbuild.certify.cases.expansion import expansion
from envbuild.certify.cases.known_wrong import affected_cases, left_out
from envbuild.certify.cases.selection import chosen_cases, driver_of, without_known_wrong
from envbuild.certify.run.plan import sweep_of
from envbuild.lock.known_wrong import known_wrong_in
from envbuild.lock.lockfile import read_lock

CATALOG = Catalog.open(Path("/nonexistent"))
CPU, A100, H200, _ = CAPABILITIES
NAMES = CATALOG.names("matrices")
# Axes in whose cases final weights are compared; on the CPU without context and attention_backend.
AXES = {
    "data", "tensor", "sequence", "pipeline", "context", "expert", "micro_batch_size", "attention_backend", "nodes",
    "distributed_optimizer", "recompute", "resume_at", "virtual_pipeline", "overlap_grad_reduce",
    "overlap_param_gather", "bucket_size", "expert_tensor", "continue_in", "continue_nodes", "average_in_collective",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
}  # fmt: skip


def cases_of(name: str, capabilities: Capabilities) -> dict[str, Case]:
    return {case.id: case for case in expansion(CATALOG.matrix(name), name, capabilities).cases}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capabilities", CAPABILITIES, ids=["cpu", "a100", "h200", "b200"])
def test_shipped_matrix_expands_and_compares_something(name, capabilities):
    cases = cases_of(name, capabilities)
    assert any(not case.is_baseline for case in cases.values())
    assert all(cases[case.baseline_id].is_baseline for case in cases.values())


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, entry.target) for name in CATALOG.names("stacks") for entry in CATALOG.stack(name).builds],
)
def test_default_matrix_of_every_shipped_stack_and_target_has_cases_and_can_be_published(name, target):
    """A night locked, built, and could not certify; or it certified for hours, and could not publish."""
    stack = CATALOG.stack(name)
    selection = select(CATALOG, name, target, None, HostDistribution("debian", "12"))
    for driver in {stack.driver, *([stack.takeover.driver] if stack.takeover else [])}:
        lock = read_lock(data_root() / "lockfiles/mcore/debian12").lock.model_copy(update={"driver": driver})
        matrix = selection.matrix_for(driver)
        assert driver_of(selection, matrix, lock) == driver
        assert matrix in CATALOG.policy("default").matrices_for(selection.target.device)


def test_default_matrix_of_an_own_stack_is_one_that_the_default_policy_counts():
    own = CATALOG.stack("mcore").model_copy(update={"matrix": None, "gpu_matrix": None})
    for device in Device:
        assert own.matrix_for(device) in CATALOG.policy("default").matrices_for(device)
    named = own.model_copy(update={"matrix": "mine"})
    assert [named.matrix_for(device) for device in Device] == ["mine", "mine"]


def test_quick_has_a_case_that_must_agree_bit_for_bit():
    assert [case for case in cases_of("certify-quick", CPU).values() if same_arithmetic(case)] == [
        cases_of("certify-quick", CPU)["gpt-fp32-dp2-gb4"]
    ]


def axes_compared(cases: dict[str, Case]) -> set[str]:
    return {axis for case in cases.values() if case.compare_weights for axis in case.axes}


def test_full_compares_the_final_weights_for_at_least_one_case_of_each_axis():
    assert axes_compared(cases_of("certify-full", CPU)) == AXES - {"attention_backend"}
    assert axes_compared(cases_of("certify-full", H200)) == AXES | {
        *("moe_grouped_gemm", "num_distributed_optimizer_instances", "use_precision_aware_optimizer"),
        *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_fusion"),
        *("masked_softmax_fusion", "cuda_graph_impl"),
    }


def test_full_leaves_out_what_the_target_or_the_lock_cannot_do():
    matrix = CATALOG.matrix("certify-full")
    plain = Capabilities(device=Device.CUDA, sm=("80",), packages=frozenset({"transformer-engine"}))
    out = {case.id: case.why for case in expansion(matrix, "m", plain).left_out}
    assert {case.split("-")[1] for case in out if case.startswith("te-fp8")} == {"fp8"}
    assert "the target has SM 80" in out["te-fp8-baseline"]
    assert out["te-bf16-attn-flash"] == "it needs the package flash-attn, which the environment does not have"
    assert out["hybrid-bf16-cp2"] == "it needs the package mamba-ssm, which the environment does not have"
    assert {case.why for case in expansion(matrix, "m", CPU).left_out} == {"it is for device cuda"}
    assert out["te-bf16-dp2-do-oi2"] == "it needs the package einops, which the environment does not have"
    assert {case.why for case in expansion(matrix, "m", H200).left_out} == {"it is for device cpu"}


def test_sweep_is_for_gpus_and_for_more_than_one():
    matrix = CATALOG.matrix("certify-full")
    sweep = sweep_of(matrix, H200, 4)
    assert (sweep["ranks"], sweep["sizes_bytes"][0], sweep["floor_gigabytes_per_second"]) == (4, 2**26, None)
    assert sweep_of(matrix, H200, 1) is None
    assert sweep_of(matrix, CPU, 4) is None
    assert sweep_of(CATALOG.matrix("certify-quick"), H200, 4) is None


def _counted(matrix, base, target):
    """How many cases ``certify --print-cases`` prints for the shipped lock of stack mcore."""
    lock = read_lock(data_root() / "lockfiles" / "mcore" / base)
    conflicts = known_wrong_in(lock, CATALOG)
    cases = chosen_cases(
        CATALOG.matrix(matrix), matrix, Selection(CATALOG, "mcore", base, target), packages=lock.packages()
    )
    wrong = left_out(affected_cases(cases, CATALOG.matrix(matrix), conflicts), conflicts)
    return len(without_known_wrong(cases, wrong, ()))


def test_the_docs_have_the_numbers_of_cases():
    page = (data_root() / "docs/reference/certify.md").read_text()
    cpu, h200 = (
        {name: _counted(name, *where) for name in NAMES if name != "known-wrong"}
        for where in (("debian12", "cpu"), ("debian12-cu130", "h200"))
    )
    assert f"{cpu['certify-full']} cases on CPUs, {h200['certify-full']} for h200" in page
    assert cpu["certify-quick"] == h200["certify-quick"]
    assert f"| `certify-quick` | {cpu['certify-quick']} cases " in page
    assert "seven on GPUs, six on CPUs" in page
    assert (h200["recipe-layouts"], cpu["recipe-layouts"]) == (7, 6)
