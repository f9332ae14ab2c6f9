"""What an interrupted run left behind, and whether another may resume it."""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild_smoke.network.hosts import MeasuredHosts, measured_hosts
from envbuild_smoke.plan.json_reader import PlanError, read_object
from envbuild_smoke.plan.models import Case, Plan
from envbuild_smoke.rank_context import FINAL, INITIAL, checkpoint_path
from envbuild_smoke.results import KINDS, CaseLine, RunLine
from envbuild_smoke.run.jobs import Key
from envbuild_smoke.run.results import FILE_NAME
from envbuild_smoke.run.task_run import repeat_folder

LOCK = ".lock"
# Must be the same in both parts of a run: else the results would be of two environments.
_SAME = ("smoke_digest", "image", "isolation", "environment_findings")
_SAME_ENVIRONMENT = ("python", "versions", "files", "device")
# The types of lines that have hosts, or what was measured on them.
_OF_HOSTS = ("run", "resumed", "node", "bandwidth")
# Ranks of a runner that was killed are gone a moment after it.
LOCK_SECONDS = 5.0


class ResumeError(Exception):
    """There is nothing to resume, or it belongs to something else."""


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    """The first line of the run, the cases that have ended, by ID and repeat, and what was measured.

    `ended` is true when the run reached its end; `whole_bytes` is the length of the lines before that, `cut_bytes` that
    of an incomplete last line.
    """

    run_line: RunLine
    cases: dict[tuple[str, int], CaseLine]
    measured: MeasuredHosts
    ended: bool
    whole_bytes: int
    cut_bytes: int


def lock_folder(out: Path, name: str = LOCK, seconds: float = LOCK_SECONDS) -> int:
    """Lock the output directory and return the descriptor; every process of the run keeps it open until it ends.

    Raises ResumeError when processes of another run have it, and do not end in so many seconds.
    """
    descriptor = os.open(out / name, os.O_RDWR | os.O_CREAT, 0o600)
    limit = time.monotonic() + seconds
    while not _locked(descriptor):
        if time.monotonic() > limit:
            os.close(descriptor)
            raise ResumeError(f"{out} is in use by another run, or by ranks that it left: end it, or use another --out")
        time.sleep(0.05)
    return descriptor


def _locked(descriptor: int) -> bool:
    try:
        # flock and not a file with a pid: the kernel drops the lock with the last process that holds the descriptor.
        # Ranks inherit it, so those that a killed runner left are noticed.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_previous(out: Path, plan: Plan) -> PreviousRun:
    """Read the results in `out`, up to an incomplete last line.

    Raises ResumeError when there are none, or they are of another plan.
    """
    path = out / FILE_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ResumeError(f"{out} has no {FILE_NAME} to resume; run without --resume") from None
    whole, lines = _whole_lines(content)
    try:
        run = read_object(RunLine, lines[0] if lines else None, "run")
    except PlanError as error:
        raise ResumeError(
            f"{path} does not begin with the line of a run ({error}); run again with another --out"
        ) from None
    for name, here in (("plan_digest", plan.digest), ("nonce", plan.nonce)):
        if getattr(run, name) != here:
            raise ResumeError(
                f"{path} belongs to another plan: its {name} is {getattr(run, name)}, this plan's is {here}; "
                "use the plan it was started with, or another --out"
            )
    ended = lines[-1].get("type") == "end"
    before_end = whole - len(content[:whole].splitlines(keepends=True)[-1]) if ended else whole
    try:
        results = [read_object(CaseLine, line, "case") for line in lines if line.get("type") == "case"]
        kinds = [(line, str(line.get("type"))) for line in lines]
        measured = measured_hosts(read_object(KINDS[kind], line, kind) for line, kind in kinds if kind in _OF_HOSTS)
    except PlanError as error:
        raise ResumeError(f"{path} is damaged: a line cannot be read ({error}); run again with another --out") from None
    return PreviousRun(
        run_line=run,
        cases={
            (result.case, result.repeat): result
            for result in results
            if result.failure is None or not result.failure.is_from_outside
        },
        measured=measured,
        ended=ended,
        whole_bytes=before_end,
        cut_bytes=len(content) - whole,
    )


def check_same_environment(previous: PreviousRun, run_line: RunLine) -> None:
    """Raise ResumeError unless runner, environment and machine are those of the previous run."""
    different = [name for name in _SAME if getattr(previous.run_line, name) != getattr(run_line, name)]
    then, here = previous.run_line.environment, run_line.environment
    different += [f"environment.{name}" for name in _SAME_ENVIRONMENT if getattr(then, name) != getattr(here, name)]
    if _gpus(previous.run_line) != _gpus(run_line):
        different.append("machine.gpus")
    if different:
        raise ResumeError(
            f"the run cannot be resumed here: {', '.join(different)} differ from when it began; run again with another "
            "--out"
        )


def _gpus(line: RunLine) -> set[tuple[str, str, str]]:
    # Not by UUID: a run may go on on another node of the same kind.
    return {(gpu.name, gpu.driver, gpu.compute_capability) for gpu in line.machine.gpus}


def _whole_lines(content: bytes) -> tuple[int, list[dict[str, object]]]:
    """Return how many bytes are whole lines, and the lines."""
    lines: list[dict[str, object]] = []
    length = 0
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(value, dict):
            break
        length += len(line)
        lines.append(value)
    return length, lines


def check_checkpoints(plan: Plan, cases: Iterable[Case], out: Path, results: Mapping[Key, CaseLine]) -> None:
    """Raise ResumeError where a case is left whose baseline completed, and its checkpoint is no longer there."""
    for case in cases:
        for repeat in plan.runs_of(case):
            baseline = results.get((str(case.baseline), repeat))
            if (case.id, repeat) in results or baseline is None or baseline.status != "completed":
                continue
            for name in (INITIAL, FINAL) if case.compare_weights else (INITIAL,):
                folder = checkpoint_path(repeat_folder(out, repeat), baseline.case, name)
                if not folder.is_dir():
                    raise ResumeError(
                        f"the run cannot be resumed: {case.id} needs the checkpoint {folder}, which is gone; run again "
                        "with another --out"
                    )
