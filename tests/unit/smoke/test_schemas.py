"""Plans are refused that lack a key or have another one, and every line written is of its declared type."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from helpers.smoke_plans import Document
from unit.smoke.conftest import Done

from envbuild_smoke.plan import models
from envbuild_smoke.plan.architecture import Moe
from envbuild_smoke.plan.json_reader import as_json, read_object
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.results import KINDS, Status


def everything(document: Document) -> Document:
    """The plan with each object in it that may be null."""
    document.update(device="cuda", gpu={"sm": ["90"]})
    document["bandwidth"] = {"ranks": 2, "sizes_bytes": [1024], "floor_gigabytes_per_second": 1.5}
    mamba = {"hybrid_override_pattern": "M*-M", "state_dim": 16, "head_dim": 16, "num_groups": 1}
    # Without what a document may lack.
    losses = {"router_load_balancing_type", "aux_loss_coeff", "z_loss_coeff"}
    experts = as_json(Moe(num_experts=4, router_topk=2))
    moe = {name: value for name, value in experts.items() if name not in losses}
    document["models"]["gpt"].update(moe=moe, mamba=mamba)
    document["cases"][1].update(resume_at=2, compare_weights=True)
    return document


def objects_in(value: object) -> list[Document]:
    if isinstance(value, dict):
        return [value, *[document for entry in value.values() for document in objects_in(entry)]]
    return [document for entry in value for document in objects_in(entry)] if isinstance(value, list) else []


def test_plan_is_refused_without_a_key_with_another_and_with_a_value_of_another_kind(document: Document) -> None:
    everything(document)
    free = (document["subject"], document["expected_versions"], document["models"])
    for part in objects_in(document):
        if any(part is each for each in free):
            continue
        before = dict(part)
        lost = [{name: value for name, value in before.items() if name != key} for key in before]
        for changed in ({**before, "surplus": 1}, *lost):
            part.clear()
            part.update(changed)
            assert_refused(document)
        for key, value in before.items():
            for wrong in ([{}], -1, "no such" if isinstance(value, str) else "1"):
                part.clear()
                part.update({**before, key: wrong})
                assert_refused(document)
        part.clear()
        part.update(before)
    assert len(parse_plan(json.dumps(document).encode()).cases) == 2


def assert_refused(document: Document) -> None:
    with pytest.raises(models.PlanError):
        parse_plan(json.dumps(document).encode())


def test_every_line_written_is_of_its_type(one_by_one: Done, at_once: Done) -> None:
    lines = [*one_by_one.lines, *at_once.lines]
    for line in lines:
        read_object(KINDS[line["type"]], line, line["type"])
    assert {line["type"] for line in lines} == {"run", "case", "bandwidth", "end"}
    statuses = {line["status"] for line in lines if line["type"] == "case"}
    assert statuses == set(get_args(Status))
