"""Components for which uv went back to an old release: a newer one is demanded, to take it or to see what prevents it.

uv goes back over the releases of whatever package it decides last: nemo-run 0.4.0 was locked where 0.5.0 resolves too.
A demand that nothing meets can make it go back over all releases of many packages: what is tried has bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from packaging.version import Version

from envbuild.core.errors import ResolutionError
from envbuild.core.files import machine_errors
from envbuild.core.progress import SilentReporter
from envbuild.lock.components.models import Chosen, DecidedBy, Preference
from envbuild.lock.components.releases import EXACT
from envbuild.lock.context import LockContext
from envbuild.lock.inputs.deviation import Deviation
from envbuild.lock.lockfile import PROJECT_FILE, UV_LOCK
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.resolve.declarations import releases_as_of
from envbuild.lock.uv.cuda_packages import of_another_cuda
from envbuild.lock.uv.explanation import names_in
from envbuild.lock.uv.preferences import prefer
from envbuild.lock.uv.program import TookTooLongError
from envbuild.lock.uv.resolution import NO_SOLUTION, Resolution, resolve, throw_away, upload_seconds

# A component this much older than the commit that leads was not what its authors worked with; of what their own uv.lock
# names, where uv went back in the same way, one that is this much older: that of Megatron-Bridge in August 2026 has
# nemo-run 0.4.0 of spring 2025, and 0.11.0 resolves with all the rest.
OLD, OLD_AND_LOCKED = timedelta(days=90), timedelta(days=365)
# So many packages are named as being in the way.
MOST_NAMED = 3
# For all components together: so many resolutions, until one takes so much processor time. Not time on the clock: on a
# busy machine, or behind a slow index, an old release would be locked. uv takes 1 to 15 s for a stack of 300 packages.
MOST_RESOLUTIONS, MOST_CPU_SECONDS = 8, 60


@dataclass(frozen=True, kw_only=True)
class HeldBack:
    """A component of which an old release is locked.

    Attributes:
        version: the one that is locked.
        uploaded: its day.
        newest: the newest that the component may be.
    """

    name: str
    version: str
    uploaded: str
    newest: str


def held_back(plan: LockPlan, found: Resolution, context: LockContext) -> list[HeldBack]:
    """The components that are open, older than the commit that leads, and of which there are newer releases."""
    released = {name: item for name, item in plan.project.chosen.items() if not item.is_direct}
    # Only what belongs to an anchor can be of another time than it.
    if not released or plan.effective.stack.anchor is None:
        return []
    # Packages for another CUDA than the base's are refused, unless what needs them is newer.
    if (cuda := plan.project.base.cuda_major) and (wrong := of_another_cuda(found.packages, cuda)):
        released = {name: item for name, item in released.items() if name in wrong}
    tables = found.tables
    uploads: dict[str, datetime] = {}
    for name, item in released.items():
        table = tables.get(name)
        if table is not None and is_open(plan, item) and (times := upload_seconds(table)):
            uploads[name] = datetime.fromtimestamp(min(times), timezone.utc)
    if not uploads:
        return []
    dates = [lead.chosen.commit.committed_at for lead in plan.effective.leads if lead.chosen.commit is not None]
    now = max(dates) if dates else plan.as_of.moment
    old = {
        name: uploaded
        for name, uploaded in uploads.items()
        if uploaded < now - (OLD_AND_LOCKED if _preferred(plan, name, found) else OLD)
    }
    if not old:
        return []
    wanted = {name: plan.project.chosen[name].wanted for name in old}
    newest = releases_as_of(replace(plan, preferences={}), wanted, f"find the newest {', '.join(old)}", context)
    items = [
        HeldBack(
            name=name,
            version=found.pins[name],
            uploaded=f"{uploaded:%Y-%m-%d}",
            newest=str(newest[name]["version"]),
        )
        for name, uploaded in old.items()
    ]
    return [item for item in items if Version(item.newest) > Version(item.version)]


def is_open(plan: LockPlan, item: Chosen) -> bool:
    """Whether nothing decides the release: no pin, and no range but the base's."""
    if item.name in plan.project.base.provides or item.name in plan.keep:
        return False
    if item.origin not in (DecidedBy.STACK, DecidedBy.DECLARED) or item.spec.version or EXACT.match(item.wanted):
        return False
    return not any(deviation.package == item.name for deviation in plan.inputs.deviations)


def _preferred(plan: LockPlan, name: str, found: Resolution) -> Preference | None:
    """The preference that was followed; None: there is none, or another version was taken."""
    preference = plan.preferences.get(name)
    return preference if preference is not None and preference.version == found.pins.get(name) else None


def _unlike(plan: LockPlan, preference: Preference, item: HeldBack) -> LockPlan:
    """A plan that follows a preference no more, and says so."""
    deviation = Deviation(
        package=item.name,
        instead_of=f"=={item.version}",
        specifier=f">{item.version}",
        reason=f"{preference.because} has {item.version} of {item.uploaded}, and the rest resolves with a newer one",
    )
    return replace(
        plan,
        inputs=replace(plan.inputs, deviations=(*plan.inputs.deviations, deviation)),
        preferences={key: text for key, text in plan.preferences.items() if key != item.name},
    )


class _OutOfBoundsError(Exception):
    """The resolutions are used up, or one took too long."""


def with_newer(plan: LockPlan, found: Resolution, context: LockContext) -> tuple[LockPlan, Resolution, tuple[str, ...]]:
    """The plan with newer releases of the components that are held back, resolved; and lines about those that stay.

    A newer one is taken where the rest resolves with it and no other component gets older for it, if need be without
    a version that upstream forces on another package.
    """
    lines: list[str] = []
    trials = _Trials(found, context)
    for item in held_back(plan, found, context):
        try:
            with context.reporter.step(f"look what holds {item.name} back at {item.version} of {item.uploaded}"):
                newer, blocking = _demand(plan, item, trials)
            in_the_way = f"held back by {', '.join(blocking) or 'the rest'}"
        except _OutOfBoundsError:
            newer, in_the_way = None, f"what holds it back was not found in {trials.words}"
        if newer is None:
            lines.append(f"{item.name} {item.version} ({item.uploaded}), not {item.newest}: {in_the_way}")
            context.reporter.note(f"note: {lines[-1]}")
        else:
            preference = _preferred(plan, item.name, found)
            plan = _unlike(newer, preference, item) if preference is not None else newer
    return plan, trials.taken(plan), tuple(lines)


def _demand(plan: LockPlan, item: HeldBack, trials: _Trials) -> tuple[LockPlan | None, tuple[str, ...]]:
    """The plan with a newer release; else which packages are in its way, the likeliest first."""
    # A lower bound is what uv needs: without one it ends at a release that is old enough to fit (astral-sh/uv#8157).
    limits = {**plan.project.limits, item.name: f">{item.version}"}
    trial = replace(plan, project=replace(plan.project, limits=limits))
    try:
        return (trial, ()) if trials.is_better(trial) else (None, ())
    except ResolutionError as error:
        if NO_SOLUTION not in error.why:
            raise
        blocking = _named(error.why, item.name, plan, trials.found)
    for other in blocking:
        if (forced := plan.upstream_overrides.get(other)) is None:
            continue
        deviation = Deviation(
            package=other,
            instead_of=", ".join(forced.texts),
            reason=f"it holds {item.name} back at {item.version} of {item.uploaded}",
        )
        left = {key: text for key, text in trial.project.overrides.items() if key != other}
        relaxed = replace(
            trial,
            inputs=replace(trial.inputs, deviations=(*trial.inputs.deviations, deviation)),
            upstream_overrides={key: text for key, text in plan.upstream_overrides.items() if key != other},
            project=replace(trial.project, overrides=left),
        )
        try:
            if trials.is_better(relaxed):
                return relaxed, ()
        except _OutOfBoundsError:
            break  # what is in the way is known
        except ResolutionError:
            continue
    return None, blocking


@dataclass
class _Trials:
    """Resolutions with a newer release, within bounds."""

    found: Resolution
    context: LockContext
    resolutions: int = 0
    used_up: bool = False
    # The last one that is better, the project of which is that of the plan in the end.
    better: tuple[str, Path, Resolution] | None = None

    @property
    def words(self) -> str:
        """What was spent, for people."""
        return f"{self.resolutions} resolution{'s' * (self.resolutions != 1)}"

    def is_better(self, trial: LockPlan) -> bool:
        """Whether no component gets older.

        Raises:
            ResolutionError: it does not resolve.
            _OutOfBoundsError: the bounds are reached.
        """
        if self.used_up or self.resolutions >= MOST_RESOLUTIONS:
            raise _OutOfBoundsError
        self.resolutions += 1
        # With what was found as preferences: only what must move does.
        text = trial.project_text(trial.keep)
        folder = throw_away(text, self.context)
        prefer(folder, self.found.pins)
        quiet = replace(self.context, reporter=SilentReporter(), most_cpu_seconds=MOST_CPU_SECONDS)
        try:
            other = resolve(folder, trial.torch, trial.what, quiet, settings_may_be_ignored=True)
        except TookTooLongError:
            self.used_up = True
            raise _OutOfBoundsError from None
        if any(_is_older(name, other.pins, self.found.pins) for name in trial.project.chosen):
            return False
        self.better = (text, folder, other)
        return True

    def taken(self, plan: LockPlan) -> Resolution:
        """What the plan resolves to, with its project and uv.lock in the context's folder."""
        text = plan.project_text(plan.keep)
        if self.better is None or self.better[0] != text:
            return self.found
        _, folder, resolution = self.better
        with machine_errors(folder):
            for name in (PROJECT_FILE, UV_LOCK):
                (self.context.folder / name).write_bytes((folder / name).read_bytes())
        return resolution


def _is_older(name: str, now: Mapping[str, str], before: Mapping[str, str]) -> bool:
    return name in now and name in before and Version(now[name]) < Version(before[name])


def _named(explanation: str, name: str, plan: LockPlan, found: Resolution) -> tuple[str, ...]:
    """The packages that uv's explanation names most: those that the project itself names come first."""
    counted = Counter(names_in(explanation))
    project = plan.project
    direct = {*project.chosen, *project.requirements, *project.overrides}
    known = [word for word, _ in counted.most_common() if word != name and word in (direct | found.pins.keys())]
    return tuple(sorted(known, key=lambda word: word not in direct)[:MOST_NAMED])
