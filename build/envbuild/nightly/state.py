"""The state of a stack for each target: the newest certified image, its age, and why there is no newer one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Literal

from envbuild.catalog.fields import MOMENT_FORMAT, moment_of
from envbuild.core.digests import Json, short
from envbuild.core.text import quoted_command
from envbuild.ledger.ledger import Ledger, grouped
from envbuild.ledger.models import BisectRow, NightRow, PublicationRow, Row, StepRow
from envbuild.nightly.faults import counts

# good: the newest lock's image is certified and published. stale: the newest certified image is older than the policy
# allows. suspect: the newest lock failed, twice. waiting: for hardware. none: nothing certified was published.
State = Literal["good", "stale", "suspect", "waiting", "none"]


@dataclass(frozen=True)
class FailedLock:
    """Why the last night made no lock, and since when no night does."""

    what: str
    since: str


@dataclass(frozen=True, kw_only=True)
class TargetState:
    """A stack for a target.

    Attributes:
        since: when the state began; empty where nothing is known.
        image: the newest certified publication that was not revoked.
        age_days: of its certificate.
        step: what failed, or waits, in the last night.
        broken_by: what a bisection found for the lock of that step; empty: nothing.
        failed_lock: of the last night, which went on with the last good lock; None: it made or had one.
        max_age_days: of the policy.
    """

    stack: str
    target: str
    state: State
    since: str
    image: PublicationRow | None
    age_days: float | None
    step: StepRow | None
    broken_by: str
    failed_lock: FailedLock | None
    max_age_days: float | None

    @property
    def pull_command(self) -> str:
        """The command that gets the image; empty where there is none."""
        if self.image is None:
            return ""
        reference = f"{self.image.repository}:{self.image.moving_tag}"
        return quoted_command("envbuild", "pull", reference, "--target", self.target, "--format", "sqsh")

    def line(self) -> str:
        """For people."""
        mark = "STALE" if self.state == "stale" else self.state
        words = [f"{self.stack:<12} {self.target:<10} {mark:<8}"]
        if self.image is not None:
            at = (self.image.certified_at or self.image.published_at)[:10]
            age = "" if self.age_days is None else f", {self.age_days:.0f} days"
            words.append(f"{short(self.image.oci_digest)} of {at}{age}")
        if self.state != "good" and self.since:
            words.append(f"since {self.since[:10]}")
        if self.step is not None:
            why = self.step.error.what if self.step.error else self.step.note
            words.append(f"{self.step.name} {self.step.state}: {why}")
        if self.broken_by:
            words.append(self.broken_by)
        return "  ".join(words)

    def as_json(self) -> dict[str, Json]:
        return {
            "stack": self.stack,
            "target": self.target,
            "state": self.state,
            "since": self.since or None,
            "image": self.image.model_dump(mode="json") if self.image else None,
            "age_days": self.age_days,
            "max_age_days": self.max_age_days,
            "step": self.step.model_dump(mode="json") if self.step else None,
            "broken_by": self.broken_by or None,
            "failed_lock": asdict(self.failed_lock) if self.failed_lock else None,
            "pull": self.pull_command or None,
        }


def states(
    ledger: Ledger, at: datetime, max_age_days: float | None = None, stack: str | None = None
) -> tuple[TargetState, ...]:
    """The state of every stack for every target that the ledger knows, in the order of their names."""
    publications = grouped(ledger.rows(PublicationRow, stack=stack), _pair)
    steps = grouped(ledger.rows(StepRow, stack=stack), _pair)
    bisected = grouped(ledger.rows(BisectRow, stack=stack), _pair)
    nights = ledger.rows(NightRow, stack=stack)
    pairs = {*publications, *((night.stack, target) for night in nights for target in night.targets)}
    return tuple(
        _state(
            pair,
            publications.get(pair, []),
            steps.get(pair, []),
            _failed_lock(steps.get((pair[0], ""), [])),
            bisected.get(pair, []),
            (at, max_age_days),
        )
        for pair in sorted(pairs)
    )


def _pair(row: Row) -> tuple[str, str]:
    return row.stack, row.of_target


def _state(
    pair: tuple[str, str],
    publications: Sequence[PublicationRow],
    steps: Sequence[StepRow],
    failed_lock: FailedLock | None,
    bisected: Sequence[BisectRow],
    age_limit: tuple[datetime, float | None],
) -> TargetState:
    at, max_age_days = age_limit
    certified = [row for row in publications if row.certified]
    image = max(certified, key=lambda row: (row.certified_at or "", row.published_at), default=None)
    stands_out = _standing_out(steps)
    age = _days(image.certified_at, at) if image is not None and image.certified_at else None
    state, since = _judged(image, age, steps, stands_out, max_age_days)
    return TargetState(
        stack=pair[0],
        target=pair[1],
        state=state,
        since=since,
        image=image,
        age_days=age,
        step=stands_out,
        broken_by=_broken_by(stands_out, bisected),
        failed_lock=failed_lock,
        max_age_days=max_age_days,
    )


def _failed_lock(steps: Sequence[StepRow]) -> FailedLock | None:
    """The lock step of a stack's last night, where it failed; a lock has no target."""
    step = _standing_out([row for row in steps if row.name == "lock"])
    return FailedLock(step.error.what if step.error else step.note, _since(steps, step)) if step else None


def _judged(
    image: PublicationRow | None,
    age: float | None,
    steps: Sequence[StepRow],
    step: StepRow | None,
    max_age_days: float | None,
) -> tuple[State, str]:
    since = _since(steps, step)
    if image is None:
        return ("waiting" if step is not None and step.state == "waiting" else "none", since)
    # Before all else: whatever is the reason, nobody should use an image that old.
    if age is not None and max_age_days is not None and age > max_age_days:
        limit = moment_of(image.certified_at or image.published_at) + timedelta(days=max_age_days)
        return "stale", limit.strftime(MOMENT_FORMAT)
    if step is not None and step.state == "waiting":
        return "waiting", since
    # What the infrastructure did says nothing about the stack: the image is as good as it was.
    if step is not None and step.error is not None and counts(step.error.fault):
        return "suspect", since
    return "good", image.certified_at or image.published_at


def _standing_out(steps: Sequence[StepRow]) -> StepRow | None:
    """The step of the last night that failed or waits."""
    last = steps[-1].night if steps else ""
    return next((row for row in steps if row.night == last and row.state in ("failed", "waiting")), None)


def _broken_by(step: StepRow | None, bisected: Sequence[BisectRow]) -> str:
    """The bisection's result for the lock that failed, also in later nights."""
    if step is None or step.state != "failed":
        return ""
    texts = [row.text.partition("\n")[0] for row in bisected if row.bad == step.lock_digest]
    return texts[-1] if texts else ""


def _since(steps: Sequence[StepRow], step: StepRow | None) -> str:
    """When the step began to end so: in the first of the nights without one that ended otherwise between."""
    if step is None:
        return ""
    of_name = [row for row in steps if row.name == step.name and row.state != "skipped"]
    same = list(takewhile(lambda row: row.state == step.state, reversed(of_name)))
    return same[-1].started_at if same else step.started_at


def _days(moment: str, at: datetime) -> float:
    """Days since a moment; none below zero, where another machine's clock is ahead."""
    return max(0.0, round((at - moment_of(moment)).total_seconds() / 86400, 2))
