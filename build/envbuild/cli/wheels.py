"""``envbuild wheels``."""

from __future__ import annotations

from collections.abc import Callable

import click

from envbuild.cli.command import CommandGroup, hands_over
from envbuild.cli.common import Session, name_option, output_options, selection_options
from envbuild.cli.stores import store_options
from envbuild.cli.wheelhouse import COMMANDS, as_json, line
from envbuild.core.digests import Json, short
from envbuild.lock.lockdir import find_lock
from envbuild.store.remote import Remote
from envbuild.sync.build_environment import build_environment_for
from envbuild.wheels.build.limits import choose_limits
from envbuild.wheels.build.parallel import BuildContext, make_wheels
from envbuild.wheels.cache.wheelhouse import Wheelhouse
from envbuild.wheels.key import difference
from envbuild.wheels.plan import WheelPlan, choose, cuda_of, plan_wheels
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.toolkit import ToolkitRequest, choose_toolkit


@click.group("wheels", cls=CommandGroup, invoke_without_command=True)
@selection_options
@name_option
@click.option("--package", "packages", multiple=True, metavar="NAME", help="Build this one only; may be repeated.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at once; default: as cores and memory allow.")
@click.option(
    "--memory",
    "memory_gib",
    type=click.IntRange(min=1),
    help="GiB that compilers may take together; default: what is free.",
)
@click.option(
    "--toolkit",
    type=click.Choice([known.value for known in ToolkitRequest]),
    default=ToolkitRequest.AUTO.value,
    show_default=True,
    help="Whose CUDA toolkit: this machine's, the package index's, or the index's where this machine's does not fit.",
)
@click.option("--explain", is_flag=True, help="Print the parts of each build key; build nothing.")
@click.option("--against", metavar="KEY", help="With --explain: the parts that differ from the wheel of this key.")
@store_options
@output_options
@click.pass_context
def command(
    context: click.Context,
    session: Session,
    stack: str,
    base: str | None,
    target: str | None,
    name: str | None,
    packages: tuple[str, ...],
    jobs: int | None,
    memory_gib: int | None,
    toolkit: str,
    explain: bool,
    against: str | None,
    stores: Callable[[Session], tuple[Remote, ...]],
) -> None:
    """Build the compile-phase wheels of a lock for a target's architectures, and keep them in the wheelhouse.

    Existing wheels are reused, also those of remote stores that are read. The commands show and change what exists.
    """
    if hands_over(context):
        return
    if against is not None and not explain:
        raise click.UsageError("--against belongs to --explain")
    selection = session.select_locked(stack, target, base, name)
    lock = find_lock(session.project, selection, name)
    names = choose(lock, packages)
    if not names:
        session.done({"wheels": []}, f"nothing to build: the lock of {lock.lock.stack} has no package that is compiled")
        return
    sources = WheelSources(base=selection.base, site=session.site, store=session.store, reporter=session.reporter)
    chosen = choose_toolkit(ToolkitRequest(toolkit), lock, cuda_of(lock, selection.target), sources)
    plans = plan_wheels(lock, names, selection.target, session.catalog, chosen.compilers, sources)
    if explain:
        _explain(session, plans, against)
        return
    build_context = BuildContext(
        toolchain=chosen.toolchain,
        sources=sources,
        wheelhouse=Wheelhouse(session.store, stores(session), lock.lock.digest),
        limits=choose_limits(jobs, memory_gib),
    )
    # Only made where a wheel is missing: the environment has gigabytes.
    made = make_wheels(plans, lambda: build_environment_for(lock, selection.target, session.context), build_context)
    session.done({"wheels": [as_json(known) for known in made]}, *[line(known) for known in made])


def _explain(session: Session, plans: tuple[WheelPlan, ...], against: str | None) -> None:
    other = Wheelhouse(session.store).by_prefix(against).record if against is not None else None
    keys: list[Json] = []
    lines: list[str] = []
    for plan in plans:
        parts = plan.parts
        row: dict[str, Json] = {"package": parts.package, "key": parts.key, "parts": parts.model_dump(mode="json")}
        lines.append(f"{plan.name}: key {parts.key}")
        if other is None:
            lines += [f"  {name} = {value}" for name, value in parts.flat().items()]
        else:
            differs = difference(other.parts, parts)
            row["differs"] = {part: list(values) for part, values in differs.items()}
            lines += [f"  {part}: {old or '-'} -> {new or '-'}" for part, (old, new) in differs.items()]
            lines += [] if differs else [f"  the same as {short(other.key)}"]
        keys.append(row)
    session.done({"keys": keys}, *lines)


for _command in COMMANDS:
    command.add_command(_command)
