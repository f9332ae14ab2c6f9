"""Reads `plan.json` into a Plan.

What is wrong with it is said before any process starts: where, what was found, what is allowed.
"""

import hashlib
import re
from pathlib import Path
from typing import get_args

from envbuild_smoke.plan import fields
from envbuild_smoke.plan.fields import (
    FieldError,
    Table,
    boolean,
    null_or,
    one_of,
    positive_number,
    string,
    whole_number,
)
from envbuild_smoke.plan.models import (
    SCHEMA,
    AttentionBackend,
    BandwidthSweep,
    Case,
    Device,
    Driver,
    Kind,
    LayerSpec,
    Layout,
    Mamba,
    Model,
    Moe,
    Normalization,
    Plan,
    PlanError,
    Precision,
    Recompute,
    Settings,
    Training,
    WantedGpu,
)
from envbuild_smoke.plan.rules import check_device, check_references, check_shape

# A case id becomes the name of a directory; 120 leaves room for suffixes below a file name's 255 bytes.
_CASE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_NONCE = re.compile(r"[0-9a-f]{32}")
# A compute capability without its dot, as compilers write it: 90, 90a, 103f.
_SM = re.compile(r"[1-9][0-9]{1,2}[af]?")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_PATTERN = re.compile(r"[M*-]{1,1024}")


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
    check_device(plan)
    check_references(plan)
    for case in plan.cases:
        check_shape(case, plan.models[case.model], plan)
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
        gpu=_gpu(table.table_or_null("gpu")),
        expected_versions=table.take("expected_versions", fields.strings),
        expected_modules=table.take("expected_modules", fields.tuple_of(_module)),
        provided_packages=table.take_or("provided_packages", fields.tuple_of(string), ()),
        repeats=table.take("repeats", whole_number(1)),
        bandwidth=_bandwidth(table.table_or_null("bandwidth")),
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


def _gpu(table: Table | None) -> WantedGpu | None:
    if table is None:
        return None
    gpu = WantedGpu(
        sm=table.take("sm", fields.tuple_of(_sm, least=1)), names=table.take_or("names", fields.tuple_of(string), ())
    )
    table.end()
    return gpu


def _bandwidth(table: Table | None) -> BandwidthSweep | None:
    if table is None:
        return None
    bandwidth = BandwidthSweep(
        ranks=table.take("ranks", whole_number(2)),
        sizes_bytes=table.take("sizes_bytes", fields.tuple_of(whole_number(1), least=1)),
        floor_gigabytes_per_second=table.take("floor_gigabytes_per_second", null_or(positive_number)),
    )
    table.end()
    return bandwidth


def _model(table: Table) -> Model:
    model = Model(
        kind=table.take("kind", one_of(*get_args(Kind))),
        num_layers=table.take("num_layers", whole_number(1)),
        hidden_size=table.take("hidden_size", whole_number(1)),
        num_attention_heads=table.take("num_attention_heads", whole_number(1)),
        num_query_groups=table.take("num_query_groups", whole_number(1)),
        sequence_length=table.take("sequence_length", whole_number(1)),
        vocabulary_size=table.take("vocabulary_size", whole_number(1)),
        normalization=table.take("normalization", one_of(*get_args(Normalization))),
        layer_spec=table.take("layer_spec", one_of(*get_args(LayerSpec))),
        moe=_moe(table.table_or_null("moe")),
        mamba=_mamba(table.table_or_null("mamba")),
    )
    table.end()
    return model


def _moe(table: Table | None) -> Moe | None:
    if table is None:
        return None
    moe = Moe(
        num_experts=table.take("num_experts", whole_number(1)), router_topk=table.take("router_topk", whole_number(1))
    )
    table.end()
    return moe


def _mamba(table: Table | None) -> Mamba | None:
    if table is None:
        return None
    mamba = Mamba(
        hybrid_override_pattern=table.take("hybrid_override_pattern", _pattern),
        state_dim=table.take("state_dim", whole_number(1)),
        head_dim=table.take("head_dim", whole_number(1)),
        num_groups=table.take("num_groups", whole_number(1)),
    )
    table.end()
    return mamba


def _case(table: Table) -> Case:
    case = Case(
        id=table.take("id", _case_id),
        baseline=table.take("baseline", null_or(string)),
        driver=table.take("driver", one_of(*get_args(Driver))),
        model=table.take("model", string),
        precision=table.take("precision", one_of(*get_args(Precision))),
        layout=_layout(table.table("layout")),
        world_size=table.take("world_size", whole_number(1)),
        training=_training(table.table("training")),
        settings=_settings(table.table("settings")),
        resume_at=table.take("resume_at", null_or(whole_number(1))),
        compare_weights=table.take("compare_weights", boolean),
        estimated_seconds=table.take("estimated_seconds", null_or(positive_number)),
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
        attention_backend=table.take("attention_backend", one_of(*get_args(AttentionBackend))),
        distributed_optimizer=table.take("distributed_optimizer", boolean),
        recompute=table.take("recompute", one_of(*get_args(Recompute))),
    )
    table.end()
    return settings


def _case_id(value: object) -> str:
    what = "1 to 120 letters, digits, '.', '_' or '-', the first a letter or digit (it names a directory)"
    return _matching(value, _CASE_ID, what)


def _nonce(value: object) -> str:
    return _matching(value, _NONCE, "32 lower-case hexadecimal digits")


def _sm(value: object) -> str:
    return _matching(value, _SM, "a compute capability without its dot, such as '90' or '90a'")


def _module(value: object) -> str:
    return _matching(value, _MODULE, "the dotted name of a module")


def _pattern(value: object) -> str:
    return _matching(value, _PATTERN, "a letter for each layer: M (Mamba), * (attention) or - (MLP)")


def _matching(value: object, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(what)
    return value
