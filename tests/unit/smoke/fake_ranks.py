"""A rank program that trains nothing and fails in every way a real one can.

The first word of a case's id says what its ranks do. It is loaded into the real fork server, so that
what is tested is the real runner, forks and signals included.
"""

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import time
import traceback
from dataclasses import replace
from pathlib import Path

from envbuild_smoke.rank_context import RankContext, nccl_log_of
from envbuild_smoke.results import BandwidthLine, Observed, Point, Step, Weights


def case(context: RankContext) -> None:
    folder = context.out / "cases" / context.case.id
    (folder / f"rank{context.rank}.pid").write_text(str(os.getpid()))
    (folder / f"rank{context.rank}.context").write_text(
        json.dumps({"device_index": context.device_index, "parent": os.getppid(), "save": context.save_final_weights})
    )
    print(f"hello from rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, {os.environ['LOCAL_WORLD_SIZE']} here")
    globals()[context.case.id.split("-")[0]](context)


def train(context: RankContext) -> None:
    """All goes well: a baseline leaves its weights, and the last rank reports."""
    if context.case.baseline is None:
        context.checkpoint.mkdir(parents=True, exist_ok=True)
    if context.rank == context.world_size - 1:
        for step in range(context.part.after + 1, context.part.until + 1):
            report(context, step, 7.0 - step)
    if context.case.compare_weights and context.is_last and context.rank == 0:
        context.report(weights=compared(context))


def report(context: RankContext, step: int, loss: float) -> None:
    context.report_step(Step(step=step, loss=loss, grad_norm=1.0 / step, seconds=0.0))


def saves(context: RankContext) -> None:
    """A baseline that reports its saved weights, and runs until a file exists."""
    context.checkpoint.mkdir(parents=True)
    context.report(weights_saved=True)
    wait_for(context.out / "go")
    if context.save_final_weights:
        context.final_checkpoint.mkdir(parents=True)
    train(context)


def waits(context: RankContext) -> None:
    """Reports its steps, and waits for a file."""
    train(context)
    wait_for(context.out / "go")


def opens(context: RankContext) -> None:
    """Lets such a baseline end."""
    (context.out / "go").touch()
    train(context)


def meets(context: RankContext) -> None:
    """The ranks meet at the port: rank 0 got the socket that listens there."""
    if context.rank == 0:
        assert context.listener is not None
        with socket.socket(fileno=context.listener) as listener:
            for _ in range(context.world_size - 1):
                connection, _address = listener.accept()
                connection.close()
    else:
        socket.create_connection(("127.0.0.1", context.port), timeout=300).close()
    train(context)


OBSERVED = Observed(
    **dict.fromkeys(("layer_spec", "attention_backend"), "local"),
    **dict.fromkeys(("attention", "router_gemm", "normalization", "optimizer", "params_dtype", "samples_digest"), "x"),
    **dict.fromkeys(("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), False),
    **dict.fromkeys(("gradient_buckets", "parameters", "trainable_parameters"), 1),
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "loss_scale"), 0.0),
    gradients_dtype="x",
    libraries={},
)


def misreports(context: RankContext) -> None:
    context.report(observed=replace(OBSERVED, parameters="all"))
    train(context)


def observes(context: RankContext) -> None:
    context.report(observed=OBSERVED)
    train(context)


def stopped(context: RankContext) -> None:
    """Rank 1 is stopped: it neither runs nor ends."""
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        wait_for_nothing()


def silent(context: RankContext) -> None:
    """Rank 0 leaves with status 0 and has done nothing."""
    if context.rank == 0:
        os._exit(0)
    train(context)


def late(context: RankContext) -> None:
    """All steps are done; then rank 0 raises while it tears down."""
    train(context)
    if context.rank == 0:
        time.sleep(0.1)
        raise RuntimeError("planted in the teardown")


def prints(context: RankContext) -> None:
    """Output of Python and of a C library that buffers."""
    ctypes.CDLL(None).printf(b"C of %d in %s\n", context.rank, context.case.id.encode())
    print(f"Python of {context.rank} in {context.case.id}", end="")
    train(context)


def compared(context: RankContext) -> Weights:
    """What the comparison of weights gives; some fail."""
    if "bad" in context.case.id:
        raise ValueError("planted in the comparison")
    return Weights(
        compared_with=str(context.case.baseline),
        tensors=3,
        largest_relative_difference=0.0,
        worst="x",
        missing=(),
        unexpected=(),
    )


def bandwidth(context: RankContext, sizes: tuple[int, ...]) -> BandwidthLine:
    """A sweep over ranks that live for it alone."""
    (context.out / "cases" / context.case.id / f"rank{context.rank}.pid").write_text(str(os.getpid()))
    assert context.world_size == context.case.world_size
    fault = os.environ.get("FAKE_SWEEP", "")
    if fault == "hangs":
        wait_for_nothing()
    if fault == "raises":
        log = nccl_log_of(context.out / "cases" / context.case.id, context.rank)
        log.write_text("n:71:90 [0] NCCL INFO NET/IB : No device found.\nn:71:90 [0] NCCL INFO Using network Socket\n"
                       "n:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n")  # fmt: skip
        raise RuntimeError("planted in the sweep")
    points = tuple(
        Point(bytes=size, seconds=0.5, algorithm_gigabytes_per_second=2.0, bus_gigabytes_per_second=1.0)
        for size in sizes
    )
    return BandwidthLine(ranks=context.world_size, backend="gloo", points=points, all_gather=points, all_to_all=points)


def raised_mark(context: RankContext, rank: int) -> Path:
    """The file that a rank makes once it has reported what it raised."""
    return context.out / "cases" / context.case.id / f"rank{rank}.raised"


def mark_raised(context: RankContext) -> None:
    """Called where the traceback is printed, which comes after the report."""
    raised_mark(context, context.rank).touch()


def raises(context: RankContext) -> None:
    """Rank 1 raises first, but rank 0, whose connection broke, is the first to be gone."""
    if context.rank == 1:
        traceback.print_exc = lambda: (mark_raised(context), time.sleep(0.3))
        raise ValueError("planted in rank 1")
    wait_for(raised_mark(context, 1))
    raise ConnectionError("rank 0 lost its peer")


def nccl(context: RankContext) -> None:
    """Rank 1 raises what torch makes of a warning of NCCL."""
    train(context)
    if context.rank == 1:
        print("node:1:1 [1] transport/p2p.cc:275 NCCL WARN Cuda failure 2 'out of memory'", flush=True)
        raise RuntimeError("NCCL Error 1: unhandled cuda error")


def exits(context: RankContext) -> None:
    """Rank 1 exits without an exception; rank 0 records its broken connection before that is seen."""
    if context.rank == 1:
        wait_for(raised_mark(context, 0))
        os._exit(3)
    traceback.print_exc = lambda: mark_raised(context)
    raise ConnectionError("rank 0 lost its peer")


def killed(context: RankContext) -> None:
    """Rank 0 is killed from outside, as the kernel does when memory runs out; rank 1 waits for it forever."""
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def hangs(context: RankContext) -> None:
    """Rank 0 is done, rank 1 never will be, and a process that rank 1 started neither."""
    if "HANGS" in os.environ:
        return train(context)
    if context.rank == 1:
        start_child(context)
        wait_for_nothing(context.out / "cases" / context.case.id / "hangs")
    return None


def writes(context: RankContext) -> None:
    """Where the disk is full nothing can be written."""
    if "FULL" in os.environ:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if context.case.nodes > 1:
        wait_for_nothing()
    train(context)


def managed(context: RankContext) -> None:
    """A process that rank 1 started is one it waits for, as for multiprocessing's manager."""
    if context.rank == 1:
        subprocess.run(["sleep", "3600"])
        raise EOFError("the manager is gone")


def signalled(context: RankContext) -> None:
    """Rank 1 raises when it gets the signal for its stacks, so after its time limit."""

    def answer(_number: int, _frame: object) -> None:
        raise EOFError("raised too late to be the cause")

    if context.rank == 1:
        signal.signal(signal.SIGUSR1, answer)
        wait_for_nothing()


def lingers(context: RankContext) -> None:
    """Rank 1 raises before the time limit and is not gone when that comes."""
    if context.rank == 1:
        traceback.print_exc = wait_for_nothing
        raise ValueError("planted in rank 1")
    wait_for_nothing()


def start_child(context: RankContext) -> None:
    child = subprocess.Popen(["sleep", "3600"])
    (context.out / "cases" / context.case.id / f"child{context.rank}.pid").write_text(str(child.pid))


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def wait_for_nothing(waits: Path | None = None) -> None:
    """Never ends; lets others know by a file that it began."""
    if waits is not None:
        waits.touch()
    time.sleep(3600)


def ignores(context: RankContext) -> None:
    """Ranks that ignore signals to end, and a process that one started."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_child(context)
    (context.out / "forkserver").write_text(str(os.getppid()))
    train(context)
    time.sleep(3600)


def nan(context: RankContext) -> None:
    report(context, 1, 6.0)
    report(context, 2, float("nan"))


def short(context: RankContext) -> None:
    """Ends well one step early."""
    if context.rank == 0:
        report(context, 1, 6.0)


def leaves(context: RankContext) -> None:
    """Rank 0 calls sys.exit with a status; rank 1 would have gone on."""
    if context.rank == 0:
        raise SystemExit(4)
    time.sleep(3600)


def orphans(context: RankContext) -> None:
    """Ends well, but leaves a process behind."""
    start_child(context)
    train(context)


def parricide(context: RankContext) -> None:
    """The fork server is killed under its ranks."""
    if context.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


def unlucky(context: RankContext) -> None:
    """The first time, the fork server is killed once another case runs at the same time."""
    if not (context.out / "unlucky").exists():
        if context.rank == 0:
            wait_for(context.out / "neighbour")
            (context.out / "unlucky").touch()
            os.kill(os.getppid(), signal.SIGKILL)
        wait_for_nothing()
    train(context)


def raiseslater(context: RankContext) -> None:
    """A rank that the first part did not have raises in the second one."""
    if context.rank == 2:
        raise ValueError("planted in the second part")
    train(context)


def unluckylater(context: RankContext) -> None:
    """The first time, the fork server is killed in the second part."""
    if context.part.after and context.rank == 0 and not (context.out / "unlucky").exists():
        (context.out / "unlucky").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        wait_for_nothing()
    train(context)


def neighbour(context: RankContext) -> None:
    """Runs at the same time, and does not end the first time."""
    (context.out / "neighbour").touch()
    if not (context.out / "unlucky").exists():
        wait_for_nothing()
    train(context)


def unluckysaves(context: RankContext) -> None:
    """A baseline under which the fork server is killed after it saved its weights; later the second time."""
    if (context.out / "unlucky").exists():
        time.sleep(0.2)
    context.checkpoint.mkdir(parents=True)
    context.report(weights_saved=True)
    if not (context.out / "unlucky").exists():
        wait_for(context.out / "needed")
        (context.out / "unlucky").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        wait_for_nothing()
    train(context)


def needs(context: RankContext) -> None:
    """Starts from such weights."""
    assert context.checkpoint.is_dir()
    (context.out / "needed").touch()
    if not (context.out / "unlucky").exists():
        wait_for_nothing()
    train(context)


def raisesfirst(context: RankContext) -> None:
    """Rank 1 raises, and the fork server is killed before it reports that."""
    if context.rank == 1:
        os.kill(os.getppid(), signal.SIGSTOP)
        traceback.print_exc = lambda: mark_raised(context)
        raise ValueError("planted in rank 1")
    wait_for(raised_mark(context, 1))
    os.kill(os.getppid(), signal.SIGKILL)
    wait_for_nothing()


def environment(context: RankContext) -> None:
    """Rank 1 writes down what it was given."""
    train(context)
    if context.rank == 1:
        seen = {**os.environ, "pid": os.getpid(), "group": os.getpgid(0)}
        (context.out / "environment").write_text("".join(f"{name}={value}\n" for name, value in seen.items()))


def lazily(context: RankContext) -> None:
    """What a library does that takes an optimizer where it finds one."""
    import fake_apex

    context.report(observed=OBSERVED)
    assert fake_apex.FusedAdam
    train(context)
