"""``envbuild ci init``."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click

from envbuild.catalog.fields import Device
from envbuild.cli.common import DEFAULT_STACK, FOLDER, Session, as_command, command_group
from envbuild.cli.options import no_effect, option, parse_list
from envbuild.core.errors import UsageError
from envbuild.core.text import shown
from envbuild.nightly.ci.ci import CiJob, CiTarget, System, render, write


def parse_time(text: str) -> str:
    """``HH:MM``."""
    if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", text):
        raise ValueError(f"{text!r} is not a time such as 02:00")
    return text


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    system: System = option("--for", "What runs the nightly.", required=True, type=click.Choice(get_args(System)))
    stack: str = option("--stack NAME", "The stack (`envbuild list stacks`).", default=DEFAULT_STACK)
    targets: tuple[str, ...] | None = option(
        "--targets LIST", "Targets, separated by commas; default: all of the stack.", convert=parse_list
    )
    to: str = option("--to REGISTRY/REPO", "Where images are published.", required=True)
    sqsh_to: str = option("--sqsh-to PLACE", "Where .sqsh files go: s3://, gs:// or a directory.", default="")
    state: str = option("--state PLACE", "Share the ledger: s3://, gs://, oci:// or a folder.", default="")
    on: str | None = option("--on NAME", "For slurm: the cluster whose nodes certify targets with GPUs.")
    at: str = option(
        "--at HH:MM",
        "When to start, in UTC; for slurm, in the cluster's time zone.",
        default="02:00",
        convert=parse_time,
    )
    into: Path = option("--into", "Where the files are written.", type=FOLDER, default=Path())


@as_command("init", InitOptions)
def init(session: Session, options: InitOptions) -> None:
    """Write a GitHub workflow, a systemd timer or a Slurm crontab that only calls `envbuild nightly`.

    For GitHub, targets with GPUs also get a batch job: a runner.
    """
    stack, into = options.stack, options.into
    known = tuple(entry.target for entry in session.catalog.stack(stack).builds)
    names = known if options.targets is None else options.targets
    if not names or (unknown := [name for name in names if name not in known]):
        raise UsageError(
            f"stack {stack} has no target {unknown[0]!r}" if names else "--targets names no target",
            why=f"Its targets are {', '.join(known)}.",
            fix="Name some of them, or leave --targets out for all.",
        )
    if options.on is not None:
        if options.system != "slurm":
            raise no_effect("--on", f"with --for {options.system}", "It is for --for slurm.")
        session.catalog.cluster(options.on)
    ci_targets = tuple(
        CiTarget(name=name, on_gpus=session.catalog.target(name).device is Device.CUDA) for name in dict.fromkeys(names)
    )
    # GitHub's runner installs envbuild; a timer and a batch job have no PATH to find it with.
    program = "envbuild" if options.system == "github" else str(Path(sys.argv[0]).absolute())
    job = CiJob(
        stack=stack,
        targets=ci_targets,
        to=options.to,
        sqsh_to=options.sqsh_to,
        state=options.state,
        at=options.at,
        project=session.project.absolute(),
        # `python -m envbuild` has the path of __main__.py as its first word.
        program=program if program.endswith("envbuild") else "envbuild",
        on=options.on or "",
    )
    files = write(render(options.system, job), into)
    session.done({"written": [str(path.absolute()) for path in files]}, *[shown(path.absolute()) for path in files])


command = command_group("ci", "Write files for GitHub, systemd or Slurm that run `envbuild nightly`.", init)
