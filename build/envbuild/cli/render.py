"""``envbuild render``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from envbuild.cli.common import FOLDER, Session, as_command
from envbuild.cli.options import flag, option
from envbuild.cli.output import put
from envbuild.core.errors import ConfigurationError
from envbuild.core.files import write_atomic
from envbuild.core.text import shown
from envbuild.launch.slurm.job import EDF, PLAN, NamedCluster
from envbuild.launch.slurm.render import render_edf, render_sbatch
from envbuild_smoke.plan.json_reader import PlanError
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.plan.reader import read_plan

RENDERERS = {"sbatch": (render_sbatch, "job.sbatch"), "edf": (render_edf, EDF)}


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    on: str = option("--on NAME", "The cluster (`envbuild list clusters`).", required=True)
    to: Literal["sbatch", "edf"] = option(
        "--to FORMAT", "sbatch or edf.", type=click.Choice(list(RENDERERS)), required=True
    )
    plan: Path = option("--plan DIR", "What `envbuild certify --plan-out` wrote.", type=FOLDER, required=True)
    nodes: int | None = option("--nodes N", "Refuse a plan that is not for this many nodes.", type=click.IntRange(1))
    write: bool = flag("--write", "Write the file into the plan's folder, and print its path.")


@as_command("render", RenderOptions)
def command(session: Session, options: RenderOptions) -> None:
    """Print what starts a plan on a cluster: a batch script, or an environment definition."""
    there = NamedCluster(name=options.on, cluster=session.catalog.cluster(options.on))
    # Links are not followed: nodes may see the folder by the name that was given alone.
    folder = Path(os.path.normpath(options.plan.absolute()))
    plan = _plan(folder)
    # A plan that lies elsewhere is copied there.
    place = folder if folder.is_relative_to(there.folder) else Path(there.folder, folder.name)
    job = there.job(plan, str(place), options.nodes)
    render, name = RENDERERS[options.to]
    text = render(job)
    if place != folder:
        session.reporter.note(f"Copy {shown(folder)} to {place} on the cluster: that is where its nodes look for it.")
    if not job.is_pulled:
        session.reporter.note(f"The image has to be at {job.image} there.")
    if options.write:
        path = folder / name
        write_atomic(path, text)
        session.done({"path": str(path)}, shown(path))
    elif session.as_json:
        session.done({"text": text})
    else:
        put(text)


def _plan(folder: Path) -> Plan:
    try:
        return read_plan(folder / PLAN)
    except PlanError as error:
        raise ConfigurationError(
            f"{folder} has no plan",
            why=f"{error}.",
            fix="Name the folder that `envbuild certify --plan-out` wrote.",
        ) from error
