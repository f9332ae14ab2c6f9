"""Real Megatron-Core on the CPU: every layout computes what one process computes, from the zipapp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.smoke_plans import Document, case_document, plan_document, read_results

from envbuild.certify.judge.reference import compare_reference
from envbuild_smoke.plan.architecture import Moe
from envbuild_smoke.plan.axes import Layout
from envbuild_smoke.plan.json_reader import as_json, read_object
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.results import CaseLine

SMOKE = Path(__file__).resolve().parents[2] / "smoke"
BASELINE = "gpt-fp32-baseline"
# Sizes that keep some twenty cases under a minute.
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "sequence_length": 32, "vocabulary_size": 256}
GROUPED = {"num_query_groups": 2, "normalization": "RMSNorm"}
MODELS = {"gpt": {}, "gqa": GROUPED, "moe": {**GROUPED, "moe": as_json(Moe(num_experts=4, router_topk=2))}}


def case(name: str, *, baseline: str | None = "baseline", **values: Any) -> Document:
    """A case "MODEL-fp32-REST" as it is named; ``values`` are sizes of its layout, settings, or its own fields."""
    model = name.partition("-")[0]
    sizes = {key: values.pop(key) for key in list(values) if key in SIZES}
    document = case_document(name, baseline and f"{model}-fp32-{baseline}", **sizes)
    document["model"] = model
    document["training"].update(steps=4, global_batch_size=8)
    for key, value in values.items():
        part = next(part for part in ("layout", "settings", "training", "") if key in document.get(part, document))
        document.get(part, document)[key] = value
    return document


SIZES = ("data", "tensor", "pipeline", "virtual_pipeline", "context", "expert", "overlap")
INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}


def plain(**sizes: int) -> Document:
    """A layout that has these sizes alone."""
    return as_json(Layout(**sizes))


# Half of the ranks go on, with the state of the optimizer of all.
HALVED = {"distributed_optimizer": True, "resume_at": 2, "continue_in": plain(data=2), "compare_weights": True}
CASES = [
    case("gpt-fp32-dp2", data=2),
    case("gpt-fp32-tp2", tensor=2, compare_weights=True),
    case("gpt-fp32-pp2", pipeline=2),
    case("gpt-fp32-pp2-vp2", overlap=True, compare_weights=True, **INTERLEAVED),
    case("gpt-fp32-tp2-pp2", tensor=2, pipeline=2),
    case("gpt-fp32-cp2", context=2),
    case("gpt-fp32-mb4", micro_batch_size=4),
    case("gpt-fp32-dp2-do", data=2, distributed_optimizer=True, compare_weights=True),
    case("gpt-fp32-dp2-do-resume2", data=2, distributed_optimizer=True, resume_at=2, compare_weights=True),
    case("gpt-fp32-resume2", resume_at=2, compare_weights=True),
    case("gpt-fp32-dp4-do-resume2-in-dp2", data=4, **HALVED),
    case("gpt-fp32-tp2-resume2-in-dp4", tensor=2, resume_at=2, continue_in=plain(data=4), compare_weights=True),
    case("gpt-fp32-rc-full", recompute="full"),
    case("gpt-fp32-rc-selective", recompute="selective"),
    case("gqa-fp32-tp2-sp", tensor=2, sequence=True, compare_weights=True),
    case("gqa-fp32-cp2", context=2),
    case("moe-fp32-dp2-ep2", data=2, expert=2, compare_weights=True),
    case("moe-fp32-dp2-ep2-do-resume2", data=2, expert=2, distributed_optimizer=True, resume_at=2),
    case("gpt-fp32-dp2-mb4", baseline="again-mb4", data=2, micro_batch_size=4),
]
# What these compute is the baseline's arithmetic, not only its value; the last has one micro batch a rank.
SAME_DIGITS = ("gpt-fp32-resume2", "gpt-fp32-rc-full", "gpt-fp32-rc-selective", "gpt-fp32-dp2-mb4")
# The same training once more, to compare two runs digit by digit.
AGAIN = case("gpt-fp32-again", baseline=None)
BASELINES = [
    *(
        {**case(f"{model}-fp32-baseline", baseline=None, compare_reference=True), "perturbed_runs": 1}
        for model in MODELS
    ),
    AGAIN,
    case("gpt-fp32-again-mb4", baseline=None, micro_batch_size=4),
]
# The library's own default settings: nothing raises, the loss falls, and something else is computed.
WRONG = case("gpt-fp32-pp2-vp2-defaults", **INTERLEAVED)
# The first update makes weights of which nothing finite can be computed.
EXPLODES = case("gpt-fp32-explodes", baseline=None, learning_rate=1e30)
# In processes that live on, one of these follows another; each has to be what it is in a fresh process.
LIVE = ("gpt-fp32-tp2", "gpt-fp32-pp2-vp2", "gpt-fp32-dp2", "moe-fp32-dp2-ep2", BASELINE, "gpt-fp32-tp2-pp2")

# Measured over all of these and a larger model: 5.3e-8 in loss, 6.7e-7 in grad norm, 1.7e-6 in weights.
LOSS_RELATIVE = 1e-6
GRAD_NORM_RELATIVE = 1e-5
WEIGHTS_RELATIVE = 1e-5
GRADIENTS_RELATIVE = 1e-5


@dataclass(frozen=True)
class Run:
    """A run of the zipapp that has ended."""

    out: Path
    status: int
    errors: str
    run: Document
    cases: dict[str, Document]
    sweep: Document | None
    end: Document

    def numbers(self, case: str, name: str) -> list[float]:
        return [step[name] for step in self.cases[case]["steps"]]


@pytest.fixture(scope="module")
def parity(smoke_pyz: Path, stack_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("parity")
    plan = plan_document(*BASELINES, *CASES, WRONG, EXPLODES)
    plain = {**plan["models"]["gpt"], **SMALL}
    plan["models"] = {name: {**plain, **different} for name, different in MODELS.items()}
    plan["bandwidth"] = {"ranks": 2, "sizes_bytes": [4096, 65536], "floor_gigabytes_per_second": None}
    (folder / "plan.json").write_text(json.dumps(plan))
    return run(smoke_pyz, stack_python, folder / "plan.json", folder / "out")


def run(smoke_pyz: Path, stack_python: Path, plan: Path, out: Path, *options: str) -> Run:
    """Run a plan with the zipapp to its end."""
    # -I: the folder it is started in and PYTHONPATH play no part, as on a node.
    done = subprocess.run(
        [stack_python, "-I", smoke_pyz, "run", "--plan", plan, "--out", out, *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = read_results(out)
    cases = {line["case"]: line for line in lines if line["type"] == "case"}
    sweep = next((line for line in lines if line["type"] == "bandwidth"), None)
    return Run(out, done.returncode, done.stderr, lines[0], cases, sweep, lines[-1])


def test_every_case_completes_but_the_one_that_explodes(parity: Run) -> None:
    failures = {name: case["failure"] for name, case in parity.cases.items() if case["status"] != "completed"}
    assert set(failures) == {EXPLODES["id"]}, failures
    assert parity.status == 1, parity.errors
    assert parity.end["completed"] == len(BASELINES) + len(CASES) + 1


def test_numbers_that_are_not_finite_end_a_case(parity: Run) -> None:
    failure = parity.cases[EXPLODES["id"]]["failure"]
    assert failure["kind"] == "not-finite"
    assert failure["message"] == "FloatingPointError: step 2: grad_norm is nan"


@pytest.mark.parametrize("name", [case["id"] for case in CASES])
def test_layout_reproduces_the_baseline(parity: Run, name: str) -> None:
    baseline = next(case["baseline"] for case in CASES if case["id"] == name)
    for number, relative in (("loss", LOSS_RELATIVE), ("grad_norm", GRAD_NORM_RELATIVE)):
        assert parity.numbers(name, number) == pytest.approx(parity.numbers(baseline, number), rel=relative, abs=0)


@pytest.mark.parametrize("name", [case["id"] for case in CASES])
def test_gradients_of_the_first_step_are_the_baselines(parity: Run, name: str) -> None:
    baseline = next(case["baseline"] for case in CASES if case["id"] == name)
    own, expected = (
        {gradient["name"]: gradient for gradient in parity.cases[key]["gradients"]} for key in (name, baseline)
    )
    assert own.keys() == expected.keys()
    for tensor, gradient in expected.items():
        numbers, wanted = ([measured["norm"], *measured["projections"]] for measured in (own[tensor], gradient))
        assert numbers == pytest.approx(wanted, rel=0, abs=GRADIENTS_RELATIVE * gradient["norm"]), tensor


@pytest.mark.parametrize("model", MODELS)
def test_baseline_agrees_with_the_reference(parity: Run, model: str) -> None:
    baseline = parity.cases[f"{model}-fp32-baseline"]
    plan = parse_plan((parity.out.parent / "plan.json").read_bytes())
    planned = plan.case(baseline["case"])
    verdict, problems = compare_reference(planned, plan.models[model], read_object(CaseLine, baseline, "case"))
    assert verdict is not None
    assert (problems, verdict.not_compared) == ([], "")
    compared = {kind: {tensor["name"] for tensor in baseline["reference"][kind]} for kind in ("gradients", "weights")}
    # Tensors of 4 layers, the embeddings and the last norm: with their biases, without, and with a router.
    tensors = {"gpt": 4 * 12 + 4, "gqa": 4 * 6 + 2, "moe": 4 * (4 + 1 + 4 * 2) + 2}[model]
    assert compared["gradients"] == compared["weights"]
    assert len(compared["weights"]) == tensors
    activations = [tensor["name"] for tensor in baseline["reference"]["activations"]]
    router = ["decoder.layers.0.mlp.router"] if model == "moe" else []
    layer = ("input_layernorm", "self_attention.linear_qkv", "self_attention.core_attention", "pre_mlp_layernorm")
    first = ["embedding", *(f"decoder.layers.0.{part}" for part in layer), *router, "decoder.layers.0"]
    assert activations[: len(first)] == first
    assert activations[-1] == "decoder.final_layernorm"


@pytest.mark.parametrize("name", [*SAME_DIGITS, AGAIN["id"]])
def test_same_arithmetic_gives_the_same_digits(parity: Run, name: str) -> None:
    baseline = next((case["baseline"] for case in CASES if case["id"] == name), BASELINE)
    for number in ("loss", "grad_norm"):
        assert parity.numbers(name, number) == parity.numbers(baseline, number)


@pytest.mark.parametrize("name", [case["id"] for case in CASES if case["compare_weights"]])
def test_final_weights_are_the_baselines(parity: Run, name: str) -> None:
    weights = parity.cases[name]["weights"]
    assert weights["compared_with"] == f"{name.partition('-')[0]}-fp32-baseline"
    assert (weights["missing"], weights["unexpected"]) == ([], [])
    assert weights["tensors"] >= 30
    assert weights["largest_relative_difference"] < WEIGHTS_RELATIVE
    # Nothing is compared with itself: where the arithmetic differs, so do some digits.
    assert (weights["largest_relative_difference"] == 0) == (name in SAME_DIGITS)


def test_what_was_built_is_observed(parity: Run) -> None:
    plain = {
        "layer_spec": "local",
        "attention_backend": "local",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": "float32",
        "gradients_dtype": "float32",
        "loss_scale": 1.0,
        "optimizer": "torch.optim.adamw.AdamW",
    }
    for case in CASES:
        observed, baseline = (parity.cases[name]["observed"] for name in (case["id"], case["baseline"]))
        assert plain.items() <= observed.items()
        assert observed["normalization"] == ("LayerNorm" if case["model"] == "gpt" else "RMSNorm")
        assert observed["router_gemm"] == ("torch" if case["model"] == "moe" else "none")
        assert observed["distributed_optimizer"] == case["settings"]["distributed_optimizer"]
        assert ("ContextParallel" in observed["attention"]) == (case["layout"]["context"] > 1)
        # Counted by the ranks together, each what no other has; read by them together, each its share.
        for name in ("parameters", "samples_digest"):
            assert observed[name] == baseline[name], (case["id"], name)
    # Embeddings of tokens and positions, 4 layers of 12 h^2 + 13 h, and the last norm, with h = 32.
    gpt = parity.cases[BASELINE]["observed"]["parameters"]
    assert gpt == (256 + 32) * 32 + 4 * (12 * 32 * 32 + 13 * 32) + 2 * 32


def test_each_rank_measures_how_long_it_computes_before_it_communicates(parity: Run) -> None:
    for case in (*BASELINES, *CASES):
        seconds = parity.cases[case["id"]]["compute_seconds"]
        assert [len(of_rank) for of_rank in seconds] == [case["resume_at"] or 4] * case["world_size"], case["id"]


# Each step of a clock that counts its readings: one when it begins, one at the first collective, one more at the end.
FIRST_COLLECTIVES = """
import itertools, json, os, socket
import torch, torch.distributed as dist
from envbuild_smoke.drivers.mcore import first_collective
from envbuild_smoke.drivers.mcore.first_collective import FirstCollective

readings = itertools.count()
first_collective.time = type("Time", (), {"perf_counter": staticmethod(lambda: next(readings))})
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
value, group, many = torch.ones(2), dist.new_group([0]), [torch.zeros(2)]
collectives = {
    "all_reduce": lambda: dist.all_reduce(value, group=group),
    "broadcast": lambda: dist.broadcast(value, 0),
    "all_gather": lambda: dist.all_gather(many, value),
    "into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(2), value),
    "barrier": dist.barrier,
    "none": lambda: None,
}
clock, measured = FirstCollective(torch.device("cpu")), {}
for name, communicate in collectives.items():
    clock.begin()
    communicate()
    next(readings)
    communicate()
    clock.end()
    measured[name] = clock.seconds[-1]
for name in ("send", "recv", "reduce_scatter"):
    assert hasattr(getattr(dist.ProcessGroup, name), "__wrapped__"), name
print(json.dumps(measured))
"""


def test_first_collective_of_a_step_ends_its_time(stack_python: Path, tmp_path: Path) -> None:
    measured = json.loads(python(stack_python, FIRST_COLLECTIVES, tmp_path).splitlines()[-1])
    assert measured.pop("none") == 2
    assert measured == dict.fromkeys(measured, 1)
    assert len(measured) == 5


def test_bandwidth_is_measured(parity: Run) -> None:
    sweep = parity.sweep
    assert sweep is not None
    assert (sweep["ranks"], sweep["backend"], sweep["transports"], sweep["failure"]) == (2, "gloo", None, None)
    assert [point["bytes"] for point in sweep["points"]] == [4096, 65536]
    for point in sweep["points"]:
        algorithm = point["bytes"] / point["seconds"] / 1e9
        assert point["algorithm_gigabytes_per_second"] == pytest.approx(algorithm)
        # 2 (n - 1) / n is 1 for two ranks.
        assert point["bus_gigabytes_per_second"] == pytest.approx(algorithm)
    for point in sweep["all_gather"]:
        assert point["bus_gigabytes_per_second"] == pytest.approx(point["bytes"] / point["seconds"] / 1e9 / 2)


@pytest.mark.slow
def test_fresh_processes_give_the_digits_of_live_ones(parity: Run, smoke_pyz: Path, stack_python: Path) -> None:
    only = [argument for name in LIVE for argument in ("--only", name)]
    plan, out = parity.out.parent / "plan.json", parity.out.parent / "fresh"
    fresh = run(smoke_pyz, stack_python, plan, out, "--isolation", "process", *only)
    assert set(LIVE) <= fresh.cases.keys()
    for name in LIVE:
        assert fresh.cases[name]["fresh_processes"] == len(fresh.cases[name]["logs"])
        for number in ("loss", "grad_norm"):
            assert fresh.numbers(name, number) == parity.numbers(name, number), name
    live = [parity.cases[name]["fresh_processes"] for name in LIVE]
    assert live.count(0) >= len(LIVE) - 2


def test_baseline_trains(parity: Run) -> None:
    """The loss starts where a model that knows nothing starts, ln 256 = 5.55, and falls at every step."""
    losses = parity.numbers(BASELINE, "loss")
    assert losses[0] == pytest.approx(5.55, abs=0.1)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.02


@pytest.mark.parametrize("model", MODELS)
def test_baseline_trains_again_from_weights_moved_by_one_unit(parity: Run, model: str) -> None:
    """From any others the bands would be wide, and hide what they are to find."""
    baseline = f"{model}-fp32-baseline"
    (again,) = parity.cases[baseline]["perturbed"]
    moved, losses = [step["loss"] for step in again["steps"]], parity.numbers(baseline, "loss")
    assert moved != losses
    assert moved == pytest.approx(losses, rel=LOSS_RELATIVE)
    assert again["weights"] < WEIGHTS_RELATIVE


def test_wrong_interleaving_differs_from_the_baseline(parity: Run) -> None:
    """Two stages with batched sends and receives: the next and the previous stage are the same rank."""
    losses, wrong = parity.numbers(BASELINE, "loss"), parity.numbers(WRONG["id"], "loss")
    assert wrong[2] < wrong[1] < wrong[0], "it is a silent failure: the loss falls at first"
    assert abs(wrong[0] - losses[0]) / losses[0] > 10 * LOSS_RELATIVE
    assert abs(wrong[-1] - losses[-1]) / losses[-1] > 1e-4
    assert parity.numbers(WRONG["id"], "grad_norm")[0] > 3 * parity.numbers(BASELINE, "grad_norm")[0]


def test_record_names_what_was_imported(parity: Run, stack_python: Path) -> None:
    environment = parity.run["environment"]
    site_packages = stack_python.parent.parent
    for module in ("torch", "megatron.core"):
        assert Path(environment["files"][module]).is_relative_to(site_packages)
    assert parity.run["smoke_digest"].startswith("sha256:")
    assert parity.run["environment_findings"] == []
    assert (parity.out / "checkpoints" / BASELINE / "initial" / "metadata.json").is_file()


MANY_CASES = """
import json, os, socket
from pathlib import Path
from envbuild_smoke import drivers, cpu_shim
from envbuild_smoke.plan.reader import read_plan
from envbuild_smoke.rank_context import RankContext

cpu_shim.install()
plan, out, after = read_plan(Path("plan.json")), Path("out"), []
for index in range(30):
    case = plan.cases[index % len(plan.cases)]
    (out / "cases" / case.id).mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        context = RankContext(case=case, part=case.parts[0], model=plan.models[case.model], device="cpu", out=out,
                              rank=0, host="127.0.0.1", port=port, world_size=1, listener=listener.detach(),
                              save_final_weights=True, send=lambda message: None)
    drivers.module("mcore").train(context)
    kilobytes = int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])
    after.append([kilobytes, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))])
print(json.dumps(after))
"""


@pytest.mark.slow
def test_thirty_cases_in_one_process_leave_nothing_behind(stack_python: Path, tmp_path: Path) -> None:
    cases = [case(f"{model}-fp32-baseline", baseline=None) for model in MODELS]
    for one in cases:
        one["training"].update(steps=1, global_batch_size=2)
    plan = plan_document(*cases)
    plain = {**plan["models"]["gpt"], **SMALL, "num_layers": 2}
    plan["models"] = {name: {**plain, **different} for name, different in MODELS.items()}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    after = json.loads(python(stack_python, MANY_CASES, tmp_path).splitlines()[-1])
    descriptors, threads = ({usage[index] for usage in after[2:]} for index in (1, 2))
    assert len(descriptors) == len(threads) == 1, after
    # Memory is not given back to the last page; what a case holds is a few megabytes.
    assert after[-1][0] - after[9][0] < 4096, after


def python(stack_python: Path, program: str, folder: Path, *arguments: str) -> str:
    """Run a program that imports smoke with the stack's Python, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(SMOKE), "OMP_NUM_THREADS": "1"}
    command = [stack_python, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Takes out of a checkpoint a layer, and of one more tensor the half that the second rank wrote.
DAMAGED = """
import json, pickle, sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from envbuild_smoke.drivers.mcore.compare_weights import compare_weights

own, baseline, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
metadata = pickle.loads((own / ".metadata").read_bytes())
tensors = metadata.state_dict_metadata
for key in [key for key in tensors if key.startswith("decoder.layers.3.")]:
    del tensors[key]
assert len(tensors[name].chunks) == 2
tensors[name] = replace(tensors[name], chunks=tensors[name].chunks[:1])
(own / ".metadata").write_bytes(pickle.dumps(metadata))
context = SimpleNamespace(final_checkpoint=own, baseline_final_checkpoint=baseline, case=SimpleNamespace(baseline="b"))
print(json.dumps(asdict(compare_weights(context))))
"""


@pytest.mark.slow
def test_weights_that_are_absent_are_named(parity: Run, stack_python: Path, tmp_path: Path) -> None:
    checkpoints = parity.out / "checkpoints"
    shutil.copytree(checkpoints / "gpt-fp32-tp2" / "final", tmp_path / "own")
    halved = "decoder.layers.0.mlp.linear_fc1.weight"
    arguments = (str(tmp_path / "own"), str(checkpoints / BASELINE / "final"), halved)
    weights = json.loads(python(stack_python, DAMAGED, tmp_path, *arguments).splitlines()[-1])
    layer = [name for name in weights["missing"] if name.startswith("decoder.layers.3.")]
    assert len(layer) == 12
    assert sorted([*layer, halved]) == weights["missing"]
    assert weights["tensors"] == parity.cases["gpt-fp32-tp2"]["weights"]["tensors"] - 13
