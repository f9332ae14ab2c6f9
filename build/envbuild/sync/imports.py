"""The import check: every module that a stack names must import, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.catalog.models import Target
from envbuild.core.background import interruptible
from envbuild.core.errors import CheckRefusedError
from envbuild.core.exit_status import describe_status, tail
from envbuild.core.process import Finished
from envbuild.core.progress import Reporter
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.models import Lock
from envbuild.lock.record.content import locked_content
from envbuild.sync import install_target
from envbuild.sync.install import InstallScope
from envbuild.sync.install_target import InconclusiveError, RunCommand
from envbuild.wheels.architectures import dotted

PROBE = "containers/native/import_module.py"
# What the probe's last line begins with; modules print too.
MARK = "envbuild-import: "
# What a stub of the driver cures: its library is loaded, or Triton asks for it (3.2 where a kernel is defined).
_DRIVER = ("libcuda.so", "active drivers")
_DRIVER_SYMBOL = re.compile(r"undefined symbol: cu[A-Z]")

FIX = (
    "The lock resolves and installs, but does not work: a package that is needed and not declared, or two "
    "that do not belong together. Name it under [requirements] of the stack with the reason, and lock again."
)

PROJECT_FIX = (
    "Add what is missing to the project's pyproject.toml, run `uv lock`, and lock again; or name the modules that must "
    "import under [project] of the stack (imports)."
)


@dataclass(frozen=True, kw_only=True)
class NotChecked:
    """A module of which nothing is known, and why."""

    module: str
    component: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class NotImported:
    """A module that does not import: how its process ended, with the end of what it printed.

    Attributes:
        output: all that it printed.
        raised: whether Python raised an error; otherwise the process ended itself, or crashed.
    """

    module: str
    component: str
    failure: str
    log: Path
    output: str = ""
    raised: bool = False

    @property
    def cause(self) -> str:
        """The last line, which names the error that was raised; else how the process ended."""
        lines = self.failure.rstrip().splitlines()
        return lines[-1].strip() if self.raised else lines[0].rstrip(":")


@dataclass(frozen=True, kw_only=True)
class Imports:
    """What the import check found."""

    imported: tuple[str, ...]
    not_checked: tuple[NotChecked, ...]
    failed: tuple[NotImported, ...] = ()

    def refuse_failed(self, fix: str = FIX) -> Imports:
        """The same, where nothing failed.

        Raises:
            CheckRefusedError: a module does not import; holds each traceback's end.
        """
        if not self.failed:
            return self
        count = len(self.imported) + len(self.not_checked) + len(self.failed)
        raise CheckRefusedError(
            f"{len(self.failed)} of {count} modules of the stack do not import",
            why="\n".join(f"{failure.module} ({failure.component}) {failure.failure}" for failure in self.failed),
            fix=fix,
            log=self.failed[0].log,
        )


@dataclass(frozen=True, kw_only=True)
class Absent:
    """What was left out of an environment: the phases, with the packages and modules they would bring."""

    phases: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()

    def brings(self, module: str) -> bool:
        """Whether the module that was not found belongs to what was left out."""
        if canonicalize_name(module.split(".", maxsplit=1)[0]) in self.packages:
            return True
        return any(
            f"{known}.".startswith(f"{module}.") or f"{module}.".startswith(f"{known}.") for known in self.modules
        )


NOTHING_ABSENT = Absent()


def fix_of(lock: Lock) -> str:
    """What to do about modules of a lock that do not import."""
    return FIX if lock.project is None else PROJECT_FIX


def modules_of(lock: Lock) -> dict[str, tuple[str, ...]]:
    """The modules that must import, by component."""
    return {name: component.modules for name, component in lock.components.items() if component.modules}


def check_environment(target: Target) -> dict[str, str]:
    """What a module may ask of a machine with the target's GPUs when it is imported on one without.

    megatron-core 0.15 compiles a helper when it is imported. Without a GPU torch does not know for which one, and fails
    with an IndexError unless this variable names one.
    """
    return {"TORCH_CUDA_ARCH_LIST": ";".join(map(dotted, target.sm))} if target.sm else {}


@dataclass(frozen=True, kw_only=True)
class ImportProbe:
    """What imports a module in a process of its own.

    Attributes:
        python: the environment's interpreter.
        program: :data:`PROBE`, as it is seen from where ``run`` runs things.
        logs: the folder for the log of each module.
        run_with_stub: runs things with a stub of the driver's library, which modules may load.
    """

    python: str
    program: str
    run: RunCommand
    logs: Path
    run_with_stub: RunCommand | None = None


def try_imports(
    modules: Mapping[str, Sequence[str]],
    probe: ImportProbe,
    reporter: Reporter,
    *,
    absent: Absent = NOTHING_ABSENT,
) -> Imports:
    """Import every module, as many at once as there are processors.

    A process each: an import that only works after another one is not hidden. Python imports what a module is below
    before it: such a module needs a process of its own only where nothing below it imports. One that did not come to
    its end is imported once more, with nothing else and for longer.

    Args:
        absent: what the environment was made without; a module that asks for it is not checked.

    Raises:
        InconclusiveError: an import did not come to its end the second time either.
    """

    def one(pair: tuple[str, str], limit_seconds: float) -> NotChecked | NotImported | None:
        answers = attempt(pair, probe.run, limit_seconds)
        loads = isinstance(answers, NotChecked) and any(words in answers.reason for words in _DRIVER)
        if not loads or probe.run_with_stub is None:
            return answers
        again = attempt(pair, probe.run_with_stub, limit_seconds, label="-with-stub")
        # A stub does not have all that the driver has.
        asks_more = isinstance(again, NotImported) and _DRIVER_SYMBOL.search(again.output)
        return answers if asks_more else again

    def attempt(
        pair: tuple[str, str], run: RunCommand, limit_seconds: float, label: str = ""
    ) -> NotChecked | NotImported | None:
        component, module = pair
        log = probe.logs / f"import-{module}{label}.log"
        # -I: neither the current directory nor PYTHON* variables nor a user's packages may help.
        # Shortly before its time is over a process writes down where it is.
        argv = [probe.python, "-I", probe.program, module, MARK, f"{0.9 * limit_seconds:g}"]
        what = f"import {module} of {component}"
        finished = install_target.run_once(run, argv, what=what, log=log, limit_seconds=limit_seconds)
        return _judge(component, module, finished, absent, log)

    def first(pair: tuple[str, str]) -> NotChecked | NotImported | InconclusiveError | None:
        try:
            return one(pair, install_target.LIMIT_SECONDS)
        except InconclusiveError as error:
            return error

    def outcomes(items: Sequence[tuple[str, str]]) -> dict[tuple[str, str], NotChecked | NotImported | None]:
        tried = dict(zip(items, pool.map(first, items), strict=True))
        longer = install_target.LONGER * install_target.LIMIT_SECONDS
        # Only now: the others have ended.
        return {
            pair: one(pair, longer) if isinstance(outcome, InconclusiveError) else outcome
            for pair, outcome in tried.items()
        }

    work = [(component, module) for component, names in modules.items() for module in names]
    lowest = [pair for pair in work if not any(_is_below(module, pair[1]) for _, module in work)]
    with reporter.step(f"import {len(work)} modules"), interruptible(os.cpu_count() or 1) as pool:
        answers = outcomes(lowest)
        shown = [module for (_, module), finding in answers.items() if finding is None]
        left = [pair for pair in work if pair not in answers]
        tried = [pair for pair in left if not any(_is_below(module, pair[1]) for module in shown)]
        answers |= {**dict.fromkeys(left), **outcomes(tried)}
    findings = [answers[pair] for pair in work]
    return Imports(
        imported=tuple(module for pair, (_, module) in zip(findings, work, strict=True) if pair is None),
        not_checked=tuple(pair for pair in findings if isinstance(pair, NotChecked)),
        failed=tuple(pair for pair in findings if isinstance(pair, NotImported)),
    )


def _is_below(module: str, package: str) -> bool:
    return module.startswith(f"{package}.")


def _judge(
    component: str, module: str, finished: Finished, absent: Absent, log: Path
) -> NotChecked | NotImported | None:
    """What an import shows; None where the module imported."""
    report = last_report(finished.output, MARK)
    reason = ""
    missing = str(report.get("missing", ""))
    if missing and absent.brings(missing):
        phases = f", of phase {' or '.join(absent.phases)}" if absent.phases else ""
        reason = f"it needs {missing}{phases}, which is not installed"
    elif report.get("needs_code"):
        reason = f"it needs compiled code that is not built: {report['needs_code']}"
    elif report.get("needs_gpu"):
        reason = f"it needs a GPU, and there is none here: {report['needs_gpu']}"
    elif report.get("placeholder"):
        reason = f"a placeholder: {report['placeholder']}"
    if reason:
        return NotChecked(component=component, module=module, reason=reason)
    if finished.status == 0 and report.get("imported"):
        return None
    output = "\n".join(line for line in finished.output.splitlines() if not line.startswith(MARK))
    failure = f"{_ending(finished, report)}:\n{tail(output, lines=6)}"
    # Python ends with 1 after an exception.
    return NotImported(
        component=component, module=module, failure=failure, log=log, output=output, raised=finished.status == 1
    )


def _ending(finished: Finished, report: Mapping[str, Any]) -> str:
    if finished.status == 0 and not report:
        return "ended the process while it was imported"
    return describe_status(finished.status)


def last_report(output: str, mark: str) -> dict[str, Any]:
    """The object that a program of ours printed last, after a mark; empty when its process ended before."""
    # The last one: a module may print such a line itself.
    for line in reversed(output.splitlines()):
        if line.startswith(mark):
            value: dict[str, Any] = json.loads(line.removeprefix(mark))
            return value
    return {}


NEVER_BUILT = "locked, never built"


def import_modules(lock: LockDirectory, scope: InstallScope, probe: ImportProbe, reporter: Reporter) -> Imports:
    """Import the modules of the scope's phases; those of the others, and of what was left out, are not checked."""
    phases, leave_out = scope.phases, scope.leave_out
    # A commit is installed in phase git, whatever the phase of its component.
    phase_of = {
        name: "git" if component.commit else component.phase.value for name, component in lock.lock.components.items()
    }
    modules = modules_of(lock.lock)
    left_out = {name: names for name, names in modules.items() if phase_of[name] not in phases or name in leave_out}
    absent_phases = tuple(phase for phase in PHASE_FILES if phase not in phases and lock.file(phase))
    absent = Absent(
        phases=absent_phases,
        packages=frozenset([*locked_content(lock, absent_phases), *leave_out]),
        modules=frozenset(module for names in left_out.values() for module in names),
    )
    present = {name: names for name, names in modules.items() if name not in left_out}
    imports = try_imports(present, probe, reporter, absent=absent)
    skipped = tuple(
        NotChecked(
            module=module,
            component=name,
            reason=NEVER_BUILT if name in leave_out else f"phase {phase_of[name]} is not installed",
        )
        for name, names in left_out.items()
        for module in names
    )
    return replace(imports, not_checked=imports.not_checked + skipped)
