"""A rank process: takes tasks from the runner, one after the other, until the runner disconnects.

It stays alive between cases, with its libraries imported and, on a GPU, with CUDA started; the driver tears
down what a case set up. A task that raises ends the process, since its state is unknown.

The runner sends a RankCommand for each task; the rank sends {"event": "ready"} when the libraries are there, and
{"event": "done"} with the fields of Done; meanwhile {"event": "report"} with those of Report, and if the task raises,
{"event": "raised"} with those of RaisedFailure.
"""

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from envbuild_smoke.environment.foreign_modules import new_files
from envbuild_smoke.environment.libraries import mapped
from envbuild_smoke.error_line import error_line
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import Case, Plan
from envbuild_smoke.rank_context import RaisedFailure, RankContext, saves_final_weights
from envbuild_smoke.ranks.ipc import Channel, Done, RankCommand
from envbuild_smoke.ranks.program import RankProgram

# A sweep is no case of the plan: its id begins with the name of its kind, and so does its folder.
BANDWIDTH: Literal["bandwidth"] = "bandwidth"


def serve(program: RankProgram, plan: Plan, channel: Channel) -> int:
    """Run tasks until the runner disconnects or one of them fails; return the exit status."""
    _raise_oom_score()
    enable_stack_dumps()
    channel.send({"event": "ready"})
    while (message := channel.receive()) is not None:
        command = read_object(RankCommand, message, "command")
        redirect_output(command.log)
        # The variables of torchrun: libraries read them though the driver passes rank and size itself.
        os.environ.update(command.variables)
        context = _context(command, plan, channel)
        status, answer = _run(program.tasks, context, command)
        _flush()
        # After a failure the process ends: peers, groups and the GPU's memory may be in any state.
        if status is not None:
            return status
        done = Done(answer=answer, libraries=mapped(), imported=new_files())
        channel.send({"event": "done", **asdict(done)})
    return 0


def enable_stack_dumps() -> None:
    """Let this process write its stacks when it crashes, and when the runner requests them (SIGUSR1)."""
    faulthandler.enable()
    # chain=False: without a handler of Python's the default of SIGUSR1 would end the process.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def redirect_output(log: str) -> None:
    """Redirect all output of this process, from Python or not, to the file `log`."""
    # O_APPEND: stdout and stderr, and children that inherit them, write to one file without overwriting.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)


def sweep_case(plan: Plan, name: str, ranks: int) -> Case:
    """Return the case that a bandwidth sweep runs as."""
    return replace(plan.cases[0], id=name, baseline=None, world_size=ranks)


def _context(command: RankCommand, plan: Plan, channel: Channel) -> RankContext:
    is_sweep = command.task == BANDWIDTH
    planned = None if is_sweep else plan.run_of(plan.case(command.case), command.repeat)
    case = planned or sweep_case(plan, command.case, command.world_size)
    part = case.parts[command.part]
    return RankContext(
        case=replace(case, layout=part.layout),
        part=part,
        model=plan.models[case.model],
        device=plan.device,
        out=Path(command.out),
        rank=command.rank,
        host=command.host,
        port=command.port,
        listener=channel.descriptor() if command.listens else None,
        device_index=command.device_index,
        world_size=command.world_size,
        save_final_weights=saves_final_weights(plan.cases, case),
        send=channel.send,
    )


def _run(tasks: str, context: RankContext, command: RankCommand) -> tuple[int | None, object]:
    """Run the function of the task; return the exit status if this is the process's end, and the answer."""
    arguments = [command.sizes] if command.task == BANDWIDTH else []
    try:
        function: Callable[..., object] = getattr(importlib.import_module(tasks), command.task)
        return None, function(context, *arguments)
    except SystemExit as error:
        # SystemExit's code may be None (0), a number, or a text (1), as for the interpreter.
        return error.code if isinstance(error.code, int) else int(error.code is not None), None
    except BaseException as error:  # noqa: BLE001 - reported, and turned into the exit status
        _report_failure(context, error)
        traceback.print_exc()
        return 1, None


def _report_failure(context: RankContext, error: BaseException) -> None:
    raised = RaisedFailure(
        monotonic_seconds=time.monotonic(),
        kind="not-finite" if isinstance(error, FloatingPointError) else "exception",
        message=error_line(error),
    )
    context.send({"event": "raised", **asdict(raised)})


def _flush() -> None:
    """Flush the buffers of Python and the C libraries to the log of this task."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # C's stdio buffers a file by blocks: what NCCL or a kernel printed would land in the log of the next case.
    ctypes.CDLL(None).fflush(None)


def _raise_oom_score() -> None:
    """Make the kernel, when memory runs out, end a rank rather than the fork server."""
    with suppress(OSError):
        # proc(5): from -1000 to 1000. Raising it needs no privilege.
        Path("/proc/self/oom_score_adj").write_text("800", encoding="ascii")
