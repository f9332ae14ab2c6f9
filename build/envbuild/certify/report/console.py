"""Prints a certification: each case, and why there is no certificate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from envbuild.certify.judge.bands import FACTOR, FLOOR
from envbuild.certify.judge.results import Results
from envbuild.certify.models import CaseVerdict, Problem
from envbuild.certify.report.describe import describe_reference
from envbuild.certify.report.network import SweepRow, network_lines
from envbuild.certify.run.watcher import brief, repeat_suffix
from envbuild.core.errors import CertificationFailedError, FailedRun
from envbuild.core.progress import Reporter
from envbuild.core.text import printable

# Of an error on the terminal; the report has everything.
MOST_LINES = 60


def show(
    verdicts: Sequence[CaseVerdict], problems: Sequence[Problem], reporter: Reporter, causes: Sequence[str] = ()
) -> None:
    """Print one line for each case, and one for each repeat of it that failed.

    Args:
        problems: of the run as a whole, printed last.
        causes: cause and cure of what is known to be wrong and failed.
    """
    by_case: dict[str, list[CaseVerdict]] = {}
    for verdict in verdicts:
        by_case.setdefault(verdict.id, []).append(verdict)
    for repeats in by_case.values():
        if passed := [verdict for verdict in repeats if verdict.passed]:
            _show_passed(passed, len(repeats), reporter)
        for verdict in repeats:
            if not verdict.passed:
                more = len(verdict.problems) - 1
                also = f" (and {more} more)" if more else ""
                state = "wrong, as known" if verdict.known_wrong else "FAILED"
                reporter.note(
                    f"  {state:<9} {verdict.id}{repeat_suffix(verdict.repeat)}: {brief(_first(verdict.problems))}{also}"
                )
    for line in _capped(verdicts):
        reporter.note(line)
    for line in causes:
        reporter.note(f"  known     {line}")
    for problem in problems:
        reporter.note(f"  FAILED    {brief(problem)}")


def show_network(rows: Sequence[SweepRow], drain: Sequence[str], reporter: Reporter) -> None:
    """Print the table of the network between nodes, and the commands that take bad nodes out of use.

    They are for people: envbuild drains nothing.
    """
    for line in network_lines(rows):
        reporter.note(f"  network   {line}")
    for command in drain:
        # Whole: people paste it.
        reporter.note(f"  drain     {printable(command)}")


def _first(problems: Sequence[Problem]) -> Problem:
    """The problem to begin with: gradients of the first step name a tensor, and losses and norms follow from them."""
    return next((problem for problem in problems if problem.check == "parity-gradients"), problems[0])


def _capped(verdicts: Sequence[CaseVerdict]) -> Iterator[str]:
    """Of each baseline whose bands the matrix limits: which, and how wide they would have been."""
    # Of the repeats of a baseline the first that measured them.
    measured = {verdict.id: verdict for verdict in reversed(verdicts) if verdict.spread is not None}
    for baseline in reversed(measured.values()):
        compared = [case for case in verdicts if (case.baseline, case.repeat) == (baseline.id, baseline.repeat)]
        widest = next((case.tolerance for case in compared if case.tolerance.loss is not None), None)
        if baseline.spread is None or widest is None:
            continue
        weights = baseline.spread.weights
        spreads = {
            "loss": baseline.spread.loss[-1],
            "grad_norm": baseline.spread.grad_norm[-1],
            "weights": math.inf if weights is None else weights,
        }
        limits = {name: getattr(widest, name) for name in spreads}
        shown = [
            f"{name.replace('_', ' ')} {limit:.2g} (measured {FACTOR * spreads[name]:.2g})"
            for name, limit in limits.items()
            # The band of a certificate is rounded nowhere: what is wider was cut.
            if limit is not None and FACTOR * spreads[name] > limit > FLOOR
        ]
        if shown:
            yield f"  note      {baseline.id}: the matrix's tolerance limits the bands of its cases: {', '.join(shown)}"


def _show_passed(passed: Sequence[CaseVerdict], repeats: int, reporter: Reporter) -> None:
    """The repeats of a case that passed, of so many in all."""
    first = passed[0]
    name = first.id + (f" ({len(passed)} of {repeats} repeats)" if repeats > 1 else "")
    if first.baseline is None:
        numbers = " ".join(f"{step.loss:.5f}" for step in first.steps if step.loss is not None)
        reporter.note(f"  baseline  {name}: loss {numbers}; reference: {describe_reference(first.reference)}")
    else:
        differences = [verdict.largest_relative_difference for verdict in passed]
        loss = max(each.loss or 0.0 for each in differences)
        grad_norm = max(each.grad_norm or 0.0 for each in differences)
        weights = [each.weights for each in differences if each.weights is not None]
        also = f", weights within {max(weights):.1e}" if weights else ""
        gradients = max(each.gradients or 0.0 for each in differences)
        numbers = f"loss within {loss:.1e}, grad norm within {grad_norm:.1e}, gradients within {gradients:.1e}"
        reporter.note(f"  agrees    {name}: {numbers}{also}")


def failure(
    verdicts: Sequence[CaseVerdict],
    problems: Sequence[Problem],
    results: Results,
    run_dir: Path,
    causes: Sequence[str] = (),
) -> CertificationFailedError:
    """The error for results that give no certificate, with every case's verdict.

    Args:
        problems: of the run as a whole.
        causes: cause and cure of what is known to be wrong and failed.
    """
    failed = [verdict for verdict in verdicts if not verdict.passed]
    lines = [brief(problem) for problem in problems]
    lines += [
        f"{verdict.id}{repeat_suffix(verdict.repeat)}: {brief(problem)}"
        for verdict in failed
        for problem in verdict.problems
    ]
    if len(lines) > MOST_LINES:
        lines = [
            *lines[: MOST_LINES - 1],
            f"... and {len(lines) - MOST_LINES + 1} more; --json and the report have all",
        ]
    lines += causes
    checks = {problem.check for problem in problems}
    if "nodes" in checks and not results.cases:
        what = "a node is not as the others, and no case was started"
        lines = [brief(problem) for problem in problems]
    elif failed:
        repeated = any(verdict.repeat > 1 for verdict in verdicts)
        known = sum(bool(verdict.known_wrong) for verdict in failed)
        what = f"{len(failed)} of {len(verdicts)} {'runs of cases' if repeated else 'cases'} failed"
        what += f", {known} of them known to train wrongly" if known else ""
        if known == len(failed) and not problems:
            what = "no case is left to certify: all that were compared are known to train wrongly, and do"
            what = f"{what} ({len(failed)} of {len(verdicts)} failed)"
    elif {"nodes", "node-numbers", "node-slow"} & checks:
        what = "a node is not as the others"
    elif "environment" in checks:
        what = "the environment is not what was locked"
    elif "hardware" in checks:
        what = "the GPUs are not what they have to be, or had errors"
    else:
        what = "the network between the GPUs is not what it has to be"
    return CertificationFailedError(
        what,
        why="\n".join(lines),
        fix=f"No certificate was written. Plan, results and a log for each rank are in {run_dir}.",
        log=_log(failed, results, run_dir),
        run=FailedRun(
            cases=[verdict.model_dump(mode="json", by_alias=True) for verdict in verdicts],
            environment_findings=[dict(vars(finding)) for finding in results.findings],
            problems=[problem.model_dump() for problem in problems],
        ),
    )


def _log(failed: Sequence[CaseVerdict], results: Results, run_dir: Path) -> Path | None:
    """The log of the first rank that failed; else the runner's, which is there where envbuild started it."""
    below = (run_dir / "results").resolve()
    for verdict in failed:
        line = results.case(verdict.id, verdict.repeat)
        named = line.failure.log if line and line.failure else None
        # Results may name any file of this machine.
        if named and (path := below / named).is_file() and path.resolve().is_relative_to(below):
            return run_dir / "results" / named
    return log if (log := run_dir / "smoke.log").is_file() else None
