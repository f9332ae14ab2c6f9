"""``envbuild importer get|release``: what pyxis runs in the place of ``enroot import``.

Protocol: https://github.com/NVIDIA/pyxis/blob/master/importers/README.md
"""

from __future__ import annotations

import os

import click

from envbuild.cli.command import Command, CommandGroup, hands_over
from envbuild.cli.common import Session, output_options
from envbuild.cli.pull import request_of, result_of
from envbuild.publish.importer import note_step
from envbuild.publish.pull import pull


@click.group("importer", cls=CommandGroup, invoke_without_command=True)
@output_options
@click.pass_context
def command(context: click.Context, session: Session) -> None:  # noqa: ARG001
    """Serve certified images to pyxis: importer=FILE of plugstack.conf, where FILE runs this."""
    if not hands_over(context):
        raise click.UsageError(f"which command? There are: {', '.join(command.commands)}", context)


@command.command("get", cls=Command)
@click.argument("uri")
@output_options
def get_command(session: Session, uri: str) -> None:
    """Print the path of the .sqsh that URI means, from the store, after its certificate was verified.

    URI is what `envbuild pull` takes, or enroot's form of it: docker://REGISTRY#REPO:TAG. ENVBUILD_PULL_TARGET,
    ENVBUILD_PULL_MAX_AGE and ENVBUILD_PULL_POLICY stand for --target, --max-age and --policy.
    """
    target, max_age, policy = (os.environ.get(f"ENVBUILD_PULL_{name}") for name in ("TARGET", "MAX_AGE", "POLICY"))
    pulled = pull(request_of(session, uri, target, max_age, policy), session.context)
    # For enroot's hook, which lets a step start no image but one that was verified.
    note_step(pulled.path)
    # The first line, and alone: pyxis takes it for the path, whatever it says.
    session.done(result_of(pulled), str(pulled.path))


@command.command("release", cls=Command)
@click.argument("uri", required=False)
@output_options
def release_command(session: Session, uri: str | None) -> None:  # noqa: ARG001 - whatever pyxis says
    """Do nothing: the image stays in the store, for the next step. pyxis runs it twice."""
    session.done({"released": True})
