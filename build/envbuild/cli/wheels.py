"""``envbuild wheels``."""

from __future__ import annotations

from dataclasses import dataclass

import click

from envbuild.cli.common import LockedOptions, Session, as_command
from envbuild.cli.options import flag, include, option
from envbuild.cli.stores import StoreOptions
from envbuild.cli.wheelhouse import COMMANDS, as_json, line
from envbuild.core.digests import Json, short
from envbuild.sync.build_environment import build_environment_for
from envbuild.wheels.build.limits import choose_limits
from envbuild.wheels.build.parallel import BuildContext, make_wheels
from envbuild.wheels.cache.wheelhouse import Wheelhouse
from envbuild.wheels.key import difference
from envbuild.wheels.plan import WheelPlan, choose, cuda_of, plan_wheels
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.toolkit import ToolkitRequest, choose_toolkit


@dataclass(frozen=True, kw_only=True)
class WheelsOptions:
    locked: LockedOptions = include(LockedOptions)
    packages: tuple[str, ...] = option("--package NAME", "Build only this package; may be repeated.", multiple=True)
    jobs: int | None = option(
        "--jobs N", "Compilers at once; default: as cores and memory allow.", type=click.IntRange(min=1)
    )
    memory_gib: int | None = option(
        "--memory GIB", "Memory for all compilers together; default: what is free.", type=click.IntRange(min=1)
    )
    toolkit: str = option(
        "--toolkit",
        "The CUDA toolkit: this machine's, the package index's, or (auto) the index's if this machine's does not fit.",
        type=click.Choice([known.value for known in ToolkitRequest]),
        default=ToolkitRequest.AUTO.value,
    )
    explain: bool = flag("--explain", "Print the parts of each build key; build nothing.")
    against: str | None = option(
        "--against KEY", "With --explain: print only the parts that differ from the wheel of this key."
    )
    stores: StoreOptions = include(StoreOptions)


@as_command("wheels", WheelsOptions, COMMANDS)
def command(session: Session, options: WheelsOptions) -> None:
    """Compile the wheels of a lock for a target's architectures, and store them in the wheelhouse.

    Wheels that exist here or in a remote store are reused. The commands below list and change the wheelhouse.
    """
    if options.against is not None and not options.explain:
        raise click.UsageError("--against belongs to --explain")
    selection, lock = session.locked(options.locked)
    names = choose(lock, options.packages)
    if not names:
        session.done({"wheels": []}, f"nothing to build: the lock of {lock.lock.stack} has no package that is compiled")
        return
    sources = WheelSources(base=selection.base, site=session.site, store=session.store, reporter=session.reporter)
    chosen = choose_toolkit(ToolkitRequest(options.toolkit), lock, cuda_of(lock, selection.target), sources)
    plans = plan_wheels(lock, names, selection.target, session.catalog, chosen.compilers, sources)
    if options.explain:
        _explain(session, plans, options.against)
        return
    build_context = BuildContext(
        toolchain=chosen.toolchain,
        sources=sources,
        wheelhouse=Wheelhouse(
            session.store, session.remotes(options.stores.store, options.stores.store_mode or ""), lock.lock.digest
        ),
        limits=choose_limits(options.jobs, options.memory_gib),
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
