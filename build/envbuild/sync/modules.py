"""Which modules of a lock can import in an environment that has a part of it, and the import of those."""

from __future__ import annotations

from dataclasses import replace

from envbuild.core.progress import Reporter
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.record.content import locked_content
from envbuild.sync.imports import Absent, ImportProbe, Imports, NotChecked, modules_of, try_imports
from envbuild.sync.install import InstallScope

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
