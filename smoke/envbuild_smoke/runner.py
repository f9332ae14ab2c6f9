"""Runs a plan: one case after the other, each with one process per rank, whatever happens to them."""

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

from envbuild_smoke import __version__, environment
from envbuild_smoke.case_run import POLL_SECONDS, CaseRun, Emit, RunInterruptedError
from envbuild_smoke.drivers import MODULES as DRIVERS
from envbuild_smoke.plan import Case, Plan
from envbuild_smoke.ranks import RankProgram, Template, TemplateError, zipapp_path
from envbuild_smoke.results import SCHEMA, CaseResult, Failure, ResultsWriter, now

TEMPLATE_LOG = "template.log"
# Importing from the network disk of a cold node takes minutes.
IMPORT_LIMIT_SECONDS = 600.0


class UnusableEnvironmentError(Exception):
    """The environment cannot run the plan at all: a library is missing, or there are too few GPUs."""


def run_plan(
    plan: Plan,
    cases: tuple[Case, ...],
    out: Path,
    *,
    emit: Emit,
    stop: threading.Event,
    program: RankProgram | None = None,
) -> list[CaseResult]:
    """Run `cases` of `plan` into the directory `out`, which must not hold results yet.

    `emit` gets the progress events. Setting `stop` kills what runs and raises RunInterruptedError; the results of
    cases that had ended stay. Raises UnusableEnvironmentError before the first case, or never. `program` is
    what the ranks run, by default the drivers of the plan.
    """
    out.mkdir(parents=True, exist_ok=True)
    drivers = tuple(sorted({DRIVERS[case.driver] for case in plan.cases}))
    runner = _Runner(plan, out, emit, stop, program or RankProgram(preload=drivers))
    try:
        return runner.run(cases)
    finally:
        runner.close()


class _Runner:
    def __init__(self, plan: Plan, out: Path, emit: Emit, stop: threading.Event, program: RankProgram) -> None:
        self._plan = plan
        self._out = out
        self._emit = emit
        self._stop = stop
        self._program = program
        self._template: Template | None = None

    def run(self, cases: tuple[Case, ...]) -> list[CaseResult]:
        """Run the cases and write the results file, from its first line to its last."""
        started_at = now()
        modules: dict[str, Any] = {}
        unusable: str | None = None
        try:
            _, ready = self._ready_template()
            modules = ready["modules"]
            unusable = self._too_few_gpus(cases, ready["cuda_devices"])
        except TemplateError as error:
            unusable = str(error)
        # Only now: a run that was interrupted while it imported leaves no results behind, not empty ones.
        writer = ResultsWriter(self._out)
        try:
            writer.write(self._run_line(started_at, modules, unusable))
            results = self._run_cases(cases, writer) if unusable is None else []
            completed = sum(result.status == "completed" for result in results)
            end = {"cases": len(cases), "completed": completed, "finished_at": now()}
            writer.write({"schema": SCHEMA, "type": "end", **end})
        finally:
            writer.close()
        if unusable is not None:
            raise UnusableEnvironmentError(unusable)
        return results

    def close(self) -> None:
        """End the template process, if there is one."""
        if self._template is not None:
            self._template.close()
            self._template = None

    def _run_cases(self, cases: tuple[Case, ...], writer: ResultsWriter) -> list[CaseResult]:
        results: dict[str, CaseResult] = {}
        for index, case in enumerate(cases, start=1):
            self._emit({"event": "case-started", "case": case.id, "index": index, "total": len(cases)})
            missing = _missing_baseline(case, results)
            result = missing or self._run_case(case)
            # On disk before anyone is told.
            writer.write(result.as_line())
            results[case.id] = result
            end = {"status": result.status, "seconds": round(result.seconds, 3)}
            self._emit({"event": "case-finished", "case": case.id, **end})
        return list(results.values())

    def _run_case(self, case: Case) -> CaseResult:
        began = time.monotonic()
        try:
            template, _ = self._ready_template()
            run = CaseRun(self._plan, case, self._out, template, self._stop, self._emit)
            result = run.run()
        except TemplateError as error:
            self.close()
            cause = Failure(kind="exit", message=str(error), log=TEMPLATE_LOG)
            return CaseResult(case=case.id, status="failed", seconds=time.monotonic() - began, failure=cause)
        if run.template_gone:
            # Something killed it (out of memory, say). The next case gets a new one.
            self.close()
        return result

    def _ready_template(self) -> tuple[Template, dict[str, Any]]:
        """Return the template process and, if it was started just now, its "ready" event."""
        if self._template is not None:
            return self._template, {}
        self._template = Template(self._program, self._plan.device, self._out / TEMPLATE_LOG)
        limit = time.monotonic() + IMPORT_LIMIT_SECONDS
        while time.monotonic() < limit:
            if self._stop.is_set():
                raise RunInterruptedError
            event = self._template.next_event(POLL_SECONDS) or {"event": "none"}
            if event["event"] == "ready":
                return self._template, event
            if event["event"] == "unusable":
                raise TemplateError(f"the libraries cannot be imported: {event['error']}")
            if event["event"] == "gone":
                raise TemplateError(f"the process died while it imported the libraries; see {TEMPLATE_LOG}")
        raise TemplateError(f"importing the libraries took more than {IMPORT_LIMIT_SECONDS:g} s")

    def _too_few_gpus(self, cases: tuple[Case, ...], devices: int) -> str | None:
        largest = max(cases, key=lambda case: case.world_size)
        if self._plan.device == "cpu" or largest.world_size <= devices:
            return None
        return f"case {largest.id} needs {largest.world_size} GPUs; torch sees {devices} here"

    def _run_line(self, started_at: str, modules: dict[str, Any], unusable: str | None) -> dict[str, Any]:
        findings = environment.findings(self._plan.expected_versions, modules)
        if unusable is not None:
            findings.append({"code": "unusable", "package": None, "expected": None, "found": unusable})
        return {
            "schema": SCHEMA,
            "type": "run",
            "plan_digest": self._plan.digest,
            "nonce": self._plan.nonce,
            "subject": dict(self._plan.subject),
            "smoke_version": __version__,
            "smoke_digest": smoke_digest(),
            "started_at": started_at,
            "environment": environment.describe(self._plan.device, modules),
            "environment_findings": findings,
        }


def smoke_digest() -> str | None:
    """Return "sha256:..." of the zipapp this runs from, or None when it runs from its sources."""
    path = zipapp_path()
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest() if path else None


def _missing_baseline(case: Case, results: dict[str, CaseResult]) -> CaseResult | None:
    """Return the result of a case whose baseline did not complete, or None if it can be run."""
    if case.baseline is None or results[case.baseline].status == "completed":
        return None
    message = f"baseline {case.baseline} {results[case.baseline].status}: no weights to start from"
    return CaseResult(case=case.id, status="not-run", failure=Failure(kind="baseline-missing", message=message))
