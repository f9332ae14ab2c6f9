"""Runs a plan somewhere, and reads what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.certify.judge.results import LARGEST_BYTES, Results, read_results
from envbuild.certify.report.console import Watcher
from envbuild.certify.run.job import CertifyJob, CertifyRequest
from envbuild.certify.run.plan import deciding
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
from envbuild.launch.executors import WITHOUT_IMAGE, Executor, Task

PLAN_FILE, RESULTS_DIR, RESULTS_FILE, LOG_FILE = "plan.json", "results", "results.jsonl", "smoke.log"
ISOLATION, LIVE = "--isolation", "live"
# The runner's exit statuses; 0 and 1 leave results.
COMPLETED, CASES_FAILED, BAD_PLAN, UNUSABLE, WRONG_GPUS, INTERRUPTED = 0, 1, 2, 3, 4, 130
# Time for starting the container and Python, on top of the cases' own limits.
START_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A plan that ran.

    Attributes:
        folder: with the plan, its results and logs.
    """

    folder: Path
    plan: Mapping[str, Any]
    plan_digest: str
    results: Results
    results_digest: str


def held(job: CertifyJob, reporter: Reporter) -> contextlib.AbstractContextManager[None]:
    """The folder of a job for this process alone: another that does the same waits, and says so."""
    waiting = f"another envbuild certifies the same in {job.folder}: waiting for it"
    return locks.exclusive(job.folder.with_name(f".{job.folder.name}.lock"), on_wait=lambda: reporter.note(waiting))


def run_plan(
    job: CertifyJob,
    plan: dict[str, Json],
    way: Executor,
    reporter: Reporter,
    arguments: tuple[str, ...] = (),
    *,
    resume: bool = False,
) -> FinishedRun:
    """Run a plan in the folder of a job.

    Args:
        arguments: more words of the runner's command line.
        resume: go on with an interrupted run of such a plan, if there is one.

    Raises:
        UsageError: the interrupted run had another isolation.
        CertificationCannotRunError: the GPUs are not as the plan wants, or the environment cannot run it.
        ResultsRefusedError: there are no results of this plan, or they are not whole.
        CertificationFailedError: the runner ran past its time limit.
    """
    folder = job.folder / "run"
    data = _interrupted(folder, plan) if resume else None
    if data is None:
        if resume:
            reporter.note("there is no interrupted run of this to go on with: it begins anew")
        elif _types(folder) and "end" not in _types(folder):
            reporter.note("note: what an interrupted run left is removed; --resume would have gone on with it")
        remove_tree(folder)
        data = (json.dumps(plan, indent=2) + "\n").encode()
        write_atomic(folder / PLAN_FILE, data)
    else:
        _check_isolation(folder, arguments)
        arguments = (*arguments, "--resume")
    results_dir = folder / RESULTS_DIR
    with machine_errors(folder):
        results_dir.mkdir(parents=True, exist_ok=True)
    seen = json.loads(data)
    watcher = Watcher(reporter, cases=len(seen["cases"]), repeats=seen["repeats"])
    task = Task(
        plan=folder / PLAN_FILE,
        runner=job.smoke,
        results=results_dir,
        arguments=arguments,
        on_line=watcher,
        log=folder / LOG_FILE,
        timeout_seconds=_limit(seen),
    )
    where = "inside the image, network off" if job.certifies_image else f"in {way.python}"
    with reporter.step(f"train {len(seen['cases'])} cases {where} ({way.name})"):
        finished = way.run(task)
    _check_status(finished, watcher, folder, job.asked)
    return read_run(folder, data, results_dir / RESULTS_FILE, job.smoke_digest)


def remove_working_files(run: FinishedRun) -> None:
    """Remove what cases of a run left for each other: checkpoints, and what their libraries compiled."""
    for name in ("checkpoints", "caches"):
        remove_tree(run.folder / RESULTS_DIR / name)


def read_run(folder: Path, plan: bytes, results: Path, smoke_digest: str) -> FinishedRun:
    """A run that left its results.

    Raises:
        ResultsRefusedError: they are not whole, or not of this plan.
    """
    content, digest = json.loads(plan), sha256_bytes(plan)
    found = read_results(results, content, digest, smoke_digest)
    return FinishedRun(
        folder=folder,
        plan=content,
        plan_digest=digest,
        results=found,
        results_digest=sha256_bytes(read_plain(results, LARGEST_BYTES)),
    )


def logs_of(job: CertifyJob, folder: Path) -> dict[str, tuple[str, ...]]:
    """The logs of the ranks of each case, repeat by repeat, as far as they are in the folder of a run."""
    found: dict[str, tuple[str, ...]] = {}
    for case in job.cases:
        below = (RESULTS_DIR, f"{RESULTS_DIR}/repeat-*", "", "repeat-*")
        logs = [path for top in below for path in _in_order(folder, f"{top}/cases/{case.id}/*.log")]
        if logs:
            found[case.id] = tuple(str(path) for path in logs)
    return found


def _in_order(folder: Path, pattern: str) -> list[Path]:
    """What fits a pattern: 2 before 10."""
    return sorted(folder.glob(pattern.lstrip("/")), key=lambda path: (len(str(path)), str(path)))


def interrupted_cases(folder: Path) -> frozenset[str]:
    """The cases of the run that was interrupted in the folder of a job; none where none was."""
    try:
        plan = jsonread.loads((folder / "run" / PLAN_FILE).read_bytes())
        cases = frozenset(str(case["id"]) for case in plan["cases"])
    except (OSError, ValueError, TypeError, KeyError):
        return frozenset()
    return frozenset() if "end" in _types(folder / "run") else cases


def _types(folder: Path) -> set[str]:
    """The types of the lines that a run has written."""
    return {str(line["type"]) for line in _lines(folder) if "type" in line}


def _lines(folder: Path) -> list[dict[str, Any]]:
    """The lines that a run has written, as far as they are any."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / RESULTS_DIR / RESULTS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(jsonread.loads(line))
    return [line for line in found if isinstance(line, dict)]


def _interrupted(folder: Path, plan: dict[str, Json]) -> bytes | None:
    """The plan of an interrupted run, if it is the same but for its nonce; None where none was interrupted.

    Raises:
        ResultsRefusedError: it is another one: its results would not be judged by this.
    """
    try:
        data = (folder / PLAN_FILE).read_bytes()
    except FileNotFoundError:
        return None
    if "end" in _types(folder):
        return None  # it came to its end, and was judged
    try:
        same = deciding(jsonread.loads(data)) == deciding(plan)
    except (ValueError, TypeError, KeyError, AttributeError):
        same = False
    if not same:
        raise ResultsRefusedError(
            "the interrupted run is of another plan",
            why=f"{folder / PLAN_FILE} is not what would be run now: other cases were asked for, or some passed since.",
            fix="Leave --resume out: the cases are run anew.",
            reason="plan",
        )
    return data


def _check_isolation(folder: Path, arguments: tuple[str, ...]) -> None:
    """One run has one isolation: that of its first part, as its results have it."""
    asked = arguments[arguments.index(ISOLATION) + 1] if ISOLATION in arguments else LIVE
    for line in _lines(folder):
        before = line.get("isolation")
        if isinstance(before, str) and before != asked:
            option = f"{ISOLATION} {before}" if before != LIVE else f"{ISOLATION} {LIVE}, or without {ISOLATION}"
            raise UsageError(
                f"the interrupted run was one with {ISOLATION} {before}, not {asked}",
                why="What goes on must be what began: its first part and its second would be two kinds of run.",
                fix=f"Go on with {option}; or leave --resume out: the cases are run anew.",
            )


def _limit(plan: Mapping[str, Any]) -> float:
    seconds = sum(case["time_limit_seconds"] + START_SECONDS for case in plan["cases"])
    return float(START_SECONDS + seconds * plan["repeats"])


def _check_status(finished: Finished, watcher: Watcher, folder: Path, asked: CertifyRequest) -> None:
    """Raise what the runner's exit status says, unless it is that there are results."""
    status, log = finished.status, folder / LOG_FILE
    if status in (COMPLETED, CASES_FAILED):
        return
    if ran_out_of_space(finished.output, folder):
        # Cases failed for want of space: a verdict on nothing, which --resume must not go on with.
        remove_tree(folder)
        raise disk_full(folder)
    if status == INTERRUPTED:
        raise InterruptedByUserError("the runner was told to stop")
    # Events are for programs.
    said = "\n".join(line for line in finished.output.splitlines() if not line.startswith("{"))
    why = tail(said).strip()
    if status == WRONG_GPUS and watcher.cannot_run:
        reason, why = watcher.cannot_run
        raise CertificationCannotRunError(
            "the GPUs are not as the plan wants", why=why, fix=_GPU_FIXES.get(reason, ""), log=log, reason=reason
        )
    reasons = {BAD_PLAN: "plan-refused", UNUSABLE: "image-lacks-stack", WRONG_GPUS: "gpus"}
    if status not in reasons:
        # Above 128 a sandbox tells of a signal.
        ended = describe_status(128 - status if status > 128 else status)
        raise CertificationCannotRunError(
            "the runner ended before the cases did",
            why=f"It {ended}." + (f"\n{why}" if why else ""),
            fix="Cases that had ended are kept: the same command with --resume goes on. The log has the whole story.",
            log=log,
            reason="runner-ended",
        )
    raise CertificationCannotRunError(
        "the environment cannot run the plan",
        why=why or f"The runner {describe_status(status)}.",
        fix=(_install_the_lock(asked) if status == UNUSABLE else "")
        + f"The log has the whole story; try it by hand: the plan is {folder / PLAN_FILE}.",
        log=log,
        reason=reasons[status],
    )


def _install_the_lock(asked: CertifyRequest) -> str:
    """How an environment gets the lock; nothing for an image, which was made of it."""
    selection = asked.selection
    words = ["--stack", selection.stack_name, "--base", selection.base_name, "--target", selection.target_name]
    words += ["--name", asked.lock_name] if asked.lock_name else []
    sync = f"envbuild sync {shlex.join(words)} --into DIR"
    if asked.place in WITHOUT_IMAGE and os.environ.get("PYTHONPATH"):
        return "PYTHONPATH is set, and comes before what is installed: unset it. "
    if asked.place == "venv":
        return f"Is the lock installed there? It is by: {sync}. "
    if asked.place == "here":
        return f"`python` on PATH is what is certified. Install the lock ({sync}), then: --in venv --venv DIR. "
    return ""


_GPU_FIXES = {
    "too-few-gpus": "Give it more (--gpus), run fewer cases (--only ID), or use a machine with as many GPUs.",
    "gpus-in-use": "Wait until they are free, or name others (--gpus). nvidia-smi shows who uses them.",
    "wrong-gpu": "Certify for the target that these GPUs are of (--target), or use a machine of the target.",
    "no-driver": "Install NVIDIA's driver, or run the plan where there is one (--plan-out DIR, --judge DIR).",
}
