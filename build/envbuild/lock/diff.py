"""What resolving anew would change in a lock, or in every lock of a project (``envbuild lock --diff``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Catalog, HostDistribution, Selection, select_to_lock
from envbuild.catalog.context import Context
from envbuild.core.digests import Json, short
from envbuild.core.errors import ConfigurationError
from envbuild.core.progress import Reporter
from envbuild.core.text import shown
from envbuild.lock.context import run_context
from envbuild.lock.existing import moved_branches, moved_inputs
from envbuild.lock.inputs.request import LockInputs, LockRequest, request_of
from envbuild.lock.lock import LockRun
from envbuild.lock.lockdir import no_lock, shipped_lock
from envbuild.lock.lockfile import LOCKFILES, RECORD_FILE, LockDirectory, read_lock
from envbuild.lock.models import Lock, LockedComponent
from envbuild.lock.outcome import Failure
from envbuild.lock.project_locks import committed
from envbuild.lock.requirement_lines import read_requirements
from envbuild.lock.verification import LockVerifier


@dataclass(frozen=True, kw_only=True)
class LockChange:
    """A package that another lock has in another version, or only one of the two has.

    Attributes:
        old: the version before; None: it was not there.
        new: the version after; None: it is not there any more.
        why: what led to it, for people.
    """

    name: str
    old: str | None
    new: str | None
    why: str
    component: bool

    def text(self) -> str:
        """One line for people."""
        match self.old, self.new:
            case None, new:
                return f"+ {self.name} {new}  ({self.why})"
            case old, None:
                return f"- {self.name} {old}  ({self.why})"
            case old, new:
                return f"~ {self.name} {old} -> {new}  ({self.why})"


def compare(old: LockDirectory, new: LockDirectory) -> tuple[LockChange, ...]:
    """Every change from ``old`` to ``new``: components first, then the packages that they bring."""
    changes = []
    names = dict.fromkeys([*old.lock.components, *new.lock.components])
    for name in names:
        before, after = old.lock.components.get(name), new.lock.components.get(name)
        # By what is shown: at another commit a component may have the version of before.
        if _shown(before) != _shown(after):
            why = _why(before, after)
            changes.append(LockChange(name=name, old=_shown(before), new=_shown(after), why=why, component=True))
    components = {canonicalize_name(name) for name in names}
    pins_before, pins_after = old.packages(), new.packages()
    needed_before, needed_after = needed_by(old), needed_by(new)
    for name in sorted({*pins_before, *pins_after} - components):
        before_version, after_version = pins_before.get(name), pins_after.get(name)
        if before_version == after_version:
            continue
        needed = (needed_after if after_version else needed_before).get(name, ())
        why = f"needed by {', '.join(needed[:3])}" + (" and others" if len(needed) > 3 else "") if needed else "needed"
        if after_version is None:
            why = f"was {why}"
        changes.append(LockChange(name=name, old=before_version, new=after_version, why=why, component=False))
    return tuple(changes)


def _shown(component: LockedComponent | None) -> str | None:
    if component is None:
        return None
    return f"{component.version} at {component.commit[:12]}" if component.commit else component.version


def _why(before: LockedComponent | None, after: LockedComponent | None) -> str:
    if before is None or after is None:
        return _come_or_gone(before, after)
    if before.asked != after.asked or before.because != after.because:
        return f"asked for {after.asked} instead of {before.asked}: {after.because}"
    if after.ref_kind == "branch":
        return f"branch {after.asked} moved"
    if after.commit:
        return f"{after.ref_kind} {after.asked} is another commit now"
    return f"{after.asked} allows a release that the as-of moment lets in"


def _come_or_gone(before: LockedComponent | None, after: LockedComponent | None) -> str:
    if after is not None:
        return f"taken from there: {after.because}" if after.transitive else f"new component: {after.because}"
    if before is not None and before.transitive:
        return f"was taken from there: {before.because}"
    return "no component of the stack any more"


def needed_by(lock: LockDirectory) -> dict[str, tuple[str, ...]]:
    """Which packages need a package, from the ``# via`` comments that uv writes."""
    files = (lock.path / phase.file for phase in lock.lock.phases.values())
    requirements = (requirement for file in files for requirement in read_requirements(file.read_text()))
    return {requirement.name: requirement.needed_by for requirement in requirements if requirement.needed_by}


def summary(old: LockDirectory, new: LockDirectory, changes: tuple[LockChange, ...]) -> str:
    """One line: how much changed."""
    if old.lock.digest == new.lock.digest:
        return f"no change: lock {short(old.lock.digest)}"
    added = sum(change.old is None for change in changes)
    removed = sum(change.new is None for change in changes)
    moved = len(changes) - added - removed
    what = f"{moved} changed, {added} added, {removed} removed"
    if not changes:
        what = "the same versions; hashes, phases or the base's definition differ"
    return f"lock {short(old.lock.digest)} -> {short(new.lock.digest)}: {what}"


@dataclass(frozen=True, kw_only=True)
class LockDifference:
    """What resolving anew would change in a lock.

    Attributes:
        new: the record of the lock made anew, which is not kept.
    """

    old: LockDirectory
    new: Lock
    changes: tuple[LockChange, ...]
    summary: str

    def as_json(self) -> dict[str, Json]:
        """The difference as ``--json`` prints it."""
        return {
            "path": str(self.old.path),
            "from": self.old.lock.digest,
            "to": self.new.digest,
            "deviations": list(self.new.deviations),
            "changes": [
                {
                    "name": change.name,
                    "from": change.old,
                    "to": change.new,
                    "why": change.why,
                    "component": change.component,
                }
                for change in self.changes
            ],
        }

    def lines(self) -> list[str]:
        """For people."""
        deviations = [f"  deviation: {text}" for text in self.new.deviations]
        return [self.summary, *deviations, *[change.text() for change in self.changes]]


def diff_lock(
    selection: Selection,
    request: LockRequest,
    path: Path,
    context: Context,
    verifier: LockVerifier | None,
    *,
    upgrade: bool,
) -> LockDifference:
    """Make the lock of a path anew, and compare; nothing is written.

    Args:
        upgrade: with the newest versions also where only a branch moved and the others would stay.
    """
    old, run = read_lock(path), LockRun(run_context(context), verifier)
    inputs = LockInputs.from_request(selection, request)
    # As `lock` does it: where only a branch moved, the other versions stay; with --upgrade all are the newest.
    if not upgrade and moved_branches(old.lock, run.context):
        inputs = moved_inputs(inputs, old, run.context)
    with run.new_lock(inputs, old) as outcome:
        if isinstance(outcome, Failure):
            raise outcome.error
        new = read_lock(outcome.folder)
        changes = compare(old, new)
        return LockDifference(old=old, new=new.lock, changes=changes, summary=summary(old, new, changes))


def own_or_shipped(path: Path, selection: Selection, reporter: Reporter) -> Path:
    """The path of a project's lock; where it is not there, that of the lock of this name that comes with envbuild.

    Raises:
        ConfigurationError: there is neither.
    """
    if (path / RECORD_FILE).is_file():
        return path
    shipped = shipped_lock(path.parent.name, path.name)
    if shipped is None:
        raise no_lock(path, selection)
    reporter.note(f"note: {shown(path)} does not exist: compared with the lock that comes with envbuild")
    return shipped


def locks_to_compare(
    project_dir: Path, catalog: Catalog, base: str | None
) -> list[tuple[Selection, LockRequest, Path]]:
    """Each lock of a project, with what it was made from.

    Args:
        base: locks on this base alone; None: all.

    Raises:
        ConfigurationError: there is no lock.
    """
    locks = []
    for path in committed(project_dir):
        if base in (None, path.name):
            lock = read_lock(path).lock
            selection = select_to_lock(catalog, lock.stack, None, lock.base.name, HostDistribution.here())
            locks.append((selection, request_of(lock), path))
    if not locks:
        raise ConfigurationError(
            "there is no lock to compare with",
            why=f"{project_dir / LOCKFILES} holds none.",
            fix="Make one first: envbuild lock --stack STACK; or name a stack whose lock comes with envbuild.",
        )
    return locks
