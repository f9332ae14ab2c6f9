"""The results of the cases: written to disk before they are reported, and what may still start after them."""

from collections.abc import Mapping

from envbuild_smoke.results import CaseLine, Failure
from envbuild_smoke.run.jobs import Key, RunJob
from envbuild_smoke.run.results import Emit, ResultsWriter


class ResultLog:
    """The results of a run, by case and repeat."""

    def __init__(self, emit: Emit, writer: ResultsWriter, results: Mapping[Key, CaseLine]) -> None:
        self.results: dict[Key, CaseLine] = dict(results)
        self._emit = emit
        self._writer = writer

    def finish(self, result: CaseLine) -> None:
        """Write a result to disk, then report it."""
        self._writer.write(result)
        self.results[result.case, result.repeat] = result
        end = {"status": result.status, "seconds": result.seconds}
        self._emit({"event": "case-finished", "case": result.case, "repeat": result.repeat, **end})

    def missing_baseline(self, job: RunJob) -> Failure | None:
        """Return why a case cannot start, or will not: its baseline did not complete."""
        baseline = self.results.get((str(job.case.baseline), job.repeat))
        if baseline is None or baseline.status == "completed":
            return None
        message = f"baseline {job.case.baseline} {baseline.status}: no weights to start from"
        if baseline.failure is not None and baseline.failure.is_from_outside:
            return Failure(kind=baseline.failure.kind, message=f"{message}; {baseline.failure.message}")
        return Failure(kind="baseline-missing", message=message)
