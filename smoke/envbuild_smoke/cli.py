"""The command line: `run` a plan, and the internal `start`, `forkserver` and `rank`.

Progress goes to stdout as JSON lines, everything for people to stderr.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from envbuild_smoke import __version__

if TYPE_CHECKING:
    from envbuild_smoke.plan.models import Case, Plan
    from envbuild_smoke.results import Gpu, Image
    from envbuild_smoke.run.options import Options

# argparse exits with 2 too; 130 is 128 + SIGINT, as shells report it.
OK = 0
CASES_FAILED = 1
BAD_PLAN = 2
UNUSABLE_ENVIRONMENT = 3
WRONG_GPUS = 4
CANNOT_WRITE = 5
LOST_HEAD = 6
OUT_OF_TIME = 7
INTERRUPTED = 130

# How long a run may take to end its ranks by itself once its standard input is closed.
END_SECONDS = 10.0
_RESUME = "Resume with the same command and --resume"
_KEPT = f"All ranks were killed, the results of finished cases are kept. Free space or fix the permissions. {_RESUME}"
_INTERRUPTED = f"interrupted: all ranks were killed, the results of finished cases are kept. {_RESUME}"
_UNUSABLE = "this environment cannot run the plan"
_NOTHING_RUN = "Nothing was run. Free space, or name another --out"


def run_and_exit() -> None:
    """Run the command line of this process, and exit with its status."""
    status = main()
    close_streams()
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: the process's own) and return the exit status."""
    options = _parser().parse_args(arguments)
    # Internal commands of the same program: from a zipapp there is no other file that a child process could be started
    # with.
    if options.command in ("forkserver", "rank"):
        return _serve(options)
    if options.command == "start":
        return _start(options)
    status = _run(options)
    if options.token_file is not None:
        # A launcher of several nodes has one status of all their runners.
        _Progress()({"event": "exit", "node": options.node_rank, "status": status})
    return status


def _serve(options: argparse.Namespace) -> int:
    """Be one of the processes that the runner starts."""
    # Imported here: the runner must not load what only these need, and the reverse.
    from envbuild_smoke.plan.reader import parse_plan
    from envbuild_smoke.ranks import forkserver_main
    from envbuild_smoke.ranks.program import RankProgram

    program = RankProgram.from_argument(options.program)
    descriptor = options.plan_descriptor
    # Not read: the offset is shared with the other processes.
    plan = parse_plan(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    if options.command == "forkserver":
        return forkserver_main.serve(program, plan, descriptor, options.control)
    return forkserver_main.run_executed_rank(program, plan, options.channel)


def _start(options: argparse.Namespace) -> int:
    """Import a driver as the fork server does, and print the result on the last line, after a mark."""
    from envbuild_smoke.run.start_check import start_driver

    print(f"\n{options.mark}{json.dumps(asdict(start_driver(options.driver, options.device)))}", flush=True)
    return OK


# argparse, not click as in envbuild: the runner may import nothing but Python and what the stack under test has.
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="envbuild-smoke", description="Trains the cases of a plan inside the environment under test."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the cases of a plan")
    run.add_argument("--plan", type=Path, required=True, help="the plan.json to run")
    run.add_argument("--out", type=Path, required=True, help="directory for results, logs and checkpoints")
    run.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="ID",
        help="run only these cases, and their baselines",
    )
    run.add_argument(
        "--gpus", type=_names, default=(), metavar="LIST", help="indices or UUIDs; by default all that are visible"
    )
    run.add_argument(
        "--isolation",
        choices=("live", "process"),
        default="live",
        help="keep rank processes alive between cases (default), or start new interpreters for every case",
    )
    run.add_argument("--resume", action="store_true", help="resume the interrupted run in --out")
    run.add_argument("--end-with-stdin", action="store_true", help="stop when standard input is closed")
    run.add_argument("--image", type=Path, metavar="FILE", help="hash the file of the image this runs in")
    nodes = run.add_argument_group("several nodes", "One process a node; each value comes from the launcher.")
    nodes.add_argument("--nodes", type=int, default=1, metavar="N", help="how many nodes the run has")
    nodes.add_argument("--node-rank", type=int, default=0, metavar="R", help="which of them this is, from 0")
    nodes.add_argument(
        "--head", type=_address, metavar="HOST:PORT", help="node 0; port 0: any, which its results folder names"
    )
    run.add_argument(
        "--ends-at", type=_moment, metavar="SECONDS", help="start no case that would not end by then (since 1970)"
    )
    nodes.add_argument("--token-file", type=Path, metavar="FILE", help="what nodes prove to each other that they have")
    start = commands.add_parser("start", help="internal: import a driver, and print whether that starts CUDA")
    start.add_argument("--driver", required=True)
    start.add_argument("--device", choices=("cpu", "cuda"), required=True)
    start.add_argument("--mark", required=True)
    forkserver = commands.add_parser("forkserver", help="internal: the process that ranks are forked from")
    forkserver.add_argument("--control", type=int, required=True)
    rank = commands.add_parser("rank", help="internal: a rank in an interpreter of its own")
    rank.add_argument("--channel", type=int, required=True)
    for internal in (forkserver, rank):
        internal.add_argument("--program", required=True)
        internal.add_argument("--plan-descriptor", type=int, required=True)
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} must be a list of GPUs such as 0,1 or GPU-3f2a...")
    return names


def _moment(text: str) -> float | None:
    # Empty where the launcher does not know.
    return float(text) if text else None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a host and a port such as node-1:0")
    return host, int(port)


def _run(arguments: argparse.Namespace) -> int:
    # Imported here: the fork server must not load what only the runner needs.
    from envbuild_smoke.plan.reader import read_plan
    from envbuild_smoke.run import parent_watchdog, token_watch
    from envbuild_smoke.run.results import FILE_NAME
    from envbuild_smoke.runner import run_plan

    out = arguments.out
    stop = threading.Event()
    _stop_on_signals(stop)
    if arguments.end_with_stdin:
        parent_watchdog.start(stop, INTERRUPTED, grace_seconds=END_SECONDS)
    try:
        plan = read_plan(arguments.plan)
        # Checked in this order before anything is written: a refused run leaves no output directory, so the same
        # command with its fault corrected needs no --resume.
        cases = plan.selection(tuple(arguments.only))
        options = _options(arguments, plan, cases)
        if options.token:
            token_watch.start(arguments.token_file, stop)
        results = run_plan(plan, cases, out, emit=_Progress(), stop=stop, options=options)
    except Exception as error:
        status = _explained(error, out)
        if arguments.node_rank and arguments.head and status not in (LOST_HEAD, INTERRUPTED):
            _tell_head(arguments, str(error), stop)
        if status is None:
            raise
        return status
    if arguments.node_rank:
        _print("node 0 has ended the run")
        return OK
    for result in results:
        if result.failure is not None:
            where = f" (log: {out / result.failure.log})" if result.failure.log else ""
            _print(f"{result.case}: {result.status}: {result.failure.message}{where}")
    completed = sum(result.status == "completed" for result in results)
    _print(f"{completed} of {len(results)} cases completed; results in {out / FILE_NAME}")
    return OK if completed == len(results) else CASES_FAILED


def _tell_head(arguments: argparse.Namespace, why: str, stop: threading.Event) -> None:
    """Have node 0 end the run: it waits for this node."""
    from envbuild_smoke.nodes.node import tell_head
    from envbuild_smoke.nodes.wire import TokenError, read_token
    from envbuild_smoke.run.options import Options

    with suppress(TokenError):
        token = read_token(arguments.token_file)
        options = Options(node_rank=arguments.node_rank, head=arguments.head, token=token)
        tell_head(options, arguments.out, why, stop)


def _explained(error: Exception, out: Path) -> int | None:
    """Print why a run ended early, and return the exit status for it; None for what is a bug."""
    from envbuild_smoke.environment.gpus import CannotRunError, UnknownGpuError
    from envbuild_smoke.nodes.agent import LostHeadError
    from envbuild_smoke.nodes.head import NodesError
    from envbuild_smoke.nodes.wire import TokenError
    from envbuild_smoke.plan.json_reader import PlanError
    from envbuild_smoke.run.context import OutOfTimeError, RunInterruptedError
    from envbuild_smoke.run.results import FILE_NAME
    from envbuild_smoke.run.resume import ResumeError
    from envbuild_smoke.runner import DifferentNodesError, UnusableEnvironmentError

    kept = _KEPT if (out / FILE_NAME).exists() else _NOTHING_RUN
    over = f"the time is over, and {error} were not started; all results are kept. {_RESUME}"
    different = f"{error} differs from node 0, and no case was started: the results have both, and the judge names it"
    # By the classes of an error: the exit status, and what is printed.
    table: tuple[tuple[tuple[type[Exception], ...], int, str], ...] = (
        ((PlanError, UnknownGpuError, ResumeError, TokenError, _RefusedError), BAD_PLAN, str(error)),
        ((CannotRunError,), WRONG_GPUS, str(error)),
        ((OutOfTimeError,), OUT_OF_TIME, over),
        ((LostHeadError,), LOST_HEAD, str(error)),
        ((RunInterruptedError,), INTERRUPTED, _INTERRUPTED),
        ((DifferentNodesError,), CASES_FAILED, different),
        ((UnusableEnvironmentError, NodesError), UNUSABLE_ENVIRONMENT, f"{_UNUSABLE}: {error}"),
        ((OSError,), CANNOT_WRITE, f"{out} cannot be written or read: {error}. {kept}"),
    )
    for kinds, status, text in table:
        if isinstance(error, kinds):
            if isinstance(error, CannotRunError):
                print(json.dumps({"event": "cannot-run", "reason": error.reason, "message": text}), flush=True)
            _print(text)
            return status
    return None


class _RefusedError(Exception):
    """The arguments contradict each other, the plan or the output directory."""


def _options(arguments: argparse.Namespace, plan: "Plan", cases: "Sequence[Case]") -> "Options":
    """Check the rest of the arguments, and hash the image's file, before anything starts."""
    from envbuild_smoke.environment import gpus
    from envbuild_smoke.run.options import CACHES, Options
    from envbuild_smoke.run.results import FILE_NAME

    resume = arguments.resume and (arguments.out / FILE_NAME).exists()
    # Node 0 may have begun already.
    for name in () if resume or arguments.node_rank else (FILE_NAME, "cases", "checkpoints", CACHES):
        if (arguments.out / name).exists():
            raise _RefusedError(
                f"{arguments.out} already has {name}, and nothing is overwritten: use another --out, or --resume"
            )
    if arguments.gpus and plan.device == "cpu":
        raise _RefusedError("--gpus has no effect: the plan is for device cpu")
    chosen: tuple[Gpu, ...] = ()
    if plan.gpu is not None:
        # The sweep may need more GPUs than any case.
        ranks = plan.bandwidth.ranks if plan.bandwidth else 1
        count = max(ranks, *(case.slots_on_node for case in cases))
        chosen = gpus.select(plan.gpu, count, arguments.gpus)
    options = Options(
        gpus=chosen,
        isolation=arguments.isolation,
        resume=resume,
        image=_image(arguments, plan),
        ends_at=arguments.ends_at,
    )
    return _with_nodes(options, arguments, plan)


def _image(arguments: argparse.Namespace, plan: "Plan") -> "Image | None":
    """Hash the image's file, and check that it is the plan's; None where the plan is for none and none is named."""
    from envbuild_smoke.environment import machine

    wanted = plan.subject.get("sqsh_digest" if plan.subject.get("form") == "sqsh" else "oci_digest")
    if arguments.image is None:
        # Results without the digest of an image are not judged.
        if wanted is not None:
            raise _RefusedError(
                f"the plan is for image {wanted}: name the file that this was started from with --image, as the plan's "
                "README.md does"
            )
        return None
    try:
        image = machine.image(arguments.image)
    except OSError as error:
        raise _RefusedError(f"--image {arguments.image} cannot be read: {error.strerror or error}") from error
    if wanted is not None and image.file_digest != wanted:
        raise _RefusedError(
            f"--image {arguments.image} is {image.file_digest}, and the plan is for {wanted}: run it in that image, "
            "or write a plan for this one (--plan-out of envbuild certify)"
        )
    return image


def _with_nodes(options: "Options", arguments: argparse.Namespace, plan: "Plan") -> "Options":
    """Return the options with those of several nodes, where the run has them."""
    from envbuild_smoke.nodes.wire import read_token

    if arguments.nodes != plan.nodes:
        raise _RefusedError(f"the plan is for {plan.nodes} nodes, and --nodes is {arguments.nodes}")
    if arguments.nodes == 1:
        token = b"" if arguments.token_file is None else read_token(arguments.token_file)
        return replace(options, token=token, token_file=arguments.token_file)
    if arguments.head is None or arguments.token_file is None or not 0 <= arguments.node_rank < arguments.nodes:
        raise _RefusedError("--nodes needs --head, --token-file, and a --node-rank from 0 to one less than --nodes")
    token = read_token(arguments.token_file)
    options = replace(options, token=token, token_file=arguments.token_file)
    return replace(options, nodes=arguments.nodes, node_rank=arguments.node_rank, head=arguments.head)


def _stop_on_signals(stop: threading.Event) -> None:
    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    # SIGHUP too: a lost terminal must not leave GPUs occupied.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)


class _Progress:
    """Prints events as JSON lines; the run goes on when the reader closes the stream."""

    def __init__(self) -> None:
        self._broken = False

    def __call__(self, event: Mapping[str, object]) -> None:
        if event["event"] == "resumed":
            cut = f"; an incomplete last line of {event['cut_bytes']} bytes was cut off"
            _print(f"resuming: {event['kept']} results are kept{cut if event['cut_bytes'] else ''}")
        # A broken pipe stays broken: the results are in the file, and the certification must not fail for its watcher.
        if self._broken:
            return
        try:
            # Flushed, for whoever watches through a pipe.
            print(json.dumps(event), flush=True)
        except BrokenPipeError:
            self._broken = True


def _print(message: str) -> None:
    with suppress(BrokenPipeError):
        print(f"envbuild-smoke: {message}", file=sys.stderr, flush=True)


def close_streams() -> None:
    """Flush the streams; when the reader has left, to /dev/null, so that Python prints no error at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # noqa: PERF203 - one stream at a time
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
