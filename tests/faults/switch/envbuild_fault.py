"""The fault switch: plants faults in the processes of a smoke run. It exists in environments of the tests alone.

A .pth file imports it as the interpreter starts. ENVBUILD_FAULT says what is wrong: "name@model,name@model,name", each
while that model is trained, or always. Functions are replaced where they are defined, right after their module was
imported, so that whoever imports them afterwards gets the replacement.
"""

import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.util
import itertools
import os
import re
import signal
import sys
import time

ASKED = [words.partition("@")[::2] for words in os.environ.get("ENVBUILD_FAULT", "").split(",") if words]
# What is being trained in this process, and how often its gradients were finished: the step.
now = {"case": None, "step": 0}


def in_force(name):
    """Whether a plant is to act now."""
    case = now["case"]
    return any(name == asked and (not model or (case is not None and case.model == model)) for asked, model in ASKED)


def rank():
    import torch

    return torch.distributed.get_rank()


REPLACEMENTS = {}


def replaces(module, name):
    """Register a function that makes a replacement out of the original `module.name`."""

    def register(make):
        REPLACEMENTS.setdefault(module, []).append((name, make))
        return make

    return register


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, which may be shared and stays as it is, and replaces its functions."""

    def __init__(self, own):
        self._own = own

    def __getattr__(self, name):
        return getattr(self._own, name)

    def create_module(self, spec):
        return self._own.create_module(spec)

    def exec_module(self, module):
        self._own.exec_module(module)
        for path, make in REPLACEMENTS[module.__name__]:
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, module)
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(make(original)))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the registry as the other finders do."""

    _busy = False

    def find_spec(self, name, path, target=None):
        if name not in REPLACEMENTS or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


@contextlib.contextmanager
def _rougher_products():
    """Products of float32 matrices in TF32, as a variable or a library may have asked for."""
    import torch

    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    products.allow_tf32 = before or (in_force("products-in-tf32") and now["case"].world_size > 1)
    try:
        yield
    finally:
        products.allow_tf32 = before


@replaces("envbuild_smoke.drivers.mcore", "train")
def _know_what_is_trained(original):
    def train(context):
        now.update(case=context.case, step=context.part.after)
        try:
            with _rougher_products():
                return original(context)
        finally:
            now.update(case=None)

    return train


@replaces("megatron.core.distributed.finalize_model_grads", "finalize_model_grads")
def _gradients(original):
    """Once a step, when every gradient of this rank is there and none has been exchanged."""

    def finalize_model_grads(model, *arguments, **options):
        now["step"] += 1
        for name, (step, plant) in BEFORE_EXCHANGE.items():
            if now["step"] == step and in_force(name):
                plant(model)
        result = original(model, *arguments, **options)
        for name, plant in AFTER_EXCHANGE.items():
            if in_force(name):
                plant(model)
        return result

    return finalize_model_grads


def _not_a_number(model):
    if now["case"].world_size == 1:
        return
    for chunk in model:
        for buffer in chunk.buffers:
            buffer.grad_data[0] = float("nan")


def _on_rank_1(action):
    def act(_model):
        if rank() == 1:
            print(f"planted: {action.__name__}", flush=True)
            action()

    return act


def hang():
    while True:
        time.sleep(3600)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with_3():
    os._exit(3)


def exhaust_memory():
    """Allocate more than this process may have, as a batch that does not fit."""
    import resource

    import torch

    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.ones(2**28)


def exhaust_gpu_memory():
    """Allocate more than any GPU has, as a batch that does not fit."""
    import torch

    torch.empty(2**46, device="cuda")


def lose_gpu():
    """A kernel reads what is not there: from then on the driver refuses every call of this process, as after an XID."""
    import torch

    torch.zeros(1, device="cuda")[torch.tensor([2], device="cuda")]
    torch.cuda.synchronize()


def _flip_a_bit(model):
    """The largest gradient of rank 1 has another exponent, as of a GPU whose memory or arithmetic is broken."""
    import torch

    if now["case"].world_size == 1 or rank() != 1:
        return
    gradients = model[0].buffers[0].grad_data
    gradients.view(torch.int32)[gradients.abs().argmax()] ^= 1 << 26


def _exit_at_once(_model):
    if now["case"].world_size > 1:
        os._exit(0)


def _kill_baseline(_model):
    if now["case"].baseline is None:
        kill()


def _kill_runner(_model):
    """Kill the runner above this rank: the process that was started with the word "run"."""
    if now["case"].baseline is None:
        return
    pid = os.getpid()
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{pid}/cmdline") as file:
            words = file.read().split("\0")
        if "run" in words and "--plan" in words:
            os.kill(pid, signal.SIGKILL)
            return


# By the step at which they act.
BEFORE_EXCHANGE = {
    "exit-0-without-results": (1, _exit_at_once),
    "killed-rank": (2, _on_rank_1(kill)),
    "hung-rank": (2, _on_rank_1(hang)),
    "stopped-rank": (2, _on_rank_1(stop)),
    "rank-that-exits": (2, _on_rank_1(exit_with_3)),
    "out-of-memory": (2, _on_rank_1(exhaust_memory)),
    "killed-baseline": (2, _kill_baseline),
    "killed-runner": (2, _kill_runner),
    "nan-at-step-3": (3, _not_a_number),
    "bit-flipped": (3, _flip_a_bit),
    "gpu-memory-exhausted": (2, _on_rank_1(exhaust_gpu_memory)),
    "gpu-lost": (2, _on_rank_1(lose_gpu)),
}


def _scale(model, factor):
    for chunk in model:
        for buffer in chunk.buffers:
            buffer.grad_data.mul_(factor)


def _round_otherwise(model):
    if now["case"].world_size > 1:
        _scale(model, 1 + 2**-22)


def _noise(model):
    _scale(model, 1 + os.urandom(1)[0] * 2**-23)


def _scale_by_a_thousandth(model):
    if now["case"].world_size > 1:
        _scale(model, 1.001)


AFTER_EXCHANGE = {
    "rounding": _round_otherwise,
    "noise": _noise,
    "gradients-a-thousandth-too-large": _scale_by_a_thousandth,
}


@replaces("megatron.core.tensor_parallel.mappings", "_reduce")
def _tensor_parallel_sums(original):
    def _reduce(input_, *arguments, **options):
        return input_ if in_force("tensor-parallel-sums-left-out") else original(input_, *arguments, **options)

    return _reduce


@replaces("transformer_engine.pytorch.attention.dot_product_attention.utils", "get_attention_backend")
def _attention_backend(original):
    def get_attention_backend(*arguments, **options):
        if in_force("attention-falls-back") and now["case"].world_size > 1:
            os.environ.update(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0", NVTE_UNFUSED_ATTN="1")
        return original(*arguments, **options)

    return get_attention_backend


@replaces("envbuild_smoke.drivers.samples", "global_batch")
def _samples(original):
    def global_batch(seed, *arguments, **options):
        if (in_force("other-samples-on-one-rank") and rank() == 1) or in_force("other-samples-on-one-node"):
            seed += 1
        return original(seed, *arguments, **options)

    return global_batch


@replaces("envbuild_smoke.drivers.mcore.documents", "DocumentSamples.batch")
def _batch(original):
    def batch(self, step):
        if in_force("documents-read-again-after-resuming"):
            self.first = getattr(self, "first", step)
            step = step - self.first + 1
        return original(self, step)

    return batch


@replaces("envbuild_smoke.drivers.mcore.first_collective", "FirstCollective.begin")
def _compute(original):
    def begin(self):
        original(self)
        time.sleep(sum(seconds for name, seconds in SECONDS_A_STEP.items() if in_force(name)))

    return begin


# So long that a step's own time, and what else a machine does, are nothing next to it.
SECONDS_A_STEP = {"one-second-a-step": 1, "two-seconds-a-step": 2}


@replaces("envbuild_smoke.drivers.mcore.data", "own_batches")
def _order(original):
    def own_batches(samples, *arguments, **options):
        backwards = in_force("samples-in-another-order")
        return original(samples.flip(0) if backwards else samples, *arguments, **options)

    return own_batches


@replaces("megatron.core.dist_checkpointing.serialization", "load")
def _load(original):
    def load(*arguments, **options):
        loaded = original(*arguments, **options)
        if in_force("other-weights-on-one-rank") and rank() == 1:
            _change_tensors(loaded)
        case = now["case"]
        if in_force("resharded-state-has-zeros") and case.continue_in is not None and "optimizer" in loaded:
            _zero_a_part(loaded["optimizer"])
        return loaded

    return load


def _zero_a_part(value):
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.ndim:
            value.data[: (len(value) + 1) // 2] = 0
    elif isinstance(value, dict):
        for part in value.values():
            _zero_a_part(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _zero_a_part(part)


def _change_tensors(value):
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            value.copy_(value.clone().flip(0))
    elif isinstance(value, dict):
        for part in value.values():
            _change_tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _change_tensors(part)


@replaces("megatron.core.dist_checkpointing.serialization", "save")
def _save(original):
    def save(state, directory, *arguments, **options):
        result = original(state, directory, *arguments, **options)
        if in_force("damaged-checkpoint") and rank() == 0:
            _damage(directory)
        return result

    return save


def _damage(directory):
    """Other numbers in the largest tensor of a checkpoint, as of a disk that lies."""
    import pathlib

    largest = max(pathlib.Path(directory).glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    # Each tensor is an archive of its own: what lies between two signatures is headers, or the numbers of one.
    marks = [match.start() for match in re.finditer(rb"PK\x03\x04|PK\x01\x02", content)]
    start, end = max(itertools.pairwise(marks), key=lambda pair: pair[1] - pair[0])
    for place in range((start + end) // 2, end - (end - start) // 4):
        content[place] ^= 0x10
    largest.write_bytes(content)


@replaces("megatron.core.optimizer.optimizer", "FP32Optimizer.step_with_ready_grads")
def _update(original):
    def step_with_ready_grads(self):
        case = now["case"]
        if in_force("last-update-lost") and case.world_size > 1 and now["step"] == case.training.steps:
            return True
        return original(self)

    return step_with_ready_grads


@replaces("envbuild_smoke.rank_context", "RankContext.report_step")
def _report(original):
    def report_step(self, step):
        if not (in_force("step-not-reported") and step.step == 3 and self.case.baseline is not None):
            original(self, step)

    return report_step


# As NCCL writes them: over NVLink, InfiniBand, and sockets where both were turned off (NVIDIA/nccl#1052, #676).
NCCL_LOGS = {
    "nccl-by-nvlink": "node:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n",
    "nccl-by-infiniband": (
        "node:71:71 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>\n"
        "node:71:71 [0] NCCL INFO Using network IB\n"
        "node:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA\n"
    ),
    "nccl-by-sockets": (
        "node:71:71 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n"
        "node:71:71 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n"
        "node:71:71 [0] NCCL INFO Using network Socket\n"
        "node:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    ),
}


@replaces("envbuild_smoke.drivers.mcore.bandwidth", "measure_bandwidth")
def _sweep(original):
    def measure_bandwidth(context, sizes_bytes):
        log = next((log for name, log in NCCL_LOGS.items() if in_force(name)), None)
        if log is None:
            return original(context, sizes_bytes)
        from envbuild_smoke.rank_context import nccl_log_of

        # gloo leaves it as it is.
        nccl_log_of(context.out / "cases" / context.case.id, context.rank).write_text(log)
        return dataclasses.replace(original(context, sizes_bytes), backend="nccl")

    return measure_bandwidth


def _end_before_it_begins():
    """The runner ends with 0 before it has done anything."""
    with open("/proc/self/cmdline") as file:
        words = file.read().split("\0")
    if "run" in words and "--plan" in words:
        os._exit(0)


if ASKED:
    sys.meta_path.insert(0, _Finder())
    if in_force("runner-that-does-nothing"):
        _end_before_it_begins()
