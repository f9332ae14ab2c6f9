"""Trains baselines again with one field of the library's configuration changed; try_fields.py runs this.

    PYTHONPATH=smoke python benchmarks/field_trials.py WORK

In an environment with megatron-core. WORK has `plan.json` and `values.json` (the values that recipes have, by field);
each trial is a line of `trials.jsonl`. `first.json` names the fields that come first, `only.json` those that are tried
at all, where it names any. The library is imported once, and each trial is a fork.
"""

import ast
import dataclasses
import enum
import inspect
import json
import os
import re
import signal
import socket
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envbuild_smoke import cpu_shim
from envbuild_smoke.plan.models import Case, Model, Plan
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.rank_context import RankContext

# Of processor time, and on the clock: a training that waits for something takes none.
SECONDS, WAITS = 60, 400
# In the names of fields that only some models have a use for: they are tried in one of those too.
ALSO_TRIED = {
    "moe-aux-fp32-baseline": ("moe", "expert", "router"),
    "gpt-oss-fp32-baseline": ("window", "softmax", "glu", "clamp", "yarn"),
    "deepseek-v3-fp32-baseline": ("mtp", "shared_expert", "rope", "rotary", "latent", "expert_bias", "group_topk"),
    "capacity-fp32-baseline": ("capacity", "drop"),
    "gpt-fp32-baseline-dlr0.0005-mask-uneven-ptl": ("per_token", "scaling"),
}


def main() -> None:
    work = Path(sys.argv[1])
    plan = parse_plan((work / "plan.json").read_bytes())
    wanted: dict[str, list[str]] = json.loads((work / "values.json").read_text())
    first = json.loads((work / "first.json").read_text())
    only = json.loads((work / "only.json").read_text())
    os.environ.update(OMP_NUM_THREADS="1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    import torch

    torch.set_num_threads(1)
    cpu_shim.install()
    from envbuild_smoke.drivers import mcore  # noqa: F401 - imported before the forks

    path = work / "trials.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    done = {(line["case"], line["field"]) for line in map(json.loads, lines)}
    with path.open("a") as out:
        values: dict[str, set[str]] = {}
        for case in plan.cases:
            healthy = run(plan, case, "", None, work)
            assert "error" not in healthy, healthy
            configured = healthy["observed"]["configuration"]
            out.write(json.dumps({"case": case.id, "field": "", "reports": healthy}) + "\n")
            # Those that a verdict on a field may rest on come first: the others may take the rest of a night.
            for field in sorted(
                configured["defaults"], key=lambda name: (first.index(name) if name in first else len(first), name)
            ):
                # What the optimizer does, it does to every model; so do most fields, and each trial takes seconds.
                if not _is_built_with(field, plan.models[case.model]):
                    continue
                now = configured["values"].get(field, configured["defaults"][field])
                tried = now in values.setdefault(field, set()) and not _is_of(case, field)
                values[field].add(now)
                if (case.id, field) in done or tried:
                    continue
                if only and field not in only:
                    continue
                changed = changed_value(field, wanted.get(field, []), configured)
                if changed is None:
                    continue
                reports = run(plan, case, field, changed[0], work)
                value = getattr(changed[0], "__name__", str(changed[0]))
                line = {"case": case.id, "field": field, "value": value, "reports": reports}
                out.write(json.dumps(line) + "\n")
                out.flush()


def _is_of(case: Case, field: str) -> bool:
    return any(word in field for word in ALSO_TRIED.get(case.id, ()))


def run(plan: Plan, case: Case, field: str, value: Any, work: Path) -> dict[str, Any]:
    """Train in a fork; return what it reported, or its error."""
    answer = work / "answer.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(WAITS)
        log = os.open(work / "trial.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            reports = _train(plan, case, field, value, work)
        except BaseException as error:  # noqa: BLE001 - what a field does is what is asked
            reports = {"error": f"{type(error).__name__}: {error}"[:300]}
        answer.write_text(json.dumps(reports))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return json.loads(answer.read_text()) if answer.exists() else {"error": f"ended with status {status}"}


def _train(plan: Plan, case: Case, field: str, value: Any, work: Path) -> dict[str, Any]:
    from envbuild_smoke.drivers import mcore

    # No other case loads what a baseline saves, and saving takes half of the time.
    mcore.checkpoints.save_weights = mcore.check_saved_weights = lambda *_arguments: None
    reports: dict[str, Any] = {"steps": []}

    def send(message: dict[str, object]) -> None:
        for name, content in message.items():
            if name == "step" and content is not None:
                reports["steps"].append(content)
            elif name in ("observed", "reference", "gradients") and content is not None:
                reports[name] = content

    if field:
        _change(field, value, plan.models[case.model])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = RankContext(
            case=case, part=case.parts[0], model=plan.models[case.model], device="cpu", out=work / "out", rank=0,
            host="127.0.0.1", port=listener.getsockname()[1], world_size=1, listener=listener.detach(), send=send,
        )  # fmt: skip
        mcore.train(context)
    return reports


def _is_built_with(field: str, trained: Model) -> bool:
    """Whether a model of this kind is built with the field at all."""
    from envbuild_smoke.drivers.mcore import model
    from envbuild_smoke.drivers.mcore.architecture import config_class

    section, _, name = field.partition(".")
    return section != "model" or name in {
        *_names(config_class(trained)), *inspect.signature(model.GPTModel).parameters,
    }  # fmt: skip


def _change(field: str, value: Any, trained: Model) -> None:
    """Have the driver's configuration built with another value of a field."""
    from envbuild_smoke.drivers.mcore import config_fields, model, optimizer
    from envbuild_smoke.drivers.mcore.architecture import config_class

    section, _, name = field.partition(".")
    owners = {"ddp": (optimizer, "DistributedDataParallelConfig"), "optimizer": (optimizer, "OptimizerConfig")}
    owner, kind = owners.get(section, (model, "GPTModel"))
    if section == "scheduler":
        owner, kind = optimizer, "OptimizerParamScheduler"
        name = {theirs: own for own, theirs in config_fields._OF_SCHEDULE.items()}[name]
    elif section == "model" and name in _names(config_class(trained)):
        chosen = config_class(trained)
        model.config_class = lambda _model: lambda **options: chosen(**{**options, name: value})
        if name in _OF_LAYERS:
            layers = model.gpt_layer_spec
            model.gpt_layer_spec = lambda config, built, stage: layers(config, _OF_LAYERS[name](built, value), stage)
        return
    original = getattr(owner, kind)

    def changed(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **{**options, name: value})

    setattr(owner, kind, changed)


def _names(configuration: type) -> frozenset[str]:
    return frozenset(each.name for each in dataclasses.fields(configuration))


# Layers are chosen by these, which the configuration alone does not change.
_OF_LAYERS = {
    "normalization": lambda built, value: dataclasses.replace(built, normalization=value),
    "num_moe_experts": lambda built, value: (
        built
        if built.moe is None
        else dataclasses.replace(built, moe=dataclasses.replace(built.moe, num_experts=value))
    ),
}


def changed_value(field: str, of_recipes: list[str], configured: Mapping[str, Any]) -> "tuple[Any] | None":
    """Return another value for a field: one that recipes have, else one of its type; None where there is none."""
    now = configured["values"].get(field, configured["defaults"][field])
    if field == "model.activation_func":
        return _another_activation(now)
    kind = _type_of(field)
    # Numbers of recipes are of models a thousand times as large.
    for text in of_recipes if not re.fullmatch(r"[0-9.e-]+", now) else ():
        if text != now and (value := _value(text, kind)) is not None:
            return (value[0],)
    return next(_others(now, kind), None)


def _another_activation(now: str) -> "tuple[Any]":
    import torch

    return (torch.nn.functional.gelu if now.endswith("silu") else torch.nn.functional.silu,)


def _type_of(field: str) -> Any:
    from megatron.core.transformer import MLATransformerConfig

    from envbuild_smoke.drivers.mcore import optimizer

    section, _, name = field.partition(".")
    classes = {
        "ddp": optimizer.DistributedDataParallelConfig,
        "optimizer": optimizer.OptimizerConfig,
        "model": MLATransformerConfig,
    }
    for owner in classes[section].__mro__ if section in classes else ():
        if name in getattr(owner, "__annotations__", {}):
            try:
                return typing.get_type_hints(owner).get(name)
            except (NameError, TypeError):
                return None
    return None


def _value(text: str, kind: Any) -> "tuple[Any] | None":
    import torch

    for each in _parts(kind):
        if isinstance(each, type) and issubclass(each, enum.Enum):
            return (each[text],) if text in each.__members__ else None
        if each is torch.dtype:
            return (getattr(torch, text),) if hasattr(torch, text) else None
    try:
        return (ast.literal_eval(text),)
    except (ValueError, SyntaxError):
        return (text,) if str in _parts(kind) or kind is None else None


def _parts(kind: Any) -> tuple[Any, ...]:
    parts = typing.get_args(kind)
    return tuple(part for each in parts for part in _parts(each)) if parts else (kind,)


def _others(now: str, kind: Any) -> Iterator[tuple[Any]]:
    import torch

    parts = _parts(kind)
    if now in ("True", "False"):
        yield (now == "False",)
        return
    for each in parts:
        if isinstance(each, type) and issubclass(each, enum.Enum):
            yield from ((member,) for member in each if member.name != now)
        elif isinstance(each, str) and each != now:  # of a Literal
            yield (each,)
    if torch.dtype in parts:
        yield (torch.float64 if now != "float64" else torch.float32,)
    try:
        number = ast.literal_eval(now)
    except (ValueError, SyntaxError):
        return
    if isinstance(number, int):
        yield (number * 2 if number else 1,)
    elif isinstance(number, float):
        yield (number / 2 if number else 0.1,)
    elif number is None:
        yield from ((value,) for each, value in ((bool, True), (int, 2), (float, 0.5)) if each in parts)


if __name__ == "__main__":
    main()
