"""What people are told of a certification: while it runs, of each case, and why there is no certificate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from envbuild.certify.judge import Results, Verdict
from envbuild.certify.problems import Problem
from envbuild.certify.verdicts import verdict_json
from envbuild.core.errors import CertificationFailedError
from envbuild.core.progress import Reporter


class Watcher:
    """Shows what the runner says while it runs, line by line, and keeps why it could not begin."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._running: dict[str, str] = {}
        self._ended = 0
        self.cannot_run: tuple[str, str] | None = None

    def __call__(self, line: str) -> None:
        """Take a line of its output."""
        try:
            event = json.loads(line)
            match event["event"]:
                case "case-started":
                    self._running[event["case"]] = "starts"
                case "step":
                    loss = "not finite" if event["loss"] is None else f"{event['loss']:.5f}"
                    self._running[event["case"]] = f"step {event['step']}, loss {loss}"
                case "case-finished":
                    self._finished(event)
                case "bandwidth":
                    self._reporter.note("  bandwidth measured")
                    return
                case "cannot-run":
                    self.cannot_run = str(event["reason"]), str(event["message"])
                    return
                case _:
                    return
        except (ValueError, KeyError, TypeError):
            return  # words for people, which the log has
        running = "; ".join(f"{case} {what}" for case, what in self._running.items())
        self._reporter.update(f"{self._ended} done; {running}" if running else f"{self._ended} done")

    def _finished(self, event: dict[str, object]) -> None:
        case, status, seconds = str(event["case"]), event["status"], float(str(event["seconds"]))
        self._running.pop(case, None)
        self._ended += 1
        repeat = event.get("repeat", 1)
        again = f" (repeat {repeat})" if repeat != 1 else ""
        self._reporter.note(f"  {case}{again}: {status} in {seconds:.1f} s")


def show(verdicts: Sequence[Verdict], reporter: Reporter) -> None:
    """One line a case."""
    for verdict in verdicts:
        name = verdict.case.id if verdict.repeat == 1 else f"{verdict.case.id} (repeat {verdict.repeat})"
        if verdict.reused:
            reporter.note(f"  reused    {name}: passed on {verdict.reused['from']}")
        elif verdict.case.is_baseline and verdict.passed:
            numbers = " ".join(f"{step.loss:.5f}" for step in verdict.steps)
            reporter.note(f"  baseline  {name}: loss {numbers}")
        elif verdict.passed:
            weights = verdict.largest_weights_difference
            also = "" if weights is None else f", weights within {weights:.1e}"
            reporter.note(
                f"  agrees    {name}: loss within {verdict.largest_loss_difference:.1e}, "
                f"grad norm within {verdict.largest_grad_norm_difference:.1e}{also}"
            )
        else:
            more = len(verdict.problems) - 1
            also = f" (and {more} more)" if more else ""
            reporter.note(f"  FAILED    {name}: {verdict.problems[0]}{also}")


def failure(
    verdicts: Sequence[Verdict], problems: Sequence[Problem], results: Results, run_dir: Path
) -> CertificationFailedError:
    """The error for results that give no certificate, with every case's verdict.

    Args:
        problems: of the run as a whole.
    """
    failed = [verdict for verdict in verdicts if not verdict.passed]
    lines = [str(problem) for problem in problems]
    lines += [f"{verdict.case.id}: {problem}" for verdict in failed for problem in verdict.problems]
    checks = {problem.check for problem in problems}
    if failed:
        what = f"{len(failed)} of {len(verdicts)} cases failed"
    elif "environment" in checks:
        what = "the environment is not what was locked"
    elif checks & {"bandwidth", "transport"}:
        what = "the network between the GPUs is not what it has to be"
    else:
        what = "the run does not count"
    return CertificationFailedError(
        what,
        why="\n".join(lines),
        fix=f"No certificate was written. Plan, results and a log for each rank are in {run_dir}.",
        log=_log(failed, results, run_dir),
        cases=[verdict_json(verdict) for verdict in verdicts],
        environment_findings=results.environment_findings,
        problems=[problem.as_json() for problem in problems],
    )


def _log(failed: Sequence[Verdict], results: Results, run_dir: Path) -> Path:
    """The log of the first rank that failed, which says most; else the runner's."""
    for verdict in failed:
        result = results.of(verdict.case.id, verdict.repeat)
        named = (result.failure or {}).get("log") if result else None
        if named and (path := run_dir / "results" / str(named)).is_file():
            return path
    return run_dir / "smoke.log"
