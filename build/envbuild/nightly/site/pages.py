"""The pages of the site as texts, by file. Each is one file that needs nothing else: no script, no font, no picture."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild import __version__
from envbuild.catalog.fields import MOMENT_FORMAT, moment_of
from envbuild.certify.report.page import html_templates
from envbuild.core.digests import Json, canonical_json, short
from envbuild.core.text import quoted_command
from envbuild.ledger.models import LockRow, NightRow, PublicationRow, Row, StepRow
from envbuild.nightly.site import words
from envbuild.nightly.site.plots import history, losses
from envbuild.nightly.site.snapshot import LedgerSnapshot
from envbuild.nightly.state import State, TargetState

if TYPE_CHECKING:
    import jinja2

    from envbuild.certify.report.charts import Chart

INDEX, NIGHTS_PAGE, RECORD = "index.html", "nights.html", "index.json"
RECORD_SCHEMA, LOCK_SCHEMA = "envbuild.site/1", "envbuild.site-lock/1"
STEPS = ("lock", "wheels", "image", "certify", "publish", "bisect")
# The worst first: in this order pages show them.
STATE_WORDS: dict[State, str] = {
    "suspect": "suspect",
    "stale": "stale",
    "waiting": "waiting for hardware",
    "none": "none",
    "good": "good",
}
WORST_FIRST = tuple(STATE_WORDS)


@dataclass(frozen=True, kw_only=True)
class StackView:
    """A stack on the first page."""

    name: str
    states: tuple[TargetState, ...]
    night: NightRow | None
    charts: tuple[Chart, ...]

    @property
    def severity(self) -> int:
        """The place of its worst target among the states."""
        return min(map(_severity, self.states))


@dataclass(frozen=True, kw_only=True)
class TargetNight:
    """A target on the page of a night; an empty target is what all targets share."""

    target: str
    steps: dict[str, StepRow]
    charts: tuple[Chart, ...]

    @property
    def failed(self) -> tuple[StepRow, ...]:
        return tuple(step for step in self.steps.values() if step.error is not None)

    @property
    def severity(self) -> int:
        """Its place on the page: what all share, then what failed, then what waits for hardware."""
        reached = {step.state for step in self.steps.values()}
        return 0 if not self.target else 1 if "failed" in reached else 2 if "waiting" in reached else 3


@dataclass(frozen=True)
class LedgerPages:
    """The pages of a ledger at a moment.

    Attributes:
        states: of each stack and target, at that moment.
    """

    snapshot: LedgerSnapshot
    states: tuple[TargetState, ...]
    at: datetime

    def pages(self) -> Iterable[tuple[str, bytes]]:
        """Every file by its path in the site."""
        names = dict.fromkeys(state.stack for state in self.states)
        stacks = sorted(map(self._stack, names), key=lambda stack: stack.severity)
        yield INDEX, self._render("index.html.j2", "", stacks=stacks)
        yield RECORD, canonical_json(self._record()) + b"\n"
        newest_first = [*reversed(self.snapshot.nights)]
        yield NIGHTS_PAGE, self._render("nights.html.j2", "", nights=newest_first, outcome=self._outcome)
        for night in newest_first:
            yield f"nights/{words.file_name(night.id)}.html", self._night(night)
        for digest, rows in self.snapshot.locks_by_digest.items():
            name = words.file_name(digest)
            yield f"locks/{name}.html", self._lock(digest, rows)
            yield f"locks/{name}.json", canonical_json(self._lock_record(digest, rows)) + b"\n"

    def _stack(self, name: str) -> StackView:
        snapshot = self.snapshot
        states = tuple(state for state in self.states if state.stack == name)
        return StackView(
            name=name,
            states=tuple(sorted(states, key=_severity)),
            night=next((night for night in reversed(snapshot.nights) if night.stack == name), None),
            charts=history(name, [state.target for state in states], snapshot),
        )

    def _night(self, night: NightRow) -> bytes:
        snapshot = self.snapshot
        steps = snapshot.steps_of_night.get(night.id, [])
        names = dict.fromkeys(["", *night.targets, *(step.target for step in steps)])
        targets = []
        for target in names:
            mine = {str(step.name): step for step in steps if step.target == target}
            if not mine and not target:
                continue
            certified = mine.get("certify")
            # Cases stand under their certificate, or under the night in which they failed.
            runs = [certified.digest, night.id] if certified else []
            cases = next((rows_of_run for run in runs if (rows_of_run := snapshot.cases_of_run.get((run, target)))), [])
            # What was certified before has its curves on the page of the night that trained it.
            fresh = certified is not None and certified.state != "nothing"
            charts = losses(cases) if fresh else ()
            targets.append(TargetNight(target=target, steps=mine, charts=charts))
        nights = [other for other in snapshot.nights if other.stack == night.stack]
        place = nights.index(night)
        return self._render(
            "night.html.j2",
            "../",
            night=night,
            targets=sorted(targets, key=lambda state: state.severity),
            outcome=self._outcome(night),
            bytes_sent=sum(step.bytes_sent for step in steps),
            bisects=snapshot.bisects_of_night.get(night.id, []),
            before=nights[place - 1] if place else None,
            after=nights[place + 1] if place + 1 < len(nights) else None,
        )

    def _outcome(self, night: NightRow) -> tuple[str, str]:
        """The tone of a night and its words."""
        if night.exit_code is None:
            return "none", "not finished"
        steps = self.snapshot.steps_of_night.get(night.id, [])
        failed = {step.target for step in steps if step.state == "failed"}
        # A lock has no target.
        if targets := failed - {""}:
            return "suspect", f"{len(targets)} of {len(night.targets)} targets failed"
        if failed:
            return "suspect", "the lock failed"
        if any(step.state == "waiting" for step in steps):
            return "waiting", "a plan waits for hardware"
        if night.exit_code:
            return "stale", f"ended with exit code {night.exit_code}"
        published = sum(step.name == "publish" and step.state == "done" for step in steps)
        return "good", f"{published} published" if published else "nothing new"

    def _lock(self, digest: str, rows: list[LockRow]) -> bytes:
        return self._render(
            "lock.html.j2",
            "../",
            lock=rows[0],
            names=[row.name for row in rows],
            record=f"{words.file_name(digest)}.json",
            **self._results_of(digest),
        )

    def _lock_record(self, digest: str, rows: list[LockRow]) -> dict[str, Json]:
        tables: dict[str, Json] = {
            name: [row.model_dump(mode="json") for row in of_kind]
            for name, of_kind in {"locks": rows, **self._results_of(digest)}.items()
        }
        return {"schema": LOCK_SCHEMA, **tables}

    def _results_of(self, lock_digest: str) -> dict[str, Sequence[Row]]:
        """The images, certificates and publications of a lock, by kind."""
        snapshot = self.snapshot
        return {
            "images": snapshot.images_of_lock.get(lock_digest, []),
            "certificates": snapshot.certificates_of_lock.get(lock_digest, []),
            "publications": snapshot.publications_of_lock.get(lock_digest, []),
        }

    def _record(self) -> dict[str, Json]:
        return {
            "schema": RECORD_SCHEMA,
            "at": self.at.strftime(MOMENT_FORMAT),
            "targets": [state.as_json() for state in self.states],
        }

    def _age(self, moment: str) -> str:
        return words.age(moment_of(moment), self.at)

    def _render(self, template: str, root: str, **values: object) -> bytes:
        environment, style = _templates()
        # As in certify/report/page.py: the policy lets nothing run or load, its own style by its hash.
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        text = environment.get_template(template).render(
            **values,
            root=root,
            page=template.partition(".")[0],
            at=self.at,
            age=self._age,
            max_age_days=next((state.max_age_days for state in self.states), None),
            locks=self.snapshot.locks_by_digest,
            style=style,
            policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
            envbuild=__version__,
        )
        return text.encode()


def _severity(state: TargetState) -> int:
    return WORST_FIRST.index(state.state)


def docker_command(row: PublicationRow) -> str:
    """The command that fetches exactly this image."""
    return quoted_command("docker", "pull", f"{row.repository}@{row.docker_digest or row.oci_digest}")


def took(night: NightRow) -> str:
    """For people: how long a night took, or that it did not end."""
    if night.finished_at is None:
        return "not finished"
    return words.duration((moment_of(night.finished_at) - moment_of(night.started_at)).total_seconds())


@cache
def _templates() -> tuple[jinja2.Environment, str]:
    environment = html_templates("envbuild.nightly.site", "envbuild.certify.report")
    environment.filters |= {
        "moment": words.moment_text,
        "size": words.size,
        "duration": words.duration,
        "short": short,
        "file": words.file_name,
        "docker": docker_command,
    }
    environment.globals |= {
        "commit_link": words.commit_link,
        "took": took,
        "steps": STEPS,
        "state_words": STATE_WORDS,
    }
    report = Path(__file__).parents[2] / "certify/report/page.css"
    return environment, report.read_text() + (Path(__file__).parent / "site.css").read_text()
