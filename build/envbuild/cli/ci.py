"""``envbuild ci init``."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import get_args

import click

from envbuild.catalog.fields import Device
from envbuild.cli.command import CommandGroup
from envbuild.cli.common import DEFAULT_STACK, PathArgument, Session, output_options
from envbuild.core.errors import UsageError
from envbuild.core.text import shown
from envbuild.nightly.ci.ci import CERTIFY_JOB, CiJob, CiTarget, System, render, write


def parse_time(context: click.Context, parameter: click.Parameter, value: str) -> str:  # noqa: ARG001
    """``HH:MM``."""
    if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", value):
        raise click.BadParameter(f"{value!r} is not a time such as 02:00")
    return value


@click.group("ci", cls=CommandGroup)
@output_options
def command(session: Session) -> None:
    """Files from which CI systems call `envbuild nightly`."""


@command.command("init")
@click.option("--for", "system", required=True, type=click.Choice(get_args(System)), help="What calls the nightly.")
@click.option("--stack", metavar="NAME", default=DEFAULT_STACK, show_default=True, help="The components.")
@click.option("--targets", metavar="LIST", help="Targets with commas between them; default: all that the stack names.")
@click.option("--to", metavar="REGISTRY/REPO", required=True, help="Where images are published.")
@click.option("--sqsh-to", metavar="PLACE", default="", help="Where .sqsh files go: s3://, gs:// or a directory.")
@click.option("--state", metavar="PLACE", default="", help="Share the ledger: s3://, gs://, oci:// or a folder.")
@click.option(
    "--at", metavar="HH:MM", default="02:00", show_default=True, callback=parse_time, help="When; UTC, but for slurm."
)
@click.option("--into", type=PathArgument(file_okay=False), default=Path(), help="Where the files are written.")
@output_options
def init(
    session: Session,
    system: System,
    stack: str,
    targets: str | None,
    to: str,
    sqsh_to: str,
    state: str,
    at: str,
    into: Path,
) -> None:
    """Write a GitHub workflow, a systemd timer or a Slurm crontab that calls `envbuild nightly`, and nothing else.

    For targets with GPUs there is a batch job with it: a runner for GitHub, or what runs a plan in the image.
    """
    known = [entry.target for entry in session.catalog.stack(stack).builds]
    names = [word.strip() for word in targets.split(",") if word.strip()] if targets is not None else known
    if not names or (unknown := [name for name in names if name not in known]):
        raise UsageError(
            f"stack {stack} has no target {unknown[0]!r}" if names else "--targets names no target",
            why=f"Its targets are {', '.join(known)}.",
            fix="Name some of them, or leave --targets out for all.",
        )
    ci_targets = tuple(
        CiTarget(name=name, on_gpus=session.catalog.target(name).device is Device.CUDA) for name in dict.fromkeys(names)
    )
    # GitHub's runner installs envbuild; a timer and a batch job have no PATH to find it with.
    program = "envbuild" if system == "github" else str(Path(sys.argv[0]).absolute())
    job = CiJob(
        stack=stack,
        targets=ci_targets,
        to=to,
        sqsh_to=sqsh_to,
        state=state,
        at=at,
        project=session.project.absolute(),
        # `python -m envbuild` has the path of __main__.py as its first word.
        program=program if program.endswith("envbuild") else "envbuild",
        # The placeholders stay outside of shlex.join(), which would put quotes around them.
        run_with=shlex.join(["sbatch", "--wait", str((into / CERTIFY_JOB).absolute())]) + " {plan} {image}"
        if system == "slurm" and any(target.on_gpus for target in ci_targets)
        else "",
    )
    files = write(render(system, job), into)
    session.done({"written": [str(path.absolute()) for path in files]}, *[shown(path.absolute()) for path in files])
