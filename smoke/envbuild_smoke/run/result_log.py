"""The results of the cases: written to disk before they are reported, and what may still start after them."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from envbuild_smoke.plan.json_reader import PlanError, load_json, read_object
from envbuild_smoke.results import CaseLine, Failure, Weights
from envbuild_smoke.run.jobs import Key, RunJob
from envbuild_smoke.run.results import Emit, ResultsWriter, rounded
from envbuild_smoke.run.task_run import repeat_folder

TRAINED = "trained.json"


class ResultLog:
    """The results of a run, by case and repeat.

    A case whose final weights are to be compared is `trained` when its ranks are done, and finished when it was
    compared. What it had by then is in its folder, so that an interrupted run compares it without training again.
    """

    def __init__(self, out: Path, emit: Emit, writer: ResultsWriter, results: Mapping[Key, CaseLine]) -> None:
        self.results: dict[Key, CaseLine] = dict(results)
        self.trained: dict[Key, CaseLine] = {}
        self._out = out
        self._emit = emit
        self._writer = writer
        # Baselines that completed, and did not when they ran again for their checkpoint.
        self._lost: dict[Key, CaseLine] = {}

    def read_trained(self, run: Key) -> None:
        """Take over what an interrupted run left of a case that it had trained and not compared."""
        result = _read_trained(self._trained_path(run))
        # The file is in a folder that its case's id names: one that was copied there is of another case.
        if result is not None and (result.case, result.repeat) == run and result.status == "completed":
            self.trained[run] = result

    def keep_trained(self, result: CaseLine) -> None:
        """Keep a case that waits for the comparison of its weights."""
        run = result.case, result.repeat
        _write_whole(self._trained_path(run), json.dumps(asdict(rounded(result)), allow_nan=False))
        self.trained[run] = result
        self._emit({"event": "case-trained", "case": result.case, "repeat": result.repeat})

    def compared(
        self, run: Key, weights: Weights | None, failure: Failure | None, restarted: str | None = None
    ) -> None:
        """Finish a trained case with its comparison, or with why that failed; with neither it stays as it is.

        `restarted` is why the comparison was started a second time.
        """
        result = self.trained.pop(run, None)
        if result is None:
            return
        if restarted is not None:
            result = replace(result, restarted=f"comparing the final weights: {restarted}")
        if failure is not None:
            failure = replace(failure, message=f"comparing the final weights: {failure.message}")
            result = replace(result, status="failed", failure=failure)
        elif weights is not None:
            result = replace(result, weights=weights)
        self.finish(result)

    def finish(self, result: CaseLine) -> None:
        """Write a result to disk, then report it."""
        self._writer.write(rounded(result))
        self.results[result.case, result.repeat] = result
        end = {"status": result.status, "seconds": round(result.seconds, 3)}
        self._emit({"event": "case-finished", "case": result.case, "repeat": result.repeat, **end})

    def ran_again(self, result: CaseLine) -> None:
        """Note a baseline that ran for its checkpoint alone: its result of the first time stands."""
        if result.status != "completed":
            self._lost[result.case, result.repeat] = result

    def missing_baseline(self, job: RunJob) -> Failure | None:
        """Return why a case cannot start, or will not: its baseline did not complete."""
        baseline = self._baseline(job)
        if baseline is None or baseline.status == "completed":
            return None
        message = f"baseline {job.case.baseline} {baseline.status}: no weights to start from"
        return Failure(kind="baseline-missing", message=message)

    def comparable(self, job: RunJob) -> bool:
        """False when a case or its baseline ended without weights that could be compared."""
        run = job.run
        own = self.trained.get(run) or self.results.get(run)
        return all(result is None or result.status == "completed" for result in (own, self._baseline(job)))

    def _baseline(self, job: RunJob) -> CaseLine | None:
        run = (str(job.case.baseline), job.repeat)
        return self._lost.get(run) or self.results.get(run)

    def _trained_path(self, run: Key) -> Path:
        case_id, repeat = run
        return repeat_folder(self._out, repeat) / "cases" / case_id / TRAINED


def _read_trained(path: Path) -> CaseLine | None:
    try:
        return read_object(CaseLine, load_json(path.read_bytes()), "case")
    except (OSError, PlanError):
        # A file that is absent or incomplete: the case trains again.
        return None


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    # rename(2) is atomic: a reader finds the whole file or none.
    os.replace(partial, path)
