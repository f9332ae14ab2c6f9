"""``envbuild sync``."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import click

from envbuild.cli.command import Command
from envbuild.cli.common import (
    PathArgument,
    Session,
    name_option,
    output_options,
    parse_phases,
    phases_option,
    selection_options,
)
from envbuild.core.digests import Json, sha256_bytes, short
from envbuild.core.text import shown
from envbuild.lock.lockdir import find_lock
from envbuild.sync.install import WHEELS_PHASE, InstallScope
from envbuild.sync.local import sync
from envbuild.wheels.audit.prebuilt import PackageCode
from envbuild.wheels.plan import buildable


@click.command("sync", cls=Command)
@selection_options
@click.option("--into", required=True, type=PathArgument(file_okay=False), help="The environment.")
@name_option
@phases_option("What to install; main comes first.")
@click.option("--no-build", is_flag=True, help="Leave out what would have to be compiled: take wheels only.")
@output_options
def command(
    session: Session,
    stack: str,
    base: str | None,
    target: str | None,
    into: Path,
    name: str | None,
    phases: str,
    no_build: bool,
) -> None:
    """Install a lock into a virtual environment on this machine, phase by phase, and import its modules.

    The environment is made anew. Each phase has its own log and time.
    """
    selection = session.select_locked(stack, target, base, name, needs_target=False)
    lock = find_lock(session.project, selection, name)
    # A folder of its own for each environment: two may be filled at once, also from one lock.
    place = short(sha256_bytes(str(into.resolve()).encode()))
    logs = session.logs("sync") / f"{name or selection.stack_name}-{selection.base_name}-{place}"
    chosen = parse_phases(phases)
    taken = session.built_wheels(lock, selection) if WHEELS_PHASE in chosen else {}
    unbuilt = frozenset(buildable(lock)) - set(taken) if no_build else frozenset()
    scope = InstallScope(
        phases=chosen, wheels={package: str(item.wheel) for package, item in taken.items()}, leave_out=unbuilt
    )
    result = sync(lock, into, scope, selection.target, logs, session.context)
    wheels: dict[str, Json] = {package: item.record.key for package, item in taken.items()}
    session.done(
        {
            "into": str(into.absolute()),
            "lock": lock.lock.digest,
            "phases": [
                {
                    "phase": item.phase,
                    "packages": item.packages,
                    "seconds": round(item.seconds, 1),
                    "log": str(item.log),
                }
                for item in result.phases
            ],
            "wheels": wheels,
            "never_built": [*sorted(unbuilt)],
            "imported": list(result.imported),
            "gpu_code": [item.as_json(selection.target.sm) for item in result.gpu_code],
            "environment": dict(result.environment),
            "not_checked": [dataclasses.asdict(item) for item in result.not_checked],
        },
        *[
            f"phase {item.phase}: {item.packages} packages in {item.seconds:.1f} s, log {item.log}"
            for item in result.phases
        ],
        *[f"from the wheelhouse: {package} {short(item.record.key)}" for package, item in taken.items()],
        *[f"locked, never built: {package}" for package in sorted(unbuilt)],
        *([_gpu_code(result.gpu_code, selection.target.sm)] if result.gpu_code else []),
        f"imported: {', '.join(result.imported) or 'nothing'}",
        *[f"not checked: {item.module} ({item.component}): {item.reason}" for item in result.not_checked],
        *(["set where it is used:"] if result.environment else []),
        *[f"  export {name}={shlex.quote(value)}" for name, value in result.environment.items()],
        shown(into),
    )


def _gpu_code(found: tuple[PackageCode, ...], sm: tuple[str, ...]) -> str:
    known = [f"{item.package} {item.version}" for item in found if not item.unknown]
    return f"GPU code for {', '.join(f'sm_{one}' for one in sm)}: {', '.join(known)}"
