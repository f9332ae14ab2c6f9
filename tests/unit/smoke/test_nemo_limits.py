"""What driver nemo decides without NeMo: which cases it trains, on which GPUs, and from which log."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from helpers.smoke_plans import case_document, plan_document

from envbuild_smoke.drivers.nemo.limits import GRAD_NORM, LOSS, SECONDS, gpus_of, step_of
from envbuild_smoke.drivers.parts import refuse_unsupported
from envbuild_smoke.plan.architecture import Moe
from envbuild_smoke.plan.json_reader import as_json
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.results import Step

LOGGED = {LOSS: 5.5, GRAD_NORM: 0.97, SECONDS: 0.25, "consumed_samples": 8.0}


def plan_of(model: dict[str, Any], part: str, **values: object) -> Plan:
    case = {**case_document("qwen-baseline"), "driver": "nemo"}
    (case[part] if part else case).update(values)
    document = plan_document(case)
    document["models"]["gpt"].update({"recipe": "qwen25_7b", **model})
    return parse_plan(json.dumps(document).encode())


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("own", [0, 2, 3])
def test_own_gpu_is_in_the_ranks_place(rank, own):
    gpus = gpus_of(rank, 3, own, visible=4)
    assert gpus[rank] == own
    assert len(set(gpus)) == 3
    assert set(gpus) <= {0, 1, 2, 3}


def test_one_rank_has_its_gpu_alone():
    assert gpus_of(0, 1, 3, visible=4) == [3]


def test_case_that_recipes_have_is_accepted():
    plan = plan_of({}, "settings", distributed_optimizer=False)
    assert refuse_unsupported(plan.cases[0], plan.models["gpt"]) is None


@pytest.mark.parametrize(
    ("model", "part", "values", "named"),
    [
        ({"recipe": None}, "", {}, "model.recipe"),
        ({"moe": as_json(Moe(num_experts=4, router_topk=2))}, "", {}, "moe and mamba"),
        ({}, "training", {"loss_mask": "uneven"}, "loss_mask"),
        ({}, "training", {"packed": True}, "packed"),
        ({}, "training", {"calculate_per_token_loss": True}, "calculate_per_token_loss"),
        ({}, "training", {"calculate_per_token_loss": True, "finetune": "sft"}, "finetune"),
        ({}, "training", {"decoupled_lr": 1e-4}, "decoupled_lr"),
        ({}, "settings", {"num_distributed_optimizer_instances": 2}, "num_distributed_optimizer_instances"),
    ],
)
def test_case_that_the_driver_does_not_train_is_refused(model, part, values, named):
    plan = plan_of(model, part, **values)
    with pytest.raises(ValueError, match=named):
        refuse_unsupported(plan.cases[0], plan.models["gpt"])


def test_fine_tuning_is_for_driver_bridge_and_packs_two_samples_into_a_row():
    own = {"calculate_per_token_loss": True, "finetune": "lora", "packed": True, "global_batch_size": 8}
    plan = plan_of({}, "training", **own, micro_batch_size=1)
    case = replace(plan.cases[0], driver="bridge")
    assert refuse_unsupported(case, plan.models["gpt"]) is None
    assert (case.training.rows, case.training.microbatches(case.layout)) == (4, 4)
    unpacked = replace(case.training, packed=False)
    assert (unpacked.rows, unpacked.microbatches(case.layout)) == (8, 8)
    by_batch = replace(case, training=replace(case.training, calculate_per_token_loss=False))
    with pytest.raises(ValueError, match="calculate_per_token_loss"):
        refuse_unsupported(by_batch, plan.models["gpt"])


def test_step_is_what_nemo_has_logged():
    assert step_of(LOGGED, 3) == Step(step=3, loss=5.5, grad_norm=0.97, seconds=0.25)


@pytest.mark.parametrize("name", [LOSS, GRAD_NORM, SECONDS])
def test_number_that_nemo_did_not_log_is_an_error(name):
    with pytest.raises(KeyError, match=f"step 2: NeMo logged no {name}; it logged consumed_samples"):
        step_of({key: value for key, value in LOGGED.items() if key != name}, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradient_norm_that_is_not_finite_ends_the_case(value):
    with pytest.raises(FloatingPointError, match="step 2: grad_norm is"):
        step_of({**LOGGED, GRAD_NORM: value}, 2)
