"""Trials of a lock: import its modules, or train one certification case."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import envbuild
from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.certify.cases.selection import WantedCases
from envbuild.certify.certify import REASONS_OF_IMAGE, CertifyOptions, certify
from envbuild.certify.run.executors import MachineOptions
from envbuild.certify.run.job import CertifyRequest
from envbuild.core.digests import Json, digest_of_code
from envbuild.core.errors import BuildError, CertificationCannotRunError, CertificationFailedError
from envbuild.launch.launchers import Placement
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.verification import Verify
from envbuild.sync.failure_packages import cause_of_installation
from envbuild.sync.install import InstallScope
from envbuild.sync.install_target import InconclusiveError
from envbuild.sync.local import fill_environment
from envbuild.sync.verify import INSTALL_CODE
from envbuild.wheels.cache.wheelhouse import Built
from envbuild.wheels.plan import buildable

# Numbers of lines, addresses and versions differ between two failures of one cause; so do the paths of environments.
_PATH = re.compile(r"(?:/[^\s/:'\"()]+)+/?")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The result of a trial.

    Attributes:
        passed: None where it could not be tried: a package does not build.
        signs: what a failure is known by; two are of one kind if they share one.
        what: the failure, in a line.
        suspects: the packages that it names.
        lasting: it would be the same another time.
    """

    passed: bool | None
    signs: frozenset[str] = frozenset()
    what: str = ""
    suspects: tuple[str, ...] = ()
    lasting: bool = True

    @property
    def text(self) -> str:
        """For people."""
        return {True: "passes", False: f"fails: {self.what}", None: f"cannot be tried: {self.what}"}[self.passed]


class LockTrial(Protocol):
    """Tries a lock."""

    @property
    def text(self) -> str:
        """Its name, for people."""

    def key(self) -> Json:
        """Everything that a result depends on, except the lock."""

    def __call__(self, lock: LockDirectory) -> Tried:
        """Try a lock. A deficiency of this machine is raised, and is no result."""


@dataclass(frozen=True, kw_only=True)
class ImportTrial:
    """Installs a lock and imports its modules."""

    selection: Selection
    verify: Verify

    @property
    def text(self) -> str:
        return "import"

    def key(self) -> Json:
        return ["import", *_common_key(self.selection)]

    def __call__(self, lock: LockDirectory) -> Tried:
        try:
            verified = self.verify(self.selection, lock)
        except InconclusiveError as error:
            return Tried(passed=None, what=error.what, lasting=False)
        findings = verified.findings
        if not findings:
            return Tried(passed=True)
        suspects = tuple(dict.fromkeys(name for finding in findings for name in finding.packages))
        what = findings[0].what.splitlines()[0]
        if any(finding.code == INSTALL_CODE for finding in findings):
            # Not kept: an index that is down, or a full disk, says the same as a package that does not fit.
            return Tried(passed=None, what=what, suspects=suspects, lasting=False)
        # The cause alone: one is seen in several modules.
        signs = frozenset(_sign(finding.what.partition(": ")[2]) for finding in findings)
        return Tried(passed=False, signs=signs, what=what, suspects=suspects)


@dataclass(frozen=True, kw_only=True)
class CaseTrial:
    """Trains one certification case and its baseline in an environment of this machine.

    Attributes:
        wheels_for: the wheels of the wheelhouse that fit a lock.
    """

    selection: Selection
    case: str
    matrix: str
    wheels_for: Callable[[LockDirectory, Selection], Mapping[str, Built]]
    context: Context

    @property
    def text(self) -> str:
        return f"case {self.case} of matrix {self.matrix}"

    def key(self) -> Json:
        return ["case", self.case, self.matrix, *_common_key(self.selection)]

    def __call__(self, lock: LockDirectory) -> Tried:
        wheels = self.wheels_for(lock, self.selection)
        # A trial compiles nothing: flash-attn 2.8.3 alone takes three hours of a processor.
        if missing := sorted(set(buildable(lock)) - set(wheels)):
            return Tried(passed=None, what=f"no wheel is built of {', '.join(missing)}", lasting=False)
        scope = InstallScope(wheels={name: str(built.wheel) for name, built in wheels.items()})
        with self.context.store.staging("bisect") as folder:
            venv = folder / "venv"
            try:
                fill_environment(lock, venv, scope, folder / "logs", self.context)
            except BuildError as error:
                output = error.log.read_text(errors="replace") if error.log else error.why
                return Tried(passed=None, what=cause_of_installation(output), lasting=False)
            request = CertifyRequest(
                selection=self.selection,
                lock=lock,
                matrix_name=self.matrix,
                out_dir=folder / "out",
                wanted=WantedCases(only=(self.case,)),
                place=Placement.parse("venv"),
            )
            try:
                certify(request, self.context, CertifyOptions(machine=MachineOptions(venv=venv)))
            except CertificationFailedError as error:
                return _failed_case(error)
            except CertificationCannotRunError as error:
                # What the machine lacks is no result of the lock.
                if error.reason not in REASONS_OF_IMAGE:
                    raise
                cause = (error.why or error.what).rstrip().splitlines()[-1]
                return Tried(passed=False, signs=frozenset({f"{error.reason} {_sign(cause)}"}), what=cause)
        return Tried(passed=True)


def _failed_case(error: CertificationFailedError) -> Tried:
    """By the checks that failed: numbers differ from lock to lock."""
    problems = error.run.all_problems if error.run else []
    signs = frozenset(str(problem["check"]) for problem in problems) or frozenset({_sign(error.what)})
    return Tried(passed=False, signs=signs, what=f"{error.what}: {error.why}".splitlines()[0])


def _common_key(selection: Selection) -> list[Json]:
    # All code of envbuild: how a failure is seen, later code may do otherwise.
    return [
        selection.base_name,
        selection.target_name,
        list(selection.target.sm),
        digest_of_code(Path(envbuild.__file__).parent),
    ]


def _sign(text: str) -> str:
    return _NUMBER.sub("", _PATH.sub("", text)).strip()
