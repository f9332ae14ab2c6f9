"""``envbuild sync``."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

from envbuild.cli.common import FOLDER, LockedOptions, Session, as_command, phases
from envbuild.cli.options import flag, include, option
from envbuild.core.digests import Json, sha256_bytes, short
from envbuild.core.text import shown
from envbuild.sync.install import WHEELS_PHASE, InstallScope
from envbuild.sync.local import sync
from envbuild.wheels.audit.prebuilt import PackageCode
from envbuild.wheels.plan import buildable


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    locked: LockedOptions = include(LockedOptions)
    into: Path = option("--into", "The environment's folder.", required=True, type=FOLDER)
    phases: tuple[str, ...] = phases("The phases to install; main is required.")
    no_build: bool = flag("--no-build", "Leave out packages that must be compiled and have no wheel yet.")


@as_command("sync", SyncOptions)
def command(session: Session, options: SyncOptions) -> None:
    """Install a lock into a virtual environment on this machine, phase by phase, and import its modules.

    An existing environment is replaced.
    """
    into, name = options.into, options.locked.name
    selection, lock = session.locked(options.locked, needs_target=False)
    # A folder of its own for each environment: two may be filled at once, also from one lock.
    place = short(sha256_bytes(str(into.resolve()).encode()))
    logs = session.logs("sync") / f"{name or selection.stack_name}-{selection.base_name}-{place}"
    built = session.built_wheels(lock, selection) if WHEELS_PHASE in options.phases else {}
    unbuilt = frozenset(buildable(lock)) - set(built) if options.no_build else frozenset()
    scope = InstallScope(
        phases=options.phases,
        wheels={package: str(wheel.wheel) for package, wheel in built.items()},
        leave_out=unbuilt,
    )
    result = sync(lock, into, scope, selection.target, logs, session.context)
    wheels: dict[str, Json] = {package: wheel.record.key for package, wheel in built.items()}
    session.done(
        {
            "into": str(into.absolute()),
            "lock": lock.lock.digest,
            "phases": [
                {
                    "phase": run.phase,
                    "packages": run.packages,
                    "seconds": round(run.seconds, 1),
                    "log": str(run.log),
                }
                for run in result.phases
            ],
            "wheels": wheels,
            "never_built": [*sorted(unbuilt)],
            "imported": list(result.imported),
            "gpu_code": [code.as_json(selection.target.sm) for code in result.gpu_code],
            "environment": dict(result.environment),
            "not_checked": [dataclasses.asdict(module) for module in result.not_checked],
        },
        *[f"phase {run.phase}: {run.packages} packages in {run.seconds:.1f} s, log {run.log}" for run in result.phases],
        *[f"from the wheelhouse: {package} {short(wheel.record.key)}" for package, wheel in built.items()],
        *[f"locked, never built: {package}" for package in sorted(unbuilt)],
        *([_gpu_code(result.gpu_code, selection.target.sm)] if result.gpu_code else []),
        f"imported: {', '.join(result.imported) or 'nothing'}",
        *[f"not checked: {module.module} ({module.component}): {module.reason}" for module in result.not_checked],
        *(["set where it is used:"] if result.environment else []),
        *[f"  export {name}={shlex.quote(value)}" for name, value in result.environment.items()],
        shown(into),
    )


def _gpu_code(codes: tuple[PackageCode, ...], sm: tuple[str, ...]) -> str:
    known = [f"{code.package} {code.version}" for code in codes if not code.unknown]
    return f"GPU code for {', '.join(f'sm_{name}' for name in sm)}: {', '.join(known)}"
