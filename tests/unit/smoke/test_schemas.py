"""Schemas and code agree: the same plans are refused, and every line written is valid."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
from helpers.smoke_plans import Document
from unit.smoke.conftest import Done

from envbuild_smoke.plan import models
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.run import results

SCHEMAS = Path(models.__file__).parents[1] / "schemas"


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / name).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_schema_names_are_those_in_the_code() -> None:
    assert (
        json.loads((SCHEMAS / "plan.schema.json").read_text())["$id"]
        == get_args(models.Plan.__annotations__["schema"])[0]
    )
    assert json.loads((SCHEMAS / "result.schema.json").read_text())["$id"] == results.SCHEMA


def everything(document: Document) -> Document:
    """The plan with each object in it that may be null."""
    document.update(device="cuda", gpu={"sm": ["90"]})
    document["bandwidth"] = {"ranks": 2, "sizes_bytes": [1024], "floor_gigabytes_per_second": 1.5}
    mamba = {"hybrid_override_pattern": "M*-M", "state_dim": 16, "head_dim": 16, "num_groups": 1}
    document["models"]["gpt"].update(moe={"num_experts": 4, "router_topk": 2}, mamba=mamba)
    document["cases"][1].update(resume_at=2, compare_weights=True)
    return document


def test_plan_schema_accepts_what_the_code_accepts(document: Document) -> None:
    for accepted in (document, everything(copy.deepcopy(document))):
        validator("plan.schema.json").validate(accepted)
        assert len(parse_plan(json.dumps(accepted).encode()).cases) == 2


def objects_in(value: object) -> list[Document]:
    if isinstance(value, dict):
        return [value, *[found for entry in value.values() for found in objects_in(entry)]]
    return [found for entry in value for found in objects_in(entry)] if isinstance(value, list) else []


def test_plan_schema_and_code_refuse_the_same_documents(document: Document) -> None:
    """Without a key or with another one, both refuse the plan; the code refuses each value of a kind that is wrong."""
    everything(document)
    check = validator("plan.schema.json")
    free = (id(document["subject"]), id(document["expected_versions"]), id(document["models"]))
    tried = 0
    for found in objects_in(document):
        if id(found) in free:
            continue
        before = dict(found)
        for changed in [{**before, "surplus": 1}, *({k: v for k, v in before.items() if k != key} for key in before)]:
            found.clear()
            found.update(changed)
            assert not check.is_valid(document), changed.keys() ^ before.keys()
            assert_refused(document)
            tried += 1
        for key, value in before.items():
            for wrong in ([{}], -1, "no such" if isinstance(value, str) else "1"):
                found.clear()
                found.update({**before, key: wrong})
                assert_refused(document)
        found.clear()
        found.update(before)
    assert tried > 40


def assert_refused(document: Document) -> None:
    with pytest.raises(models.PlanError):
        parse_plan(json.dumps(document).encode())


def test_every_line_written_follows_the_schema(one_by_one: Done, at_once: Done) -> None:
    lines = [*one_by_one.lines, *at_once.lines]
    check = validator("result.schema.json")
    for line in lines:
        check.validate(line)
    assert {line["type"] for line in lines} == {"run", "case", "bandwidth", "end"}
    statuses = {line["status"] for line in lines if line["type"] == "case"}
    assert statuses == {"completed", "failed", "timed-out", "not-run"}
    # The schema is not one that takes anything.
    for line in {line["type"]: line for line in lines}.values():
        assert not check.is_valid({**line, "surplus": 1})
        assert not check.is_valid({key: value for key, value in line.items() if key != "schema"})
