"""What people are told of a certification: while it runs, of each case, and why there is no certificate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from envbuild.certify.judge import Results, Verdict
from envbuild.certify.verdicts import verdict_json
from envbuild.core.errors import CertificationFailedError
from envbuild.core.progress import Reporter


def progress(reporter: Reporter) -> Callable[[str], None]:
    """Shows what the runner says while it runs, line by line."""

    def on_line(line: str) -> None:
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind == "case-started":
                reporter.update(f"case {event['index']}/{event['total']} {event['case']}")
            elif kind == "step":
                loss = "not finite" if event["loss"] is None else f"{event['loss']:.5f}"
                reporter.update(f"{event['case']} step {event['step']}: loss {loss}")
            elif kind == "case-finished":
                reporter.note(f"  {event['case']}: {event['status']} in {event['seconds']:.1f} s")
        except (ValueError, KeyError, TypeError):
            return  # words for people, which the log has

    return on_line


def show(verdicts: tuple[Verdict, ...], reporter: Reporter) -> None:
    """One line a case."""
    for verdict in verdicts:
        if verdict.case.is_baseline and verdict.passed:
            numbers = " ".join(f"{step.loss:.5f}" for step in verdict.steps)
            reporter.note(f"  baseline  {verdict.case.id}: loss {numbers}")
        elif verdict.passed:
            reporter.note(
                f"  agrees    {verdict.case.id}: loss within {verdict.largest_loss_difference:.1e}, "
                f"grad norm within {verdict.largest_grad_norm_difference:.1e}"
            )
        else:
            reporter.note(f"  FAILED    {verdict.case.id}: {verdict.problems[0]}")


def failure(verdicts: tuple[Verdict, ...], results: Results, run_dir: Path) -> CertificationFailedError:
    """The error for results that give no certificate, with every case's verdict."""
    failed = [verdict for verdict in verdicts if not verdict.passed]
    lines = [f"{verdict.case.id}: {problem}" for verdict in failed for problem in verdict.problems]
    lines += [
        f"{finding.get('code')}: {finding.get('package')}: the lock has {finding.get('expected')}, the image has "
        f"{finding.get('found') or 'none'}"
        for finding in results.environment_findings
    ]
    if results.finished_at is None:
        lines.append("the runner ended before its last line")
    if failed:
        what = f"{len(failed)} of {len(verdicts)} cases failed"
    elif results.environment_findings:
        what = "the environment is not what was locked"
    else:
        what = "the runner did not come to its end"
    return CertificationFailedError(
        what,
        why="\n".join(lines),
        fix=f"No certificate was written. Plan, results and a log for each rank are in {run_dir}.",
        log=run_dir / "smoke.log",
        cases=[verdict_json(verdict) for verdict in verdicts],
        environment_findings=results.environment_findings,
    )
