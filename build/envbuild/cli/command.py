"""The click command that all of ours are: its help is a result like any other."""

from __future__ import annotations

import json

import click

from envbuild.cli.output import put


class Command(click.Command):
    """A command whose ``--help`` is written as results are: as an object with ``--json``, and an error if it cannot be.

    The context's ``obj`` says whether ``--json`` was given, wherever it stands.
    """

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option


class Group(click.Group):
    """A command with commands of its own, all of which write their help so."""

    command_class = Command

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option


def _show_help(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value and not ctx.resilient_parsing:
        text = ctx.get_help() + "\n"
        put(json.dumps({"help": text}, indent=2) + "\n" if ctx.obj else text)
        ctx.exit()
