"""Runs a plan in an executor, and reads its results."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.certify.judge.results import LARGEST_BYTES, Results, read_results
from envbuild.certify.run.executors import RESULTS_DIR, MachineOptions
from envbuild.certify.run.job import CertifyJob, CertifyRequest
from envbuild.certify.run.plan import deciding
from envbuild.certify.run.watcher import Watcher
from envbuild.core import jsonread, locks
from envbuild.core.digests import Json, sha256_bytes
from envbuild.core.errors import (
    CertificationCannotRunError,
    InterruptedByUserError,
    ResultsRefusedError,
    UsageError,
    disk_full,
)
from envbuild.core.exit_status import describe_status, ran_out_of_space, tail
from envbuild.core.files import machine_errors, read_plain, remove_tree, write_atomic
from envbuild.core.process import Finished
from envbuild.core.progress import Reporter
from envbuild.launch.executors import Executor, Task
from envbuild.launch.launchers import ON_CLUSTER
from envbuild.launch.results_file import RESULTS_FILE, is_whole, lines_of
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.plan.reader import parse_plan

PLAN_FILE, LOG_FILE = "plan.json", "smoke.log"
# Live: rank processes stay between cases. A case trains for about a second, and starting takes ten times as long.
ISOLATION, LIVE = "--isolation", "live"
# The runner's exit statuses; 0 and 1 leave results.
COMPLETED, CASES_FAILED, BAD_PLAN, UNUSABLE, WRONG_GPUS, INTERRUPTED = 0, 1, 2, 3, 4, 130
# Time for starting the container and Python, on top of the cases' own limits.
# Measured on H200: 10 to 16 s for torch, Transformer Engine and NCCL, 25 to 40 s with NeMo.
START_SECONDS = 120
# What a sweep takes before the runner ends it (envbuild_smoke.run.sweep).
SWEEP_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A plan that ran.

    Attributes:
        folder: with the plan, its results and logs.
    """

    folder: Path
    plan: Plan
    results: Results
    results_digest: str


def hold_folder(job: CertifyJob, reporter: Reporter) -> contextlib.AbstractContextManager[None]:
    """Take the folder of a job for this process; wait for another that certifies the same."""
    waiting = f"another envbuild certifies the same in {job.folder}: waiting for it"
    return locks.exclusive(job.folder.with_name(f".{job.folder.name}.lock"), on_wait=lambda: reporter.note(waiting))


def run_cases(
    job: CertifyJob,
    executor: Executor,
    machine: MachineOptions,
    context: Context,
    *,
    resume: bool,
) -> FinishedRun:
    """Run the cases of a job in its folder.

    Args:
        resume: go on with an interrupted run, if there is one.

    Raises:
        UsageError: the interrupted run had another isolation.
        CertificationCannotRunError: the GPUs are not as the plan wants, or the environment cannot run it.
        ResultsRefusedError: there are no results of this plan, or they are incomplete.
        CertificationFailedError: the runner ran past its time limit.
    """
    folder, reporter = job.folder / "run", context.reporter
    joins = executor.joins()
    arguments = machine.arguments()
    interrupted = _interrupted(folder, job.plan, joins=joins) if resume or joins else None
    if interrupted is not None:
        _check_isolation(folder, arguments)
        arguments = (*arguments, "--resume")
    elif resume:
        reporter.note("there is no interrupted run to resume: all cases start again")
    if interrupted is None:
        executor.forget()
    plan = parse_plan(_prepare(folder, interrupted, job.plan, reporter))
    watcher = Watcher(reporter, cases=len(plan.cases), repeats=plan.repeats)
    task = Task(
        plan=folder / PLAN_FILE,
        runner=job.smoke,
        results=folder / RESULTS_DIR,
        arguments=arguments,
        on_line=watcher,
        log=folder / LOG_FILE,
        timeout_seconds=_limit(plan),
        joins=joins,
    )
    # Nodes of a cluster reach each other.
    network = "" if job.request.place.launcher in ON_CLUSTER else ", network off"
    where = f"inside the image{network}" if job.certifies_image else f"in {executor.python}"
    with reporter.step(f"train {len(plan.cases)} cases {where} ({executor.name})"):
        finished = executor.run(task)
    _check_status(finished, watcher, folder, job.request)
    return read_run(folder, plan, folder / RESULTS_DIR / RESULTS_FILE, job.smoke_digest)


def _prepare(folder: Path, interrupted: bytes | None, plan: dict[str, Json], reporter: Reporter) -> bytes:
    """The plan of an interrupted run, or that of a new one, which is written; and the folder of its results."""
    data = interrupted
    if data is None:
        if lines_of(_results(folder)) and not is_whole(_results(folder)):
            reporter.note("note: the files of an interrupted run are removed; --resume would have continued it")
        remove_tree(folder)
        data = (json.dumps(plan, indent=2) + "\n").encode()
        write_atomic(folder / PLAN_FILE, data)
    with machine_errors(folder):
        (folder / RESULTS_DIR).mkdir(parents=True, exist_ok=True)
    return data


def remove_working_files(run: FinishedRun) -> None:
    """Remove what cases of a run left for each other: checkpoints, and what their libraries compiled."""
    for name in ("checkpoints", "caches"):
        remove_tree(run.folder / RESULTS_DIR / name)


def read_run(folder: Path, plan: Plan, results: Path, smoke_digest: str) -> FinishedRun:
    """A run that left its results.

    Raises:
        ResultsRefusedError: they are incomplete, or of another plan.
    """
    return FinishedRun(
        folder=folder,
        plan=plan,
        results=read_results(results, plan, smoke_digest),
        results_digest=sha256_bytes(read_plain(results, LARGEST_BYTES)),
    )


def logs_of(job: CertifyJob, folder: Path) -> dict[str, tuple[str, ...]]:
    """The logs of the ranks of each case, repeat by repeat, as far as they are in the folder of a run."""
    logs_by_case: dict[str, tuple[str, ...]] = {}
    for case in job.cases:
        # Repeats after the first have a folder of their own. What was brought back may lie without the folder results/.
        below = (RESULTS_DIR, f"{RESULTS_DIR}/repeat-*", "", "repeat-*")
        logs = [path for top in below for path in _in_order(folder, f"{top}/cases/{case.id}/*.log")]
        if logs:
            logs_by_case[case.id] = tuple(str(path) for path in logs)
    return logs_by_case


def _in_order(folder: Path, pattern: str) -> list[Path]:
    """The files that match a pattern: 2 before 10."""
    return sorted(folder.glob(pattern.lstrip("/")), key=lambda path: (len(str(path)), str(path)))


def is_interrupted(folder: Path) -> bool:
    """Whether the folder of a job has an interrupted run."""
    return (folder / "run" / PLAN_FILE).is_file() and not is_whole(_results(folder / "run"))


def _results(folder: Path) -> Path:
    return folder / RESULTS_DIR / RESULTS_FILE


def _interrupted(folder: Path, plan: dict[str, Json], *, joins: bool) -> bytes | None:
    """The plan of an interrupted run, if it is the same but for its nonce; None without one.

    Args:
        joins: the run went on without this process, and may have come to its end.

    Raises:
        ResultsRefusedError: it is another plan.
    """
    try:
        # The bytes as they are: results name their digest.
        data = (folder / PLAN_FILE).read_bytes()
    except FileNotFoundError:
        return None
    if is_whole(_results(folder)) and not joins:
        return None  # it finished, and was judged
    try:
        same = deciding(jsonread.loads(data)) == deciding(plan)
    except (ValueError, TypeError, KeyError, AttributeError):
        same = False
    if not same:
        raise ResultsRefusedError(
            "the interrupted run is of another plan",
            why=f"{folder / PLAN_FILE} is not what would be run now.",
            fix="Leave --resume out: the cases start again.",
            reason="plan",
        )
    return data


def _check_isolation(folder: Path, arguments: tuple[str, ...]) -> None:
    """A resumed run has the isolation of its first part, which its results state."""
    wanted = arguments[arguments.index(ISOLATION) + 1] if ISOLATION in arguments else LIVE
    for line in lines_of(_results(folder)):
        before = line.get("isolation")
        if isinstance(before, str) and before != wanted:
            option = f"{ISOLATION} {before}" if before != LIVE else f"{ISOLATION} {LIVE}, or without {ISOLATION}"
            raise UsageError(
                f"the interrupted run had {ISOLATION} {before}, not {wanted}",
                why="Both parts of a run must have the same isolation.",
                fix=f"Resume with {option}; or leave --resume out: the cases start again.",
            )


def _limit(plan: Plan) -> float:
    # As if the cases ran one after the other: the scheduler may run several at once.
    seconds = sum((case.time_limit_seconds + START_SECONDS) * len(plan.runs_of(case)) for case in plan.cases)
    # At most as many rounds of sweeps as it takes to pair every node again, and to double up to all of them.
    rounds = 4 + plan.nodes.bit_length() if plan.bandwidth else 0
    return float(START_SECONDS + seconds + rounds * SWEEP_SECONDS)


def _check_status(finished: Finished, watcher: Watcher, folder: Path, request: CertifyRequest) -> None:
    """Raise the error of the runner's exit status; 0 and 1 leave results."""
    status, log = finished.status, folder / LOG_FILE
    # No status is a verdict: the results are judged. Launchers have ended with 0 after a failed job (nemo-run 0.11.1).
    if status in (COMPLETED, CASES_FAILED):
        return
    if ran_out_of_space(finished.output, folder):
        # Cases failed because the disk is full: --resume must not go on with them.
        remove_tree(folder)
        raise disk_full(folder)
    if status == INTERRUPTED:
        raise InterruptedByUserError("the runner was interrupted")
    # Events are for programs.
    text = "\n".join(line for line in finished.output.splitlines() if not line.startswith("{"))
    why = tail(text).strip()
    if status == WRONG_GPUS and watcher.cannot_run:
        reason, why = watcher.cannot_run
        raise CertificationCannotRunError(
            "the GPUs are not as the plan wants", why=why, fix=_GPU_FIXES.get(reason, ""), log=log, reason=reason
        )
    reasons = {BAD_PLAN: "plan-refused", UNUSABLE: "image-lacks-stack", WRONG_GPUS: "gpus"}
    if status not in reasons:
        # A sandbox reports a signal as 128 + its number.
        ended = describe_status(128 - status if status > 128 else status)
        raise CertificationCannotRunError(
            "the runner ended before the cases did",
            why=f"It {ended}." + (f"\n{why}" if why else ""),
            fix="Cases that had ended are kept: run the same command with --resume. The log has all output.",
            log=log,
            reason="runner-ended",
        )
    raise CertificationCannotRunError(
        "the environment cannot run the plan",
        why=why or f"The runner {describe_status(status)}.",
        fix=(_install_the_lock(request) if status == UNUSABLE else "")
        + f"The log has all output. To run it yourself, use the plan {folder / PLAN_FILE}.",
        log=log,
        reason=reasons[status],
    )


def _install_the_lock(request: CertifyRequest) -> str:
    """How an environment gets the lock; nothing for an image, which was made of it."""
    selection = request.selection
    words = ["--stack", selection.stack_name, "--base", selection.base_name, "--target", selection.target_name]
    words += ["--name", request.lock_name] if request.lock_name else []
    sync = f"envbuild sync {shlex.join(words)} --into DIR"
    if request.place.has_image:
        return ""
    if os.environ.get("PYTHONPATH"):
        return "PYTHONPATH is set, and comes before the installed packages: unset it. "
    return f"Install the lock ({sync}), then: --in venv --venv DIR. "


_GPU_FIXES = {
    "too-few-gpus": "Give it more (--gpus), run fewer cases (--max-gpus N), or use a machine with as many GPUs.",
    "gpus-in-use": "Wait until they are free, or name others (--gpus). nvidia-smi shows who uses them.",
    "wrong-gpu": "Certify for the target that these GPUs are of (--target), or use a machine of the target.",
    "no-driver": "Install NVIDIA's driver, or run the plan where there is one (--plan-out DIR, --judge DIR).",
}
