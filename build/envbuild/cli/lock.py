"""``envbuild lock``."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.common import Session, output_options, selection_options, shown
from envbuild.core.digests import short
from envbuild.core.errors import UsageError
from envbuild.lock.locking import LockResult, lock_path, lock_stack, variant_name
from envbuild.lock.planning import Request


def parse_pins(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:  # noqa: ARG001
    """``COMPONENT=REF`` words as a dictionary."""
    pins: dict[str, str] = {}
    for value in values:
        name, found, ref = value.partition("=")
        if not found or not name or not ref:
            raise click.BadParameter(f"{value!r}: write COMPONENT=REF, such as megatron-core=core_v0.16.1")
        if name in pins:
            raise click.BadParameter(f"{name} is pinned twice")
        pins[name] = ref
    return pins


@click.command("lock")
@selection_options
@click.option("--nemo", metavar="REF", help="The same as --pin nemo-toolkit=REF.")
@click.option(
    "--pin",
    "pins",
    multiple=True,
    callback=parse_pins,
    metavar="COMPONENT=REF",
    help="Take this branch, tag, commit, version or specifier; may be repeated.",
)
@click.option("--as-of", metavar="WHEN", help="Take nothing newer: a date, a commit of the anchor, 'release' or 'now'.")
@click.option("--name", metavar="NAME", help="Write to lockfiles/NAME/BASE: pins never overwrite the stack's own lock.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write the lock to this directory.")
@click.option(
    "--torch-build",
    metavar="BUILD",
    help="Take this build of torch instead of the base's; 'index' is the package index's own (CUDA, 10x the size).",
)
@click.option("--upgrade", is_flag=True, help="Resolve anew as of now, even if nothing changed.")
@output_options
def command(
    session: Session,
    stack: str,
    base: str | None,
    target: str | None,
    nemo: str | None,
    pins: dict[str, str],
    as_of: str | None,
    name: str | None,
    out: Path | None,
    torch_build: str | None,
    upgrade: bool,
) -> None:
    """Resolve a stack on a base into lockfiles/STACK/BASE/: every package pinned, with hashes.

    Does nothing when the lock is there and neither the stack, the base nor uv changed, and no branch that it follows
    moved.
    """
    if nemo is not None:
        if "nemo-toolkit" in pins:
            raise UsageError("nemo-toolkit is pinned twice", why="By --nemo and by --pin.", fix="Leave one out.")
        pins = {"nemo-toolkit": nemo, **pins}
    selection = session.select_to_lock(stack, target, base)
    kept = variant_name(selection.stack_name, selection.stack, pins, name) if out is None else ""
    result = lock_stack(
        selection,
        path=out or lock_path(session.project, kept, selection.base_name),
        request=Request(pins=pins, as_of=as_of, torch_build=torch_build),
        site=session.site,
        store=session.store,
        reporter=session.reporter,
        upgrade=upgrade,
    )
    _show(session, result)


def _show(session: Session, result: LockResult) -> None:
    lock, path = result.directory.lock, result.directory.path
    count = sum(phase.packages for phase in lock.phases.values())
    found = {"find-links": "found in find-links", "torch-index": "found on the index of torch builds"}
    torch = f"torch {lock.torch.version} ({found.get(lock.torch.found_in, 'the package index has it')})"
    state = "locked" if result.built else "nothing to do: already locked"
    title = f"{state} as of {lock.inputs.as_of}: {lock.stack} on {lock.base.name}"
    lines = [f"{title}, {count} packages, {torch}, lock {short(lock.digest)}"]
    for name, item in lock.components.items():
        at = f" at {item.commit[:12]}" if item.commit else ""
        lines.append(f"  {name} {item.version}{at}  [{item.because}]")
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
        *lines,
        shown(path),
    )
