"""Installs a lock with uv: every phase by itself, exactly what is locked, nothing resolved."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.specifiers import SpecifierSet

from envbuild.catalog import knowledge
from envbuild.catalog.stack import Phase
from envbuild.core.errors import BuildError, ConfigurationError, EnvbuildError, MachineError, NetworkError, disk_full
from envbuild.core.exit_status import describe_status, full_disk, ran_out_of_space, tail
from envbuild.core.files import machine_errors, write_atomic
from envbuild.core.process import Finished
from envbuild.core.progress import Reporter
from envbuild.lock.lockfile import PHASE_FILES, WHEELS, LockDirectory, git_build_options
from envbuild.lock.record.content import locked_content, packages_by_index
from envbuild.lock.requirement_lines import pinned_package, without_packages
from envbuild.lock.uv.interpreter import pyenv_python
from envbuild.lock.uv.named_index import never_in_builds
from envbuild.lock.uv.program import NoInterpreterError, failure
from envbuild.lock.uv.torch_builds import TorchSource
from envbuild.sync.install_target import InstallTarget

UV_OPTIONS = ("--color", "never")
# Packages from git are pinned by commit; a hash file cannot hold them.
HASHED_PHASES = ("main", "compile")
# The phase whose packages the wheelhouse may have.
WHEELS_PHASE = "compile"
GIT_PHASE = "git"
# uv's words for a version that no index has; it breaks its lines anywhere.
_GONE = re.compile(r"there\s+(?:is|are)\s+no\s+versions?\s+of|was\s+not\s+found\s+in\s+the\s+package\s+registry")
_COMPILE_FIRST = (
    "\nA package that does not compile here may lack a CUDA toolkit: `envbuild wheels`, with the same --stack, --base, "
    "--target and --name, brings one. `sync` and `image` take its wheels."
)


@dataclass(frozen=True, kw_only=True)
class InstallScope:
    """What of a lock is installed.

    Attributes:
        wheels: wheels that were built before, by package, as seen from the install target; their digests were verified.
            Those packages are not built. May also be folders of sources of packages from git, which are built then.
        leave_out: packages that are not installed.
    """

    phases: Sequence[str] = tuple(PHASE_FILES)
    wheels: Mapping[str, str] = field(default_factory=dict)
    leave_out: Collection[str] = ()


EVERYTHING = InstallScope()


@dataclass(frozen=True, kw_only=True)
class PhaseRun:
    """An installed phase: its packages, wall time and log."""

    phase: str
    packages: int
    seconds: float
    log: Path


def install(
    lock: LockDirectory,
    place: InstallTarget,
    source: TorchSource,
    reporter: Reporter,
    scope: InstallScope = EVERYTHING,
) -> tuple[PhaseRun, ...]:
    """Make the environment of ``place`` and install the lock into it.

    Args:
        source: where torch's build and the indexes of the lock are, as seen from the place.

    Raises:
        BuildError: uv could not install a phase (a hash that differs, a wheel that does not build, ...).
        NetworkError: an index or a file on it cannot be reached.
        MachineError: the disk is full, or there is no Python of the base's version.
    """
    with reporter.step("make the environment"):
        make_venv(place, sees_base=bool(lock.lock.base.provides))
    return install_packages(lock, place, source, reporter, scope)


def make_venv(place: InstallTarget, *, sees_base: bool) -> None:
    """A bare environment: no pip, no setuptools but what the lock has.

    Args:
        sees_base: whether packages that the base brings are seen in it.
    """
    seen = ["--system-site-packages"] if sees_base else []

    def make(python: str) -> None:
        # --no-project: uv would take requires-python from a pyproject.toml in the current directory or above.
        words = ["venv", "--python", python, "--no-project", *seen, place.venv]
        _uv(place, words, "make the environment", "venv")

    try:
        make(place.python)
    except NoInterpreterError:
        # A version is looked for on this machine; a path is that of a base.
        interpreter = None if "/" in place.python else pyenv_python(place.python)
        if interpreter is None:
            raise
        make(str(interpreter))


def install_packages(
    lock: LockDirectory,
    place: InstallTarget,
    source: TorchSource,
    reporter: Reporter,
    scope: InstallScope,
    label: str = "",
) -> tuple[PhaseRun, ...]:
    """Install the lock into the environment of ``place``, which is there; see :func:`install`.

    Args:
        label: what the title of each step adds to the name of its phase.
    """
    done = []
    for phase in PHASE_FILES:
        file = lock.file(phase)
        if file is None or phase not in scope.phases:
            continue
        count = _count(lock, phase, scope.leave_out)
        if label and not count:
            continue
        ready = {name: path for name, path in scope.wheels.items() if _phase_of(lock, name) == phase}
        built = sum(path.endswith(".whl") for path in ready.values())
        if phase == Phase.MAIN.value:
            wheels = {name: f"{place.lock}/{WHEELS}/{wheel.name}" for name, wheel in lock.own_wheels.items()}
            ready |= {name: path for name, path in wheels.items() if name not in scope.leave_out}
        title = f"install phase {phase}{label}: {count} packages"
        with reporter.step(title + (f", {built} from the wheelhouse" if built else "")):
            pip = _PipInstall(lock, place, phase, source)
            if ready:
                _install_ready(pip, ready)
            finished = _install_rest(pip, file, ready, scope.leave_out)
        done.append(
            PhaseRun(phase=phase, packages=count, seconds=finished.seconds, log=_log(place, f"install-{phase}"))
        )
    return tuple(done)


def add_files(lock: LockDirectory, site_packages: Path) -> None:
    """Write what the stack adds to its packages' files.

    Raises:
        MachineError: it cannot be written.
    """
    with machine_errors(site_packages):
        for path, text in lock.lock.files.items():
            file = site_packages / path
            file.parent.mkdir(parents=True, exist_ok=True)
            # Never into a file that is there: it may be a hard link to one of the store.
            write_atomic(file, text)


def install_again(
    lock: LockDirectory, place: InstallTarget, source: TorchSource, package: str, leave_out: Collection[str]
) -> None:
    """Install one package again, over the files of the others that have its files' names.

    Args:
        leave_out: the packages that the environment does not have.
    """
    phase = next(phase for phase in PHASE_FILES if package in locked_content(lock, (phase,)))
    file = lock.file(phase)
    if file is None or phase == GIT_PHASE:
        return
    index, packages = next(
        (index, packages) for index, packages in packages_by_index(lock, phase).items() if package in packages
    )
    others = {*locked_content(lock, (phase,))} - packages
    path = _requirements(file, {*leave_out, *others}, place, index)
    _PipInstall(lock, place, phase, source).run(["--requirements", path], index=index, again=[package])


def _count(lock: LockDirectory, phase: str, leave_out: Collection[str]) -> int:
    """How many packages of a phase are to be installed."""
    count = lock.lock.phases[phase].packages
    return count - sum(name in leave_out for name in locked_content(lock, (phase,))) if leave_out else count


def _phase_of(lock: LockDirectory, package: str) -> str:
    """The phase that installs a package which may be built: that of commits, or that of sdists."""
    component = lock.lock.components.get(package)
    return GIT_PHASE if component and component.commit else WHEELS_PHASE


def _install_rest(pip: _PipInstall, file: Path, ready: Collection[str], leave_out: Collection[str]) -> Finished:
    """Install what is not there yet of a phase."""
    if pip.phase == GIT_PHASE and (ready or leave_out):
        # uv would build them: to it a wheel is another source than the commit.
        lines = [line for line in map(str.strip, file.read_text().splitlines()) if line and not line.startswith("#")]
        wanted = [line for line in lines if pinned_package(line) not in {*leave_out, *ready}]
        return pip.run(wanted) if wanted else Finished(status=0, output="", seconds=0.0)
    seconds = 0.0
    for index, packages in packages_by_index(pip.lock, pip.phase).items():
        others = {*locked_content(pip.lock, (pip.phase,))} - packages
        if others and not packages - {*leave_out}:
            continue
        path = _requirements(file, {*leave_out, *others}, pip.place, index)
        seconds += pip.run(["--requirements", path], index=index).seconds
        if again := [name for name in over_others(pip.lock, pip.phase) if name in packages and name not in leave_out]:
            pip.run(["--requirements", path], index=index, again=again)
    return Finished(status=0, output="", seconds=seconds)


def _requirements(file: Path, leave_out: Collection[str], place: InstallTarget, index: str = "") -> str:
    """A phase's file as seen from the place; a copy of it where packages are left out."""
    if not leave_out:
        return f"{place.lock}/{file.name}"
    path = place.logs / f"installed-{index}{file.name}"
    write_atomic(path, without_packages(file.read_text(), leave_out))
    return f"{place.logs_seen or place.logs}/{path.name}"


def _install_ready(pip: _PipInstall, ready: Mapping[str, str]) -> None:
    """Install built wheels, and trees of packages from git; what the phase's file pins is then there, and stays."""
    wheels = [path for _, path in sorted(ready.items()) if path.endswith(".whl")]
    # By name: uv has to know which of them are built without isolation.
    trees = [f"{name} @ file://{path}" for name, path in sorted(ready.items()) if not path.endswith(".whl")]
    if wheels:
        # --no-index: a wheel that is not there must fail, and not come from elsewhere.
        arguments = ["pip", "install", "--python", pip.place.venv_python, "--no-deps", "--no-index", "--offline"]
        what = f"install the built wheels of stack {pip.lock.lock.stack}"
        _uv(pip.place, [*arguments, *wheels], what, "install-wheels")
    if trees:
        pip.run(trees)


def over_others(lock: LockDirectory, phase: str) -> list[str]:
    """The packages of a phase that must be installed again, over the others."""
    content = locked_content(lock, (phase,))
    return [
        known.package
        for known in knowledge.packages().over_others
        if known.package in content and content[known.package].version in SpecifierSet(known.versions)
    ]


@dataclass(frozen=True)
class _PipInstall:
    """``uv pip install`` of one phase of a lock."""

    lock: LockDirectory
    place: InstallTarget
    phase: str
    source: TorchSource

    def run(self, wanted: Sequence[str], *, index: str = "", again: Sequence[str] = ()) -> Finished:
        """Install requirements; the packages ``again`` also where they are installed."""
        # --no-deps: everything is locked, and the lock may differ from what packages declare (overrides).
        arguments = ["pip", "install", "--python", self.place.venv_python, "--no-deps"]
        arguments += self.source.args_for(index)
        arguments += [word for name in again for word in ("--reinstall-package", name)]
        if self.phase in HASHED_PHASES:
            arguments.append("--require-hashes")
        if self.phase == WHEELS_PHASE:
            # These build against the torch that the main phase installed.
            arguments.append("--no-build-isolation")
        else:
            arguments += self._without_own_indexes()
        if self.phase == GIT_PHASE:
            builds = f"{self.place.lock}/{self.lock.builds.name}" if self.lock.builds else ""
            arguments += git_build_options(builds, self.lock.shared_builds)
        arguments += wanted
        name = f"install-{self.phase}{'-again' if again else ''}"
        what = f"install phase {self.phase} of stack {self.lock.lock.stack}"
        # Versions and hashes are fixed, so what uv's cache has is as good as what an index would say; asking it costs
        # seconds, and a network. uv notices what is missing before it installs anything.
        offline = [self.place.uv, *UV_OPTIONS, *arguments, "--offline"]
        cached = self.place.run(offline, what=what, log=_log(self.place, name))
        more = _COMPILE_FIRST if self.phase == WHEELS_PHASE else ""
        return cached if cached.status == 0 else _uv(self.place, arguments, what, name, more=more)

    def _without_own_indexes(self) -> list[str]:
        """What keeps isolated builds from packages that have an index of their own."""
        lines = never_in_builds([name for names in self.lock.lock.indexes.values() for name in names])
        if not lines:
            return []
        path = self.place.logs / f"builds-{self.phase}.txt"
        write_atomic(path, "".join(f"{line}\n" for line in lines))
        return ["--build-constraints", f"{self.place.logs_seen or self.place.logs}/{path.name}"]


def _log(place: InstallTarget, name: str) -> Path:
    return place.logs / f"{name}.log"


def _uv(place: InstallTarget, arguments: Sequence[str], what: str, name: str, *, more: str = "") -> Finished:
    log = _log(place, name)
    finished = place.run([place.uv, *UV_OPTIONS, *arguments], what=what, log=log)
    if finished.status != 0:
        raise _failure(place, finished, what, log, more)
    return finished


def _failure(place: InstallTarget, finished: Finished, what: str, log: Path, more: str) -> EnvbuildError:
    if ran_out_of_space(finished.output, place.disk):
        return disk_full(full_disk(finished.output, place.disk))
    # What uv calls unsolvable is here a hash or a wheel that does not fit: nothing is resolved.
    error = failure(finished, what, log)
    if isinstance(error, ConfigurationError | NetworkError | MachineError):
        return error
    # Nothing is resolved: a version that is not there was there when it was locked.
    gone = (
        "The index does not have that version any more: `envbuild lock --check --online` lists what it dropped. Lock "
        "again with --upgrade, or keep the files: a folder of find-links, or an index that drops nothing."
    )
    changed = (
        "The lines above are uv's own. A hash that differs means that the index serves another file than the one that "
        "was locked: lock again with --upgrade, or find out who changed it."
    )
    return BuildError(
        f"cannot {what}: uv {describe_status(finished.status)}",
        why=tail(finished.output),
        fix=f"{gone if _GONE.search(finished.output) else changed}{more}",
        log=log,
    )
