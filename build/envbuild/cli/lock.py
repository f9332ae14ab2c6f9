"""``envbuild lock``."""

from __future__ import annotations

import click

from envbuild.cli.common import Session, output_options, selection_options, shown
from envbuild.core.digests import short
from envbuild.lock.locking import LockResult, lock_stack


@click.command("lock")
@selection_options
@click.option(
    "--torch-build",
    metavar="BUILD",
    help="Take this build of torch instead of the base's; 'index' is the package index's own (CUDA, 10x the size).",
)
@click.option("--upgrade", is_flag=True, help="Resolve anew as of now, even if nothing changed.")
@output_options
def command(
    session: Session, stack: str, base: str | None, target: str | None, torch_build: str | None, upgrade: bool
) -> None:
    """Resolve a stack on a base into lockfiles/STACK/BASE/: every package pinned, with hashes.

    Does nothing when the lock is there and neither the stack, the base nor uv changed.
    """
    selection = session.select(stack, target, base)
    result = lock_stack(
        selection,
        project_dir=session.project,
        site=session.site,
        store=session.store,
        reporter=session.reporter,
        torch_build=torch_build,
        upgrade=upgrade,
    )
    _show(session, result)


def _show(session: Session, result: LockResult) -> None:
    lock, path = result.directory.lock, result.directory.path
    count = sum(phase.packages for phase in lock.phases.values())
    found = {"find-links": "found in find-links", "torch-index": "found on the index of torch builds"}
    torch = f"torch {lock.torch.version} ({found.get(lock.torch.found_in, 'the package index has it')})"
    state = "locked" if result.built else f"nothing to do: already locked as of {lock.inputs.as_of}"
    session.done(
        {
            "built": result.built,
            "path": str(path),
            "stack": lock.stack,
            "base": lock.base.name,
            "digest": lock.digest,
            "as_of": lock.inputs.as_of,
            "torch": lock.torch.model_dump(mode="json"),
            "components": {name: item.version for name, item in lock.components.items()},
            "packages": {name: phase.packages for name, phase in lock.phases.items()},
        },
        f"{state}: {lock.stack} on {lock.base.name}, {count} packages, {torch}, lock {short(lock.digest)}",
        shown(path),
    )
