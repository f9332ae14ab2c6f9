"""The command line: `run` a plan, print the environment (`info`), and the internal `template`.

Progress goes to stdout as JSON lines, everything for people to stderr.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from envbuild_smoke import __version__

OK = 0
CASES_FAILED = 1
BAD_PLAN = 2
UNUSABLE_ENVIRONMENT = 3
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: the process's own) and return the exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "template":
        # Imported here: the runner must not load what only the template needs, and the reverse.
        from envbuild_smoke.template import serve

        return serve(options.entry, tuple(options.preload))
    if options.command == "info":
        from envbuild_smoke.environment import describe

        print(json.dumps(describe(options.device), indent=2))
        return OK
    return _run(options.plan, options.out, tuple(options.only))


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
    info = commands.add_parser("info", help="print the environment as JSON")
    info.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="as in a plan (default: cpu)")
    template = commands.add_parser("template", help="internal: the process that ranks are forked from")
    template.add_argument("--entry", required=True)
    template.add_argument("--preload", action="append", default=[])
    return parser


def _run(plan_path: Path, out: Path, only: tuple[str, ...]) -> int:
    # Here, for the same reason: the template must not depend on what only the runner needs.
    from envbuild_smoke.case_run import RunInterruptedError
    from envbuild_smoke.plan import PlanError
    from envbuild_smoke.plan_file import read_plan
    from envbuild_smoke.results import FILE_NAME
    from envbuild_smoke.runner import UnusableEnvironmentError, run_plan

    try:
        plan = read_plan(plan_path)
        cases = plan.selection(only)
    except PlanError as error:
        return _refuse(str(error))
    for name in (FILE_NAME, "cases", "checkpoints"):
        if (out / name).exists():
            return _refuse(f"{out} already holds {name}; nothing is overwritten, give another --out")
    stop = threading.Event()
    _stop_on_signals(stop)
    try:
        results = run_plan(plan, cases, out, emit=_Progress(), stop=stop)
    except RunInterruptedError:
        _say("interrupted; all ranks were killed, the results of finished cases are kept")
        return INTERRUPTED
    except UnusableEnvironmentError as error:
        _say(f"this environment cannot run the plan: {error}")
        return UNUSABLE_ENVIRONMENT
    for result in results:
        if result.failure is not None:
            where = f" (log: {out / result.failure.log})" if result.failure.log else ""
            _say(f"{result.case}: {result.status}: {result.failure.message}{where}")
    completed = sum(result.status == "completed" for result in results)
    _say(f"{completed} of {len(results)} cases completed; results in {out / FILE_NAME}")
    return OK if completed == len(results) else CASES_FAILED


def _stop_on_signals(stop: threading.Event) -> None:
    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    # SIGHUP too: a lost terminal must not leave GPUs occupied.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)


class _Progress:
    """Prints events as JSON lines; a reader that went away does not end the run."""

    def __init__(self) -> None:
        self._broken = False

    def __call__(self, event: dict[str, Any]) -> None:
        if self._broken:
            return
        try:
            # Flushed, for whoever watches through a pipe.
            print(json.dumps(event), flush=True)
        except BrokenPipeError:
            self._broken = True


def _refuse(message: str) -> int:
    _say(message)
    return BAD_PLAN


def _say(message: str) -> None:
    with suppress(BrokenPipeError):
        print(f"envbuild-smoke: {message}", file=sys.stderr, flush=True)


def close_streams() -> None:
    """Write out what is buffered; when the reader has left, to nowhere, so that Python does not complain at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # noqa: PERF203 - one stream at a time
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
