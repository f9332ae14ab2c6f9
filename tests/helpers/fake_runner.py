"""A fake of the smoke runner: numbers that agree, with faults put in. Needs only the standard library.

Zipped as it is, it runs inside an image that has no torch; the variables that it reports then say what it saw there.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

SCHEMA = "envbuild.results/2"
# A port of the machine outside on which somebody listens.
PORT = 0
OWN = object()
GPU = {"index": 0, "uuid": "GPU-0", "name": "NVIDIA H200", "memory": "143771 MiB", "driver": "580.82.07"}


def run_line(
    plan_bytes, *, findings=(), variables=None, image=None, smoke_digest=None, gpus=(), fingerprint=OWN, **changes
):
    """The first line of results.jsonl; ``image`` is the digest of what was hashed, by default the plan's.

    ``fingerprint`` is what the image says of itself, by default that it is of the plan's lock.
    """
    plan = json.loads(plan_bytes)
    subject = plan["subject"]
    hashed = image or subject.get("sqsh_digest" if subject["form"] == "sqsh" else "oci_digest")
    inside = {"lock_digest": subject["lock_digest"]} if fingerprint is OWN else fingerprint
    environment = {
        "python": "3.11.2", "platform": "linux", "cpu_count": 2, "files": {},
        "versions": {canonicalize_name(name): version for name, version in plan["expected_versions"].items()},
        "device": plan["device"], "gpus": [], "cuda_redirects": ["torch.cuda.synchronize"],
    }  # fmt: skip
    machine = {
        "cpu_model": "A processor", "cpu_count": 2, "memory_bytes": 1 << 33, "cuda": None, "nccl": None,
        "gpus": [{**GPU, "compute_capability": "9.0", **gpu} for gpu in gpus],
        "topology": None, "variables": variables or {},
    }  # fmt: skip
    return {
        "schema": SCHEMA, "type": "run", "plan_digest": f"sha256:{hashlib.sha256(plan_bytes).hexdigest()}",
        "nonce": plan["nonce"], "subject": subject, "smoke_version": "2", "smoke_digest": smoke_digest,
        "started_at": "2026-01-01T00:00:00Z", "environment": environment, "environment_findings": list(findings),
        "machine": machine, "host": "node-0", "free_bytes": 1 << 33, "isolation": "live", "devices": [0, 1],
        "image": {"file_digest": hashed, "file_bytes": 10, "fingerprint": inside} if hashed else None,
        "gpu_states": [], **changes,
    }  # fmt: skip


def observed_of(case, model):
    """What a driver reports that built what the plan names."""
    return {
        "layer_spec": model["layer_spec"], "attention": "DotProductAttention",
        "attention_backend": case["settings"]["attention_backend"], "router_gemm": "none",
        "normalization": model["normalization"],
        "optimizer": "FP32Optimizer", "distributed_optimizer": case["settings"]["distributed_optimizer"],
        "overlap_grad_reduce": case["settings"]["overlap_grad_reduce"], "gradient_buckets": 3,
        "overlap_param_gather": case["settings"]["overlap_param_gather"],
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "parameters": 123456,
        "trainable_parameters": 123456, "samples_digest": "sha256:samples",
        "params_dtype": {"fp32": "torch.float32"}.get(case["precision"], "torch.bfloat16"), "libraries": {},
        "gradients_dtype": "float32", "main_weights_dtype": "float32", "loss_scale": 1.0,
        "cuda_graphs": int(case["settings"]["cuda_graph_impl"] != "none"),
        "configuration": configuration_of(case, model),
    }  # fmt: skip


def configuration_of(case, model):
    """A few fields of the library's configuration, as a driver reports them."""
    values = {"model.num_layers": str(model["num_layers"]), "model.hidden_dropout": "0.0"}
    if case["layout"]["tensor"] > 1:
        values["model.tensor_model_parallel_size"] = str(case["layout"]["tensor"])
    defaults = {
        "model.num_layers": "0", "model.hidden_dropout": "0.1", "model.tensor_model_parallel_size": "1",
        "model.qk_layernorm": "False", "model.timers": "None", "optimizer.lr": "None",
    }  # fmt: skip
    return {"values": values, "defaults": defaults if case["baseline"] is None else {}}


def reference_of(steps):
    """A comparison with the reference in which everything agrees."""
    tensors = [{"name": "decoder.layers.0.mlp.linear_fc1.weight", "relative_difference": 1e-7}]
    numbers = [{"loss": step["loss"], "grad_norm": step["grad_norm"]} for step in steps]
    kinds = dict.fromkeys(("activations", "gradients", "weights"), tensors)
    return {"reason": None, "samples": None, "steps": numbers, **kinds, "seconds": 0.5}


def gradients_of(factor=1.0):
    """The gradients of two tensors; ``factor`` multiplies them."""
    names = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight")
    return [
        {"name": name, "norm": factor * norm, "projections": [factor * norm, -factor * norm] * 2}
        for norm, name in enumerate(names, 1)
    ]


def perturbed_of(steps, runs):
    """Trainings with moved weights that move so far that the bands are as wide as the matrix allows."""
    numbers = [{"step": step["step"], "loss": 2 * (step["loss"] or 1), "grad_norm": 3.0} for step in steps]
    return [{"steps": numbers, "gradients": gradients_of(1 + 1e-6), "weights": 1.0}] * runs


def node_line(first, node, **changes):
    """The line of another node, where all is as in the ``first`` line of the results."""
    names = ("schema", "environment", "environment_findings", "machine", "image", "free_bytes", "gpu_states")
    own = {"type": "node", "node": node, "host": f"node-{node}", "clock_ahead_seconds": 0.001}
    return {**{name: first[name] for name in names}, **own, "clock_error_seconds": 0.0001, **changes}


def resumed_line(first, **changes):
    """Where a run was taken up again, on the hosts that the ``first`` line names."""
    own = {"type": "resumed", "at": "2026-01-01T00:00:30Z", "cut_bytes": 0}
    return {"schema": first["schema"], "host": first["host"], **own, **changes}


def repeats_of(plan, case):
    """The repeats of a case: those on its home node, or one on each node."""
    nodes, home = plan.get("nodes", 1), case["home_node"]
    return range(1 + (home or 0), nodes * plan["repeats"] + 1, 1 if home is None else nodes)


def room_of(case):
    """How many nodes a case needs, and devices on each: the most of the part that is saved and the one that goes on."""
    parts = [(case["layout"], case["nodes"])]
    parts.append((case.get("continue_in") or case["layout"], case.get("continue_nodes") or case["nodes"]))
    ranks = [layout["data"] * layout["tensor"] * layout["pipeline"] * layout["context"] for layout, _ in parts]
    return max(nodes for _, nodes in parts), max(ranks[index] // nodes for index, (_, nodes) in enumerate(parts))


def case_line(plan, case, repeat=1, factor=1.0):
    """A case that completed; ``factor`` multiplies its losses."""
    numbers = range(1, case["training"]["steps"] + 1)
    most, each = room_of(case)
    # JSON has no NaN: null stands for it.
    losses = [factor * (6.5 - number / 8) for number in numbers]
    steps = [
        {"step": number, "loss": loss if loss == loss else None, "grad_norm": 1.5 / number, "seconds": 0.1}
        for number, loss in zip(numbers, losses, strict=True)
    ]
    weights = {
        "compared_with": case["baseline"], "tensors": 7, "largest_relative_difference": 0.0, "worst": None,
        "missing": [], "unexpected": [],
    }  # fmt: skip
    nodes = plan.get("nodes", 1)
    measures = (repeat - 1) % nodes == (case["home_node"] or 0)
    return {
        "schema": SCHEMA, "type": "case", "case": case["id"], "repeat": repeat, "status": "completed", "steps": steps,
        "seconds": 1.5, "startup_seconds": 0.5, "started_seconds": 2.0, "devices": [*range(most * each)],
        "nodes": [(repeat - 1 + index) % nodes for index in range(most)],
        "fresh_processes": 0, "compute_seconds": [], "weights": weights if case["compare_weights"] else None,
        "observed": observed_of(case, plan["models"][case["model"]]), "failure": None, "logs": [], "restarted": None,
        "reference": reference_of(steps) if case["compare_reference"] and measures else None,
        "gradients": gradients_of(),
        "perturbed": perturbed_of(steps, case["perturbed_runs"]) if case["perturbed_runs"] and measures else None,
    }  # fmt: skip


def end_line(cases):
    """The last line, behind the lines of ``cases``."""
    completed = sum(line["status"] == "completed" for line in cases)
    finished = "2026-01-01T00:01:00Z"
    ends = {"cases": len(cases), "completed": completed, "finished_at": finished, "gpu_states": []}
    return {"schema": SCHEMA, "type": "end", **ends}


def bandwidth_line(planned, /, **changes):
    """The line of a sweep, on NVLink."""
    points = [
        {"bytes": size, "seconds": 0.01, "algorithm_gigabytes_per_second": 300.0, "bus_gigabytes_per_second": 300.0}
        for size in planned["sizes_bytes"]
    ]
    line = {
        "schema": SCHEMA, "type": "bandwidth", "ranks": planned["ranks"], "backend": "nccl",
        "transports": ["P2P/CUMEM"], "points": points, "all_gather": points, "all_to_all": points, "failure": None,
        "sweep": "node", "nodes": [0], "network_log": [],
    }  # fmt: skip
    return {**line, **changes}


def sweeps_of(plan):
    """The lines of all sweeps where every node is as it should be, each over the network that is expected."""
    planned, count = plan["bandwidth"], plan.get("nodes", 1)
    alone = [("node", [node]) for node in range(count)] if planned["ranks"] > 1 else []
    pairs = [("pair", [node, node + 1]) for node in range(0, count - 1, 2)]
    odd = [("pair", [0, count - 1])] if count > 1 and count % 2 else []
    ramp = [("ramp", list(range(size))) for size in sorted({4, 8, 16, count}) if 2 < size <= count]
    return [
        bandwidth_line(
            planned, sweep=kind, nodes=nodes, ranks=planned["ranks"] * len(nodes),
            transports=["P2P/CUMEM"] if kind == "node" else [plan["transport"] or "NET/IB"],
        )
        for kind, nodes in [*alone, *pairs, *odd, *ramp]
    ]  # fmt: skip


def results_of(plan_bytes: bytes, scale=None, sweep=None, **run) -> list[dict]:
    """The lines of results.jsonl for a plan.

    ``scale`` multiplies the losses of the cases it names; ``sweep`` has fields of the bandwidths' lines.
    """
    plan = json.loads(plan_bytes)
    cases = [
        case_line(plan, case, repeat, (scale or {}).get(case["id"], 1.0))
        for case in plan["cases"]
        for repeat in repeats_of(plan, case)
    ]
    swept = [{**line, **(sweep or {})} for line in sweeps_of(plan)] if plan["bandwidth"] else []
    first = run_line(plan_bytes, **run)
    nodes = [node_line(first, node) for node in range(1, plan.get("nodes", 1))]
    return [first, *nodes, *cases, *swept, end_line(cases)]


def write(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    words = sys.argv
    plan, out = (Path(words[words.index(option) + 1]) for option in ("--plan", "--out"))
    image = Path(words[words.index("--image") + 1]) if "--image" in words else None
    with socket.socket() as outside:
        seen = {"INTERFACES": " ".join(name for _, name in socket.if_nameindex())}
        seen["REACHED"] = str(outside.connect_ex(("127.0.0.1", PORT)) == 0)
    seen["WORDS"] = " ".join(words[1:])
    hashed = f"sha256:{hashlib.sha256(image.read_bytes()).hexdigest()}" if image else None
    own = f"sha256:{hashlib.sha256(Path(words[0]).read_bytes()).hexdigest()}"
    write(out / "results.jsonl", results_of(plan.read_bytes(), variables=seen, image=hashed, smoke_digest=own))


if __name__ == "__main__":
    main()
