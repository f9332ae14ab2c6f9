"""What a search has tried, kept until it ends: one that was interrupted goes on where it was.

The failures of attempts are kept by the digest of what decides them, and so is a lock that is not verified yet. A lock
as of now is resolved anew in each run: so that the attempts of the last run count, the moment of the first one holds
for a day.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import envbuild
from envbuild.catalog.catalog import Selection, definition_digest
from envbuild.catalog.context import Context
from envbuild.core import locks
from envbuild.core.digests import digest_of, digest_of_code, short
from envbuild.core.errors import CheckRefusedError, EnvbuildError, ResolutionError
from envbuild.core.files import machine_errors, remove_tree, write_atomic
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.inputs.as_of import timestamp
from envbuild.lock.inputs.deviation import replaced
from envbuild.lock.inputs.request import LockInputs, LockRequest
from envbuild.lock.lockdir import copy_files
from envbuild.lock.lockfile import read_lock
from envbuild.lock.make import LockProgress
from envbuild.lock.resolve.resolve import ResolvedPlan
from envbuild.lock.uv.program import uv_version
from envbuild.lock.uv.resolution import Resolution, upload_seconds

FOLDER, STARTED = "searches", "started.json"
# A lock that is not verified yet: its files, and what a search asks of its resolution.
DRAFT, PACKAGES = ".lock", "packages.json"
LASTING = timedelta(days=1)
# A package that did not build may build another time: it is tried again.
OF_INSTALLATION = "install"
OF_IMPORT = "import"
_FINDINGS = TypeAdapter(tuple[CheckFinding, ...])


@dataclass
class SearchSession:
    """The attempts for one request, on all bases.

    Attributes:
        folder: in the store; it goes when the search ends.
        verifies: locks are verified: what failed to import counts, and a lock is kept while it is not verified.
    """

    folder: Path
    context: Context
    verifies: bool = True
    _moment: datetime | None = field(default=None, init=False)

    @classmethod
    def of(cls, selection: Selection, request: LockRequest, context: Context, *, verifies: bool) -> SearchSession:
        """The session of a request; nothing is written yet."""
        key = digest_of(
            {
                "stack": definition_digest(selection.catalog.stack(selection.stack_name)),
                "bases": [definition_digest(selection.catalog.base(name)) for name in _bases(selection)],
                "request": LockInputs.of(selection, request).digest,
                # All of it: what fails in an attempt, and what a failure is about, later code may see otherwise.
                "envbuild": digest_of_code(Path(envbuild.__file__).parent),
                "uv": uv_version(),
            }
        )
        return cls(folder=context.store.root / FOLDER / short(key), context=context, verifies=verifies)

    def begin(self, context: Context) -> Context:
        """The context as of the moment of the first attempt."""
        if self._moment is None:
            self._moment = self._first_moment()
        moment = self._moment
        return replace(context, clock=lambda: moment)

    def _first_moment(self) -> datetime:
        now, file = self.context.clock(), self.folder / STARTED
        with self._alone(), machine_errors(self.folder):
            try:
                started = datetime.fromisoformat(json.loads(file.read_text())["moment"])
            except (FileNotFoundError, ValueError, KeyError):
                started = None
            # Not a start that is still to come: the machine's clock was wrong then, or is now.
            known = len(list(self.folder.glob("*.json"))) - 1 + len(list(self.folder.glob(f"*{DRAFT}")))
            # Without a known attempt there is nothing to go on with: the run ended before one, by an outage, say.
            if known > 0 and started is not None and timedelta() <= now - started < LASTING:
                self.context.reporter.note(
                    f"note: resuming as of {started:%Y-%m-%d %H:%M} UTC, when it first ran; {known} attempts are known"
                )
                return started
            remove_tree(self.folder)
            self.folder.mkdir(parents=True)
            write_atomic(file, json.dumps({"moment": now.astimezone(timezone.utc).isoformat()}))
        return now

    def recall(self, steps: LockProgress) -> Path | None:
        """The lock that the same attempt gave before, in a folder; its steps get what it found.

        Raises:
            EnvbuildError: the failure that it ended with.
        """
        file = self._file(steps)
        steps.known_as = steps.known_as or file.stem
        try:
            kept: dict[str, Any] = json.loads(file.read_text())
        except (FileNotFoundError, ValueError):
            return self._draft(steps)
        if not self.verifies and any(item["code"] == OF_IMPORT for item in kept["findings"]):
            return None
        if kept["packages"] is not None and steps.plan is not None:
            steps.resolved = ResolvedPlan(plan=steps.plan, resolution=_resolution(kept["packages"]))
        texts = {"why": kept["why"], "fix": kept["fix"]}
        if kept["findings"]:
            raise LockRefusedError(kept["what"], findings=_FINDINGS.validate_python(kept["findings"]), **texts)
        failure = ResolutionError(kept["what"], **texts).about(*kept["about"])
        failure.explanation = kept["explanation"]
        raise failure

    def keep(self, steps: LockProgress, error: EnvbuildError) -> None:
        """Keep the failure of an attempt, unless another time it might not fail."""
        findings: Sequence[CheckFinding] = error.findings if isinstance(error, LockRefusedError) else ()
        lasting = bool(findings) or isinstance(error, ResolutionError)
        if steps.plan is None or not lasting or any(item.code == OF_INSTALLATION for item in findings):
            return
        kept = {
            "what": error.what,
            "why": error.why,
            "fix": error.fix,
            "about": list(error.packages),
            "explanation": error.explanation if isinstance(error, ResolutionError) else "",
            "findings": _FINDINGS.dump_python(tuple(findings), mode="json"),
            "packages": _packages(steps.resolved.resolution) if steps.resolved is not None else None,
        }
        with self._alone(), machine_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)  # another process may have ended the same search
            write_atomic(self._file(steps), json.dumps(kept))
            remove_tree(self.folder / f"{steps.known_as}{DRAFT}")

    def keep_lock(self, steps: LockProgress, lock: Path) -> None:
        """Keep a lock that is resolved and checked, and not verified yet."""
        if steps.resolved is None or not self.verifies:
            return
        with self._alone(), machine_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".draft.") as made:
                draft = Path(made) / "draft"
                draft.mkdir()
                copy_files(lock, draft)
                (draft / PACKAGES).write_text(json.dumps(_packages(steps.resolved.resolution)))
                place = self.folder / f"{steps.known_as}{DRAFT}"
                remove_tree(place)
                draft.rename(place)

    def has_lock(self, steps: LockProgress) -> bool:
        """Whether the lock of an attempt is kept."""
        return bool(steps.known_as) and (self.folder / f"{steps.known_as}{DRAFT}").is_dir()

    def _draft(self, steps: LockProgress) -> Path | None:
        """The lock of the same attempt, which was not verified; None: there is none, or it is damaged."""
        folder = self.folder / f"{self._file(steps).stem}{DRAFT}"
        if steps.plan is None or not folder.is_dir():
            return None
        try:
            read_lock(folder)
            packages = json.loads((folder / PACKAGES).read_text())
        except (CheckRefusedError, OSError, ValueError):
            return None
        steps.resolved = ResolvedPlan(plan=steps.plan, resolution=_resolution(packages))
        following = ": its verification is next" if self.verifies else ""
        self.context.reporter.note(f"note: the lock is resolved already{following}")
        return folder

    def end(self) -> None:
        """Forget what was tried."""
        if self._moment is not None:
            with self._alone():
                remove_tree(self.folder)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Be the only one who changes the folder."""
        # Two projects may lock the same stack at once, and have one store.
        return locks.exclusive(self.context.store.root / "locks" / f"search-{self.folder.name}.lock")

    def _file(self, steps: LockProgress) -> Path:
        plan = steps.plan
        assert plan is not None  # noqa: S101 - for the type checker: an attempt has a plan by then
        key = digest_of(
            {
                "inputs": plan.inputs.digest,
                "project": plan.project_text(plan.keep),
                "preferred": dict(plan.preferred),
                # A source that cannot be had is in no project: with it and with a release the project is the same.
                "replaced": [*sorted(replaced(plan.inputs.deviations))],
            }
        )
        return self.folder / f"{short(key)}.json"


def _bases(selection: Selection) -> list[str]:
    return [name for builds in selection.catalog.stack(selection.stack_name).builds for name in builds.bases]


def _packages(resolution: Resolution) -> dict[str, tuple[str, list[int]]]:
    """What a search asks of a resolution: versions, and when their files were uploaded."""
    return {
        name: (str(table["version"]), sorted(set(upload_seconds(table))))
        for name, table in resolution.tables.items()
        if "version" in table
    }


def _resolution(packages: dict[str, tuple[str, list[int]]]) -> Resolution:
    tables: list[dict[str, Any]] = []
    for name, (version, seconds) in packages.items():
        files = [{"upload-time": timestamp(datetime.fromtimestamp(one, timezone.utc))} for one in seconds]
        tables.append({"name": name, "version": version, "source": {}, "wheels": files})
    return Resolution(
        pins={table["name"]: table["version"] for table in tables}, newest_upload=0, uv_lock={"package": tables}
    )
