"""The click group: imports a command when it runs."""

from __future__ import annotations

import difflib
import importlib

import click

from envbuild.cli.command import Command
from envbuild.cli.commands import COMMANDS, help_text


class LazyGroup(Command, click.Group):
    """A group whose commands are imported only when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def get_help(self, ctx: click.Context) -> str:  # noqa: ARG002
        return help_text().rstrip()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            # click 8.1 suggests options and no commands.
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"no such command {args[0]!r}.{meant} Commands: {', '.join(COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """The root of the command line."""


def run_command(arguments: list[str]) -> int:
    """Run one command; what click finds wrong in the command line is reported, other errors are raised."""
    from envbuild.cli.report import report, usage_error

    try:
        # Not cli.main(): it ends the process with status 1 when the reader of stdout leaves. With a copy, as main()
        # makes one: click's parser takes the words out of the list.
        with cli.make_context("envbuild", list(arguments), obj="--json" in arguments) as context:
            cli.invoke(context)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        return report(usage_error(error), arguments)
    return 0
