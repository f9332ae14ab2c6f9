"""What changing a single field of megatron-core's configuration does to small trainings on the CPU.

    python benchmarks/try_fields.py --python ENVIRONMENT/bin/python --work DIR --release 0.16.1 --record FILE

Each field is changed in training alone, and not in the reference: the judge's own checks of a baseline say whether it
is caught. Writes the trials of the release into FILE, and the sums into envs/knowledge/fields.toml. WORK is continued
where it was left.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpu_matrix import NO_DIGEST, ROOT, options_of

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.expansion import expand
from envbuild.certify.fields.knowledge import recipes, tried_fields
from envbuild.certify.judge.config_checks import observed_problems
from envbuild.certify.judge.reference import compare_reference
from envbuild.certify.models import CHECKS
from envbuild.certify.run.plan import Environment, Subject, make_plan
from envbuild.core.files import write_atomic
from envbuild.launch.launchers import Placement
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.results import CaseLine

FILE = ROOT / "envs" / "knowledge" / "fields.toml"
MATRIX = "certify-full"
# A model as Llama's and one with experts; of each later one what no earlier one has. In fp32: in others rounding hides
# what is small.
CASES = (
    "gqa-fp32-baseline",
    "moe-aux-fp32-baseline",
    "gpt-fp32-baseline",
    "llama3-fp32-baseline",
    "qwen3-fp32-baseline",
    "gpt-oss-fp32-baseline",
    "deepseek-v3-fp32-baseline",
    "capacity-fp32-baseline",
    "gpt-fp32-baseline-dlr0.0005-mask-uneven-ptl",
)
STEPS = 3
# What is compared with the healthy run, digit for digit.
DIGITS = ("steps", "gradients", "reference")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--release", required=True, help="of megatron-core in the environment")
    parser.add_argument("--record", type=Path, help="required, unless with --field")
    parser.add_argument("--field", action="append", default=[], help="only this one; prints, and writes no record")
    parser.add_argument("--judge-only", action="store_true", help="of trials that were run")
    given = parser.parse_args()
    if not (given.record or given.field):
        parser.error("--record FILE, or --field NAME")
    given.work.mkdir(parents=True, exist_ok=True)
    plan = write_plan(given.work / "plan.json")
    known = recipes()
    values = {name: sorted(known.values_of(name), key=lambda v: -known.values_of(name)[v]) for name in known.fields}
    (given.work / "values.json").write_text(json.dumps(values))
    (given.work / "only.json").write_text(json.dumps(given.field))
    (given.work / "first.json").write_text(json.dumps([*VARIED, *tried_fields().without_effect]))
    if not given.judge_only:
        words = [given.python, ROOT / "benchmarks" / "field_trials.py", given.work]
        subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "smoke")})
    outcomes = judge_trials(plan, given.work / "trials.jsonl")
    if given.field:
        print(json.dumps(outcomes))
        return
    record = json.loads(given.record.read_text()) if given.record.is_file() else {}
    record[given.release] = outcomes
    write_atomic(given.record, _a_field_a_line(record))
    write_knowledge(record)
    results = [result for by_case in outcomes.values() for result in by_case.values()]
    print(
        f"{given.release}: {len(outcomes)} fields, {len(results)} trials, {sum(map(is_same, results))} left every digit"
    )


SAME = "every digit the same"
# What cases differ in (`varied` of a certificate): whether they would notice is what trials are for.
VARIED = (
    *(f"model.{name}" for name in (
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
        "normalization", "layernorm_epsilon", "add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func",
        "attention_backend", "calculate_per_token_loss", "num_moe_experts", "moe_router_topk", "moe_router_dtype",
        "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_token_dispatcher_type",
        "moe_ffn_hidden_size", "moe_router_pre_softmax", "moe_grouped_gemm", "bf16", "params_dtype", "pipeline_dtype",
        "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "sequence_parallel",
        "overlap_p2p_comm", "batch_p2p_comm", "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
        "expert_tensor_parallel_size", "position_embedding_type", "rotary_base", "rotary_percent", "vocab_size",
        "share_embeddings_and_output_weights", "seq_length",
    )),
    *(f"optimizer.{name}" for name in (
        "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "decoupled_lr",
        "decoupled_min_lr", "bf16", "params_dtype", "use_distributed_optimizer", "overlap_param_gather",
    )),
    *(f"ddp.{name}" for name in (
        "overlap_grad_reduce", "overlap_param_gather", "bucket_size", "use_distributed_optimizer",
        "num_distributed_optimizer_instances", "grad_reduce_in_fp32", "average_in_collective",
    )),
    *(f"scheduler.{name}" for name in (
        "start_weight_decay", "end_weight_decay", "lr_decay_style", "lr_warmup_iters", "lr_decay_iters",
        "weight_decay_incr_style", "lr_warmup_init",
    )),
)  # fmt: skip


def write_plan(path: Path) -> Plan:
    matrix = Catalog.open(ROOT).matrix(MATRIX)
    capabilities = Capabilities(device=Device.CPU)
    expanded = {case.id: case for case in expand(matrix, MATRIX, capabilities)}
    place = Placement.parse("venv")
    subject = Subject(name="bench", stack="mcore", base="here", target="cpu", lock_digest=NO_DIGEST, place=place)
    cases = tuple(expanded[name] for name in CASES)
    plan = make_plan(subject, Environment(capabilities=capabilities, driver=Driver.MCORE), matrix, cases)
    for case in plan["cases"]:  # type: ignore[union-attr]
        # The bands of fp32 are the table's, which no moved weights widen.
        case["perturbed_runs"] = 0  # type: ignore[index,call-overload]
        case["training"]["steps"] = STEPS  # type: ignore[index,call-overload]
    path.write_text(json.dumps(plan))
    return parse_plan(path.read_bytes())


def judge_trials(plan: Plan, path: Path) -> dict[str, dict[str, str]]:
    """By field and case what changing it did, with the value: the first problem, or that every digit was the same."""
    healthy: dict[str, Mapping[str, Any]] = {}
    outcomes: dict[str, dict[str, str]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        name, field, reports = line["case"], line["field"], line["reports"]
        if not field:
            healthy[name] = reports
            assert not problem_of(plan, name, reports), problem_of(plan, name, reports)
            continue
        error = reports.get("error", "")
        if error.startswith("ended with status"):
            result = f"not known: {error}"
        elif error:
            result = f"rank-exception: {error.splitlines()[0][:120]}"
        elif problem := problem_of(plan, name, reports):
            result = problem[:160]
        else:
            result = SAME if numbers(reports) == numbers(healthy[name]) else "other digits, within the bands"
        outcomes.setdefault(field, {})[name] = f"{line['value']}: {result}"
    return outcomes


def is_same(result: str) -> bool:
    return result.endswith(SAME)


def numbers(reports: Mapping[str, Any]) -> object:
    """All digits of a training but for its times."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items() if key != "seconds"}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return [plain(reports.get(name)) for name in DIGITS]


def problem_of(plan: Plan, name: str, reports: Mapping[str, Any]) -> str:
    """The first problem that the judge has with a baseline; empty without one."""
    case = plan.case(name)
    model = plan.models[case.model]
    empty = {
        "schema": "envbuild.results/2", "type": "case", "case": name, "status": "completed", "repeat": 1,
        "seconds": 1.0, "startup_seconds": None, "started_seconds": 0.0, "devices": [0], "nodes": [0],
        "fresh_processes": 0, "weights": None, "perturbed": None, "failure": None, "logs": [], "compute_seconds": [],
        "restarted": None, "reference": None, "observed": None, "gradients": None,
    }  # fmt: skip
    line = read_object(CaseLine, {**empty, **reports}, name)
    if len(line.steps) < case.training.steps:
        return "steps: too few"
    problems = [*compare_reference(case, model, line)[1], *observed_problems(case, model, line.observed, None)]
    return str(problems[0]) if problems else ""


def _a_field_a_line(record: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    parts = []
    for release, fields in record.items():
        lines = (f"  {json.dumps(name)}: {json.dumps(by_case)}" for name, by_case in fields.items())
        parts.append(f" {json.dumps(release)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_knowledge(record: Mapping[str, Mapping[str, Mapping[str, str]]]) -> None:
    """Write the trials' sums; what stands before them in the file is written by hand."""
    head = FILE.read_text().partition("# Written by benchmarks/try_fields.py from here on.\n")
    lines = [head[0] + "# Written by benchmarks/try_fields.py from here on."]
    for release, fields in record.items():
        caught = {name: check for name, by_case in fields.items() if (check := check_of(by_case))}
        same = [name for name, by_case in fields.items() if all(map(is_same, by_case.values()))]
        lines += [f'\n[trials."{release}"]', f"digits = {json.dumps(same)}", f'\n[trials."{release}".caught]']
        lines += [f"{json.dumps(name)} = {json.dumps(check)}" for name, check in caught.items()]
    write_atomic(FILE, "\n".join(lines) + "\n")


def check_of(by_case: Mapping[str, str]) -> str:
    """The check that caught a field in any case: rather one that compares numbers than that the training raised."""
    checks = [result.split(": ")[1] for result in by_case.values() if result.count(": ") > 1]
    checks = [check for check in checks if check in CHECKS]
    return next((check for check in checks if check != "rank-exception"), (*checks, "")[0])


if __name__ == "__main__":
    main()
