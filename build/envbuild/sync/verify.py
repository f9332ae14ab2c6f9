"""Verification: a lock in a throw-away environment, and its modules imported there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.core.background import Background, run_in_background
from envbuild.core.digests import digest_of, sha256_file, short
from envbuild.core.errors import BuildError, EnvbuildError, MachineError
from envbuild.core.files import remove_tree, write_atomic
from envbuild.core.progress import SilentReporter
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.verification import VerifiedLock
from envbuild.sync import extension_stubs, failure_packages
from envbuild.sync.extension_stubs import write_stubs
from envbuild.sync.failure_packages import InstalledPackages
from envbuild.sync.imports import FIX, PROBE, NotImported, import_modules
from envbuild.sync.places import Place, Trial
from envbuild.wheels.build.unpack import unpack
from envbuild.wheels.cache.wheelhouse import NO_BUILT, Built
from envbuild.wheels.plan import buildable
from envbuild.wheels.sources import WheelSources

KIND = "verifications"
RESULT_FILE = "verified.json"
IMPORT_CODE = "import"
INSTALL_CODE = "install"
PHASES = ("main", "git")
INSTALL_FIX = (
    "The lock resolves, and a package of it does not install: its build fails, or it has no file for this base. Take "
    "another version of it (--pin, or the stack's file), or leave it out under [requirements] of the stack."
)
# How long a place that is being made may take to end when it is not needed any more.
STOP_SECONDS = 30.0
_VERIFIED = TypeAdapter(VerifiedLock)


@dataclass(frozen=True)
class _Look:
    """Whether a place can be had.

    Attributes:
        problem: why not; empty: it can.
        was_tried: it was to be made.
    """

    problem: str = ""
    was_tried: bool = False


@dataclass
class Verifier:
    """Installs the phases main and git of a lock in a place, and imports its modules. Results are kept in the store.

    Attributes:
        places_for: the places where a lock of a selection can be verified, the best first.
        without: the command that locks without a verification.
        wheels_for: the wheels of the wheelhouse that fit a lock.
    """

    context: Context
    places_for: Callable[[Selection, Context], Sequence[Place]]
    without: str
    wheels_for: Callable[[LockDirectory, Selection], Mapping[str, Built]] = lambda _lock, _selection: NO_BUILT
    # What is known of places, by their words: a place is tried once.
    _known: dict[str, _Look] = field(default_factory=dict, init=False)
    _preparing: Background[dict[str, _Look]] | None = field(default=None, init=False)

    def require_place(self, selection: Selection) -> None:
        """Refuse to begin where no lock of the selection can be verified.

        Raises:
            MachineError: there is no place for it; says why of each.
        """
        places = self.places_for(selection, self.context)
        known: dict[str, _Look] = {}
        for place in places:
            known[place.where] = _Look(place.problem())
            if not known[place.where].problem:
                return
        raise _no_place(places, known, self.without)

    @contextlib.contextmanager
    def preparing(self, selection: Selection) -> Iterator[Callable[[], None]]:
        """Make the place where locks of a selection are verified, while the block makes one.

        It gives what raises the same as soon as it is known that no place can be made.

        Raises:
            MachineError: there is no place for it; says why of each.
        """
        self.require_place(selection)
        quiet = replace(self.context, reporter=SilentReporter())
        places = self.places_for(selection, quiet)
        known = self._known
        work = self._preparing = run_in_background(lambda: _looked_over(places, known))

        def refuse_without_place() -> None:
            if work.done():
                self._place(places)

        try:
            yield refuse_without_place
        finally:
            self._preparing = None
            work.stop()
            # What it has begun is removed by itself.
            wait([work], timeout=STOP_SECONDS)

    def __call__(self, selection: Selection, lock: LockDirectory) -> VerifiedLock:
        """What became of it: a finding for each module that does not import, and for what does not install.

        Raises:
            MachineError: there is no place for it.
            NetworkError: an index cannot be reached.
        """
        return self._verified(selection, self._trial(selection, lock))

    def _trial(self, selection: Selection, lock: LockDirectory) -> Trial:
        """What is installed. Phase compile not where nothing can be had of what is built for it.

        On half of Transformer Engine modules fail that do without it.
        """
        unbuilt = buildable(lock)
        wheels = self.wheels_for(lock, selection) if unbuilt else NO_BUILT
        missing = frozenset(name for name in unbuilt if name not in wheels)
        recipes = {name: selection.catalog.wheel_recipe(name) for name in sorted(missing)}
        stubs = {name: recipe.extension_module for name, recipe in recipes.items() if recipe.extension_module}
        if stubs or not missing:
            return Trial(
                lock=lock,
                target=selection.target,
                base=selection.base,
                phases=tuple(PHASE_FILES),
                wheels=wheels,
                leave_out=missing - stubs.keys(),
                stubs=stubs,
                folders={name: recipes[name].python_folders for name in stubs if recipes[name].python_folders},
            )
        # A build without isolation takes a compiler, as those of phase compile do.
        shared = frozenset(lock.shared_builds)
        return Trial(lock=lock, target=selection.target, base=selection.base, phases=PHASES, leave_out=shared)

    def _verified(self, selection: Selection, trial: Trial) -> VerifiedLock:
        places = self.places_for(selection, self.context)
        # Before any place is made: a result of another place is worth as much.
        for place in places:
            for key in (_key(place, trial), _key_of_failure(place, trial)):
                if entry := self.context.store.find(KIND, key):
                    return _VERIFIED.validate_json((entry / RESULT_FILE).read_bytes())
        return self._tried(self._place(places), trial)

    def _place(self, places: Sequence[Place]) -> Place:
        """The best place that can be had; it is made where it is not there.

        Raises:
            MachineError: there is none; says why of each.
        """
        work, self._preparing = self._preparing, None
        if work is not None:
            # Which one is being made by now, the first that can be had, is not known before its end.
            with self.context.reporter.step("wait for the place of the verification"):
                self._known |= work.result()
        known, reporter = self._known, self.context.reporter
        self._known = known | _looked_over(places, known)
        for place in places:
            remembered = self._known[place.where]
            if not remembered.problem:
                return place
            if remembered.was_tried and (work is not None or place.where not in known):
                reporter.note(f"{place.where} cannot be had for the verification: {_first_line(remembered.problem)}")
        raise _no_place(places, self._known, self.without)

    def _tried(self, place: Place, trial: Trial) -> VerifiedLock:
        """The result of a place; kept in the store if it would be the same another time."""
        store, key = self.context.store, _key(place, trial)
        logs = store.root / "logs" / f"verify-{short(key)}"
        # Logs are appended to, and where a module hangs is read from its log.
        remove_tree(logs)
        verified, lasting = self._try(place, trial, logs)
        if lasting:
            content = _VERIFIED.dump_json(verified)
            key = _key_of_failure(place, trial) if verified.findings else key
            store.get_or_build(KIND, key, lambda folder: write_atomic(folder / RESULT_FILE, content))
        # Findings name the logs.
        if not verified.findings:
            remove_tree(logs)
        return verified

    def _try(self, place: Place, trial: Trial, logs: Path) -> tuple[VerifiedLock, bool]:
        """The result, and whether it would be the same another time: a build may have failed for this machine."""
        try:
            with place.fill(trial, logs) as filled, self._code(trial) as code:
                write_stubs(trial.stubs, trial.lock.packages(), filled.site_packages, code)
                imports = import_modules(trial.lock, trial.import_scope, filled.probe, self.context.reporter)
                installed = InstalledPackages(filled.site_packages)
                verified = VerifiedLock(
                    where=filled.where,
                    imported=imports.imported,
                    not_checked=tuple(
                        f"{outcome.module} ({outcome.component}): {outcome.reason}" for outcome in imports.not_checked
                    ),
                    findings=tuple(_not_imported(outcome, installed, filled.venv) for outcome in imports.failed),
                    stubbed=tuple(trial.stubs),
                    base_image=filled.base_image,
                    base_made_at=filled.base_made_at,
                )
        except BuildError as error:
            return VerifiedLock(where=place.where, imported=(), findings=(_not_installed(error, trial.lock),)), False
        return verified, all(outcome.raised for outcome in imports.failed)

    @contextlib.contextmanager
    def _code(self, trial: Trial) -> Iterator[Mapping[str, Sequence[Path]]]:
        """The folders with the Python code of packages that are not built, unpacked for as long as the block runs."""
        context, origins = self.context, buildable(trial.lock)
        with context.store.staging("sources") as staged:
            files: dict[str, list[Path]] = {}
            for name, folders in trial.folders.items():
                origin = origins[name]
                sources = WheelSources(
                    base=trial.base, site=context.site, store=context.store, reporter=context.reporter
                )
                top = unpack(name, sources.archive(origin), staged / name, origin.subdirectory)
                places = [top / origin.subdirectory / folder for folder in folders]
                files[name] = [place for place in places if place.is_dir()]
            yield files


def _key(place: Place, trial: Trial) -> str:
    """What a result depends on: lock, place, the GPUs that modules are told of, wheels, stubs, and the programs."""
    return digest_of(
        {
            "lock": trial.lock.lock.digest,
            "where": place.key,
            "sm": list(trial.target.sm),
            "phases": list(trial.phases),
            "wheels": {name: built.record.digest for name, built in trial.wheels.items()},
            "leave_out": [*sorted(trial.leave_out)],
            "stubs": dict(trial.stubs),
            # Left out where there are none, so that results from before this key was there are still found.
            **({"folders": {name: [*built] for name, built in trial.folders.items()}} if trial.folders else {}),
            "programs": [sha256_file(data_root() / name) for name in (PROBE, extension_stubs.PROGRAM)],
        }
    )


def _key_of_failure(place: Place, trial: Trial) -> str:
    """The key of a result with findings: what these are about, later code may see otherwise."""
    code = sha256_file(Path(str(failure_packages.__file__)))
    return digest_of({"trial": _key(place, trial), "code": code})


def _looked_over(places: Sequence[Place], known: Mapping[str, _Look]) -> dict[str, _Look]:
    """What is known of the places up to the first that can be had, which is made where it is not there."""
    looks: dict[str, _Look] = {}
    for place in places:
        look = looks[place.where] = known[place.where] if place.where in known else _look(place)
        if not look.problem:
            break
    return looks


def _look(place: Place) -> _Look:
    if problem := place.problem():
        return _Look(problem)
    try:
        place.prepare()
    except EnvbuildError as error:
        return _Look("\n".join(filter(None, [f"{error.what}: {error.why}", error.fix])), was_tried=True)
    return _Look()


def _first_line(problem: str) -> str:
    """What is wrong with a place, in one line: apt's first error, and not the warnings above it."""
    first, *more = problem.splitlines()
    what, before, _ = first.partition(": W: ")
    error = next((line for line in more if line.startswith("E: ")), "") if before else ""
    return f"{what}: {error}" if error else first


def _no_place(places: Sequence[Place], known: Mapping[str, _Look], without: str) -> MachineError:
    return MachineError(
        "the lock cannot be verified on this machine",
        why="\n".join(f"{place.where}: {known[place.where].problem}" for place in places),
        fix="Correct one of these (a base is made with mmdebstrap and bubblewrap, as `envbuild image` does; "
        "ENVBUILD_APT_MIRROR names a mirror that has its distribution), or lock without a verification, which the "
        f"record states:\n{without}",
    )


def _not_imported(failure: NotImported, installed: InstalledPackages, venv: str) -> CheckFinding:
    about = failure_packages.of_import(failure.output, installed)
    return CheckFinding(
        code=IMPORT_CODE,
        # Findings that are let pass go into the record, which names no place.
        what=f"{failure.module} of {failure.component} does not import: {failure.cause.replace(venv, '{venv}')}",
        fix=f"{FIX}\n  log: {failure.log}",
        packages=about.packages,
        missing_module=about.missing_module,
        subject=f"{failure.component} {failure.module}",
    )


def _not_installed(error: BuildError, lock: LockDirectory) -> CheckFinding:
    output = error.log.read_text(errors="replace") if error.log else error.why
    packages = failure_packages.of_installation(output, lock.packages())
    return CheckFinding(
        code=INSTALL_CODE,
        what=f"{', '.join(packages) or 'a package'} does not install: {failure_packages.cause_of_installation(output)}",
        fix=f"{INSTALL_FIX}\n  log: {error.log}",
        packages=packages,
    )
