"""What people are told of a certification: while it runs, of each case, and why there is no certificate."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from envbuild.certify.judge.judge import Results, Verdict
from envbuild.certify.judge.problems import Problem
from envbuild.certify.judge.verdicts import verdict_json
from envbuild.core.errors import CertificationFailedError, FailedRun
from envbuild.core.progress import Reporter
from envbuild.core.text import printable

# What a person reads of an error; the report has everything.
MOST_LINES = 60
MOST_CHARACTERS = 1000


class Watcher:
    """Shows what the runner says while it runs, line by line, and keeps why it could not begin."""

    def __init__(self, reporter: Reporter, *, cases: int = 0, repeats: int = 1) -> None:
        self._reporter = reporter
        self._cases = cases
        self._repeats = repeats
        self._of_repeat: Counter[int] = Counter()
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
                case "case-restarted":
                    case = _brief(event["case"])
                    self._running[case] = "starts"
                    self._reporter.note(f"  {case}: begun once more: {_brief(event['message'])}")
                case "step":
                    loss = "not finite" if event["loss"] is None else f"{event['loss']:.5f}"
                    self._running[event["case"]] = f"step {event['step']}, loss {loss}"
                case "case-finished":
                    self._finished(event)
                case "bandwidth":
                    self._reporter.note("  bandwidth measured")
                    return
                case "cannot-run":
                    self.cannot_run = _brief(event["reason"]), _brief(event["message"])
                    return
                case _:
                    return
        except (ValueError, KeyError, TypeError):
            return  # words for people, which the log has
        running = "; ".join(f"{case} {what}" for case, what in self._running.items())
        self._reporter.update(f"{self._ended} done; {running}" if running else f"{self._ended} done")

    def _finished(self, event: dict[str, object]) -> None:
        case, status, seconds = _brief(event["case"]), _brief(event["status"]), float(str(event["seconds"]))
        self._running.pop(case, None)
        self._ended += 1
        repeat = int(str(event.get("repeat", 1)))
        self._of_repeat[repeat] += 1
        if self._repeats == 1 or status != "completed":
            self._reporter.note(f"  {case}{_again(repeat)}: {status} in {seconds:.1f} s")
        if self._repeats > 1 and self._of_repeat[repeat] == self._cases:
            whole = self._cases * self._repeats
            self._reporter.note(
                f"  repeat {repeat} of {self._repeats}: its {self._cases} cases ended ({self._ended} of {whole})"
            )


def _brief(said: object) -> str:
    """What a runner, a rank or a results file says, in one line that is not endless."""
    text = str(said)
    return printable(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}...")


def _again(repeat: int) -> str:
    return f" (repeat {repeat})" if repeat > 1 else ""


def show(verdicts: Sequence[Verdict], problems: Sequence[Problem], reporter: Reporter) -> None:
    """One line a case, however often it was trained, and one for each repeat of it that failed.

    Args:
        problems: of the run as a whole, told last.
    """
    by_case: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_case.setdefault(verdict.case.id, []).append(verdict)
    for repeats in by_case.values():
        if passed := [verdict for verdict in repeats if verdict.passed]:
            _show_passed(passed, len(repeats), reporter)
        for verdict in repeats:
            if not verdict.passed:
                more = len(verdict.problems) - 1
                also = f" (and {more} more)" if more else ""
                reporter.note(
                    f"  FAILED    {verdict.case.id}{_again(verdict.repeat)}: {_brief(verdict.problems[0])}{also}"
                )
    for problem in problems:
        reporter.note(f"  FAILED    {_brief(problem)}")


def _show_passed(passed: Sequence[Verdict], repeats: int, reporter: Reporter) -> None:
    """The repeats of a case that passed, of so many in all."""
    first = passed[0]
    name = first.case.id + (f" ({len(passed)} of {repeats} repeats)" if repeats > 1 else "")
    if first.reused:
        reporter.note(f"  reused    {name}: passed on {first.reused['from']}")
    elif first.case.is_baseline:
        numbers = " ".join(f"{step.loss:.5f}" for step in first.steps)
        reporter.note(f"  baseline  {name}: loss {numbers}")
    else:
        loss = max(verdict.largest_loss_difference or 0.0 for verdict in passed)
        grad_norm = max(verdict.largest_grad_norm_difference or 0.0 for verdict in passed)
        weights = [found for verdict in passed if (found := verdict.largest_weights_difference) is not None]
        also = f", weights within {max(weights):.1e}" if weights else ""
        reporter.note(f"  agrees    {name}: loss within {loss:.1e}, grad norm within {grad_norm:.1e}{also}")


def failure(
    verdicts: Sequence[Verdict], problems: Sequence[Problem], results: Results, run_dir: Path
) -> CertificationFailedError:
    """The error for results that give no certificate, with every case's verdict.

    Args:
        problems: of the run as a whole.
    """
    failed = [verdict for verdict in verdicts if not verdict.passed]
    lines = [_brief(problem) for problem in problems]
    lines += [
        f"{verdict.case.id}{_again(verdict.repeat)}: {_brief(problem)}"
        for verdict in failed
        for problem in verdict.problems
    ]
    if len(lines) > MOST_LINES:
        lines = [
            *lines[: MOST_LINES - 1],
            f"... and {len(lines) - MOST_LINES + 1} more; --json and the report have all",
        ]
    checks = {problem.check for problem in problems}
    if failed:
        repeated = any(verdict.repeat > 1 for verdict in verdicts)
        what = f"{len(failed)} of {len(verdicts)} {'runs of cases' if repeated else 'cases'} failed"
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
        run=FailedRun(
            cases=[verdict_json(verdict) for verdict in verdicts],
            environment_findings=results.environment_findings,
            problems=[problem.as_json() for problem in problems],
        ),
    )


def _log(failed: Sequence[Verdict], results: Results, run_dir: Path) -> Path:
    """The log of the first rank that failed, which says most; else the runner's."""
    below = (run_dir / "results").resolve()
    for verdict in failed:
        result = results.of(verdict.case.id, verdict.repeat)
        named = (result.failure or {}).get("log") if result else None
        # Results may name any file of this machine.
        if named and (path := below / str(named)).is_file() and path.resolve().is_relative_to(below):
            return run_dir / "results" / str(named)
    return run_dir / "smoke.log"
