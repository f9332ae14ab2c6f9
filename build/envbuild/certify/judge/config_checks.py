"""Compares what was measured with what the plan asks for: objects, environment, GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from packaging.utils import canonicalize_name

from envbuild.certify.judge.bands import FACTOR, FLOOR
from envbuild.certify.judge.results import Results
from envbuild.certify.models import Problem
from envbuild_smoke.plan.models import Case, Model, Plan
from envbuild_smoke.plan.precision import gradients_dtype, last_loss_scale, weights_dtype
from envbuild_smoke.results import Finding, GpuState, HuggingFace, Observed

# Any of them is what "auto" asks for. Transformer Engine falls back to unfused without a word, and has nothing else for
# fp32.
CHOSEN = ("flash", "fused")
CHOSEN_OF_FP32 = (*CHOSEN, "unfused")
LEAST_BUCKETS = 2
# Of Hugging Face's logits in bf16, relative to those in float64: two units in the last place are 1.6e-2.
LARGEST_SPREAD = 0.05
# A GPU without ECC has "[N/A]". Results are foreign text: not any digit of Unicode, nor thousands of them.
_COUNT = re.compile(r"[0-9]{1,18}")


def observed_problems(case: Case, model: Model, observed: Observed | None, baseline: Observed | None) -> list[Problem]:
    """Where what was built is not what the plan asked for, or what its baseline was.

    Args:
        case: of the plan, with the ``model`` that it names.
        observed: what the driver read from the objects; ``baseline``: the same of the case's baseline, if it has one.
    """
    if observed is None:
        return [Problem(check="observed", text="the driver reported nothing of what it built")]
    settings = case.settings
    wanted: dict[str, object] = {
        "layer_spec": model.layer_spec,
        "normalization": model.normalization,
        "attention_backend": settings.attention_backend,
        "distributed_optimizer": settings.distributed_optimizer,
        "overlap_grad_reduce": settings.overlap_grad_reduce,
        "overlap_param_gather": settings.overlap_param_gather,
        # Each layout would drop other units: their random streams differ by rank.
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "params_dtype": weights_dtype(case),
    }
    if case.driver == "mcore":
        # Recipes have settings of their own for these.
        wanted |= {
            "gradients_dtype": gradients_dtype(case),
            "main_weights_dtype": "float32",
            "loss_scale": last_loss_scale(case),
        }
    built: dict[str, object] = {name: getattr(observed, name) for name in wanted}
    built["params_dtype"] = _main_type(observed.params_dtype, case.precision)
    if settings.attention_backend == "auto":
        chosen = CHOSEN_OF_FP32 if case.precision == "fp32" else CHOSEN
        backend = observed.attention_backend
        wanted["attention_backend"] = backend if backend in chosen else " or ".join(chosen)
    texts = [
        f"{name}: the plan asks for {value}, and what was built has {built[name]}"
        for name, value in wanted.items()
        if built[name] != value
    ]
    for name, words in (("parameters", "parameters"), ("samples_digest", "samples that it was trained with")):
        own, expected = getattr(observed, name), getattr(baseline, name, None)
        if baseline is not None and own != expected:
            texts.append(f"its {words} differ from its baseline's: {own}, not {expected}")
    # A bucket size that fits the whole model is one bucket, and overlaps with nothing.
    if settings.bucket_size is not None and observed.gradient_buckets < LEAST_BUCKETS:
        texts.append(f"its gradients are in {observed.gradient_buckets} bucket, and bucket_size asks for several")
    if settings.cuda_graph_impl != "none" and not observed.cuda_graphs:
        texts.append("no layer replays a CUDA graph, and cuda_graph_impl asks for it")
    texts += _attention(case, observed, baseline)
    problems = [Problem(check="observed", text=text) for text in texts]
    if case.training.finetune != "none":
        problems += [Problem(check="observed", text=text) for text in _trainable(case, observed, baseline)]
        problems += [Problem(check="hugging-face", text=text) for text in _hugging_face(case, observed.hugging_face)]
    return [*problems, *_twice(observed.libraries)]


def _trainable(case: Case, observed: Observed, baseline: Observed | None) -> list[str]:
    """Where other parameters are trained than all of them, or with LoRA than the adapters alone."""
    finetune, trained, every = case.training.finetune, observed.trainable_parameters, observed.parameters
    if not (trained == every if finetune == "sft" else 0 < trained < every):
        return [f"{finetune} trains {trained} of {every} parameters"]
    if baseline is not None and trained != baseline.trainable_parameters:
        return [f"it trains {trained} parameters, and its baseline {baseline.trainable_parameters}"]
    return []


def _hugging_face(case: Case, model: HuggingFace | None) -> list[str]:
    """Where the model that was imported does not compute what Hugging Face's does, or is exported as another."""
    if model is None or not model.tensors:
        return ["the driver reported nothing of the Hugging Face model that it imported"]
    texts = []
    if model.differing:
        names = f"{', '.join(model.differing[:3])}{' ...' if len(model.differing) > 3 else ''}"
        texts.append(
            f"of {model.tensors} tensors that were exported {len(model.differing)} are not those imported: {names}"
        )
    # Elsewhere a rank has but a part of the logits; what the layout trains is compared with the baseline.
    if case.layout.pipeline > 1 or case.layout.context > 1:
        return texts
    if model.logits is None or model.spread is None:
        return [*texts, "its logits were not compared with those of Hugging Face"]
    allowed = max(FACTOR * model.spread, FLOOR)
    if not model.logits <= allowed:  # also where it is NaN
        texts.append(f"its logits are off by {model.logits:.2e} relative from Hugging Face's, allowed {allowed:.2g}")
    # A spread as wide as this is no measure of rounding.
    if not model.spread <= LARGEST_SPREAD:
        texts.append(f"Hugging Face's own logits are off by {model.spread:.2e} relative from those in float64")
    return texts


def _attention(case: Case, observed: Observed, baseline: Observed | None) -> list[str]:
    """Where a case computes attention with another class than its baseline, and neither was asked for it."""
    if baseline is None or case.layout.context > 1:
        return []  # split over ranks it is another class
    if observed.attention_backend != baseline.attention_backend or observed.attention == baseline.attention:
        return []
    return [f"its attention is {observed.attention}, its baseline's is {baseline.attention}"]


def _main_type(kept: str, precision: str) -> str:
    """What parameters are kept in; a few of a model in bf16 stay in float32, as Mamba's decay does."""
    types = {name.removeprefix("torch.") for name in kept.split(",")}
    few = {"float32"} if precision != "fp32" and len(types) > 1 else set()
    return ",".join(sorted(types - few))


def _twice(libraries: Mapping[str, Iterable[str]]) -> list[Problem]:
    """Libraries that a process loaded several times: which of them a call reaches is undefined."""
    return [
        Problem(check="environment", text=f"library-twice: {name} was loaded from {' and '.join(sorted(set(paths)))}")
        for name, paths in libraries.items()
        if len(set(paths)) > 1
    ]


def environment_problems(plan: Plan, results: Results) -> list[Problem]:
    """Where the environment differs from the lock: what the runner found, and the versions that it recorded."""
    # They fail a run in which every case agrees: what trained is not what was locked.
    findings = [*results.findings, *_other_versions(plan, results)]
    texts = [
        f"{finding.code}: {finding.package or 'the environment'}: expected {finding.expected or 'none'}, "
        f"found {finding.found or 'none'}"
        for finding in findings
    ]
    return [Problem(check="environment", text=text) for text in dict.fromkeys(texts)]


def _other_versions(plan: Plan, results: Results) -> list[Finding]:
    """Recorded versions that are not the plan's, whatever the runner found."""
    seen = results.run.environment.versions
    return [
        Finding(code="version-mismatch" if version else "package-missing", package=name, expected=wanted, found=version)
        for name, wanted in plan.expected_versions.items()
        # Names of one package differ in case and separators (PEP 503).
        if (version := seen.get(canonicalize_name(name))) != wanted
    ]


def hardware_problems(plan: Plan, results: Results) -> list[Problem]:
    """GPUs that are not the plan's, and those whose memory had errors that ECC could not correct."""
    return [*_other_gpus(plan, results), *_memory_errors(results)]


def _other_gpus(plan: Plan, results: Results) -> Iterator[Problem]:
    """Other GPUs than the plan asks for, or another number of them; the runner refuses them before it trains."""
    if plan.gpu is None:
        return
    # An SM's suffix is of compiled code; a GPU has none.
    gpus, wanted = results.run.machine.gpus, {sm.rstrip("af") for sm in plan.gpu.sm}
    for gpu in gpus:
        if gpu.compute_capability.replace(".", "") not in wanted:
            text = f"GPU {gpu.index} is a {gpu.name} of compute capability {gpu.compute_capability}; the plan "
            yield Problem(check="hardware", text=f"{text}asks for sm_{' or sm_'.join(sorted(wanted))}")
    for line in results.cases.values():
        case = plan.case(line.case)
        used = len({(index // case.slots_on_node, device) for index, device in enumerate(line.devices)})
        if line.status == "completed" and not case.slots == used <= len(gpus) * len(line.nodes):
            text = f"{line.case} for {case.slots} GPUs was trained on {used}, of {len(gpus)} that were recorded"
            yield Problem(check="hardware", text=text)


def _memory_errors(results: Results) -> Iterator[Problem]:
    """Of each node; where it was resumed, since then, for another host may be the node."""
    # The last line of a node is of the host that has ended.
    before = {0: results.gpu_states, **{line.node: line.gpu_states for line in results.nodes}}
    after = {0: results.end.gpu_states, **{end.node: end.gpu_states for end in results.end.nodes}}
    for node, states in after.items():
        where = f" of {results.name_of(node)}" if len(after) > 1 else ""
        for index, count in _new_errors(before.get(node, ()), states):
            text = f"GPU {index}{where} had {count} uncorrectable ECC errors while the cases ran"
            yield Problem(check="hardware", text=text)


def _new_errors(before: Iterable[GpuState], after: Iterable[GpuState]) -> Iterator[tuple[str, int]]:
    name = "uncorrected_ecc_errors"
    counted = {state["index"]: state.get(name, "") for state in before}
    for state in after:
        then, now = counted.get(state["index"], ""), state.get(name, "")
        if _COUNT.fullmatch(then) and _COUNT.fullmatch(now) and int(now) > int(then):
            yield state["index"], int(now) - int(then)
