"""Reads `plan.json` into a Plan.

What is wrong with it is said before any process starts: where, what was found, what is allowed.
"""

import hashlib
import re
from pathlib import Path
from typing import get_args

from envbuild_smoke import fields
from envbuild_smoke.drivers import MODULES as DRIVERS
from envbuild_smoke.fields import FieldError, Table, boolean, one_of, positive_number, string, whole_number
from envbuild_smoke.plan import (
    SCHEMA,
    Case,
    Device,
    LayerSpec,
    Layout,
    Model,
    Plan,
    PlanError,
    Precision,
    Settings,
    Training,
)
from envbuild_smoke.plan_rules import check_references, check_shape

# A case id becomes the name of a directory; 120 leaves room for suffixes below a file name's 255 bytes.
_CASE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_NONCE = re.compile(r"[0-9a-f]{32}")


def read_plan(path: Path) -> Plan:
    """Read and check the plan in the file `path`; raises PlanError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror or error}") from error
    try:
        return parse_plan(content)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def parse_plan(content: bytes) -> Plan:
    """Check the bytes of a `plan.json`; raises PlanError."""
    try:
        plan = _plan(Table(fields.load_json(content), "plan"), content)
    except FieldError as error:
        raise PlanError(str(error)) from error
    check_references(plan)
    for case in plan.cases:
        check_shape(case, plan.models[case.model], plan.device)
    return plan


def _plan(table: Table, content: bytes) -> Plan:
    # First, so that a plan of another version is told so, and not about its unknown keys.
    table.take("schema", one_of(SCHEMA))
    models = table.take("models", fields.objects)
    cases = table.take("cases", fields.array)
    plan = Plan(
        nonce=table.take("nonce", _nonce),
        subject=table.take("subject", fields.strings),
        device=table.take("device", one_of(*get_args(Device))),
        expected_versions=table.take("expected_versions", fields.strings),
        models={name: _model(Table(value, f"plan.models.{name}")) for name, value in models.items()},
        cases=tuple(
            sorted(
                (_case(Table(value, f"plan.cases[{index}]")) for index, value in enumerate(cases)),
                # Stable: baselines come first, and otherwise the plan's order stays.
                key=lambda case: case.baseline is not None,
            )
        ),
        digest="sha256:" + hashlib.sha256(content).hexdigest(),
        content=content,
    )
    table.end()
    return plan


def _model(table: Table) -> Model:
    model = Model(
        kind=table.take("kind", one_of("gpt")),
        num_layers=table.take("num_layers", whole_number(1)),
        hidden_size=table.take("hidden_size", whole_number(1)),
        num_attention_heads=table.take("num_attention_heads", whole_number(1)),
        sequence_length=table.take("sequence_length", whole_number(1)),
        vocabulary_size=table.take("vocabulary_size", whole_number(1)),
        layer_spec=table.take_or("layer_spec", one_of(*get_args(LayerSpec)), "local"),
    )
    table.end()
    return model


def _case(table: Table) -> Case:
    case = Case(
        id=table.take("id", _case_id),
        baseline=table.take("baseline", fields.string_or_null),
        driver=table.take("driver", one_of(*DRIVERS)),
        model=table.take("model", string),
        precision=table.take("precision", one_of(*get_args(Precision))),
        layout=_layout(table.table("layout")),
        world_size=table.take("world_size", whole_number(1)),
        training=_training(table.table("training")),
        settings=_settings(table.table("settings")),
        time_limit_seconds=table.take("time_limit_seconds", positive_number),
    )
    table.end()
    return case


def _layout(table: Table) -> Layout:
    layout = Layout(
        data=table.take("data", whole_number(1)),
        tensor=table.take("tensor", whole_number(1)),
        pipeline=table.take("pipeline", whole_number(1)),
        virtual_pipeline=table.take("virtual_pipeline", whole_number(1)),
        context=table.take("context", whole_number(1)),
        expert=table.take("expert", whole_number(1)),
        sequence=table.take("sequence", boolean),
    )
    table.end()
    return layout


def _training(table: Table) -> Training:
    training = Training(
        steps=table.take("steps", whole_number(1)),
        micro_batch_size=table.take("micro_batch_size", whole_number(1)),
        global_batch_size=table.take("global_batch_size", whole_number(1)),
        learning_rate=table.take("learning_rate", positive_number),
        clip_grad_norm=table.take("clip_grad_norm", positive_number),
        seed=table.take("seed", whole_number(0)),
    )
    table.end()
    return training


def _settings(table: Table) -> Settings:
    settings = Settings(
        overlap_p2p_comm=table.take("overlap_p2p_comm", boolean),
        batch_p2p_comm=table.take("batch_p2p_comm", boolean),
    )
    table.end()
    return settings


def _case_id(value: object) -> str:
    if not isinstance(value, str) or not _CASE_ID.fullmatch(value):
        raise ValueError(
            "1 to 120 letters, digits, '.', '_' or '-', the first a letter or digit (it names a directory)"
        )
    return value


def _nonce(value: object) -> str:
    if not isinstance(value, str) or not _NONCE.fullmatch(value):
        raise ValueError("32 lower-case hexadecimal digits")
    return value
