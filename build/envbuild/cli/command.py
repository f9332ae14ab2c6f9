"""The click command that all of ours are: its help is a result like any other."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Collection, Sequence

import click
from click.core import ParameterSource

from envbuild.cli.output import put

# Of an option that is not there: as many characters, dashes included, say which one was meant; else nearly all do.
BEGINNING, CLOSE = len("--out"), 0.75


class Command(click.Command):
    """A command whose ``--help`` is written as results are: as an object with ``--json``, and an error if it cannot be.

    The context's ``obj`` says whether ``--json`` was given, wherever it stands.
    """

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        # Each time: click keeps the option from 8.1.8 on, and makes another one before.
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # click suggests any that share some letters: --trust for --output.
            name = error.option_name
            near = near_option(name, [known for param in self.params for known in (*param.opts, *param.secondary_opts)])
            meant = f" Did you mean {near!r}?" if near else ""
            raise click.UsageError(f"No such option {name!r}.{meant}", ctx) from error


def near_option(name: str, options: Sequence[str]) -> str | None:
    """The option that somebody may have meant: one that begins alike, else one that is nearly written so."""
    alike = [option for option in options if option.startswith(name[:BEGINNING])] if len(name) >= BEGINNING else []
    near = difflib.get_close_matches(name, alike, 1, 0.0) or difflib.get_close_matches(name, options, 1, CLOSE)
    return near[0] if near else None


class CommandGroup(Command, click.Group):
    """A command with commands of its own, all of which write their help so."""

    command_class = Command


def given_options(context: click.Context) -> set[str]:
    """The names of the options that were given, and not left at their defaults."""
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def hands_over(context: click.Context) -> bool:
    """Whether a command of a group was named, to which the group's own work then gives way.

    Raises:
        UsageError: options stand before its name, where they would mean the group's own work.
    """
    if context.invoked_subcommand is None:
        return False
    if given_options(context):
        group = context.info_name
        raise click.UsageError(f"options of `{group} {context.invoked_subcommand}` come after its name", context)
    return True


def command_line(context: click.Context, *more: str, without: Collection[str] = ()) -> str:
    """The command as it was given, with ``more`` words and ``without`` options of these names: to be typed again."""
    words = context.command_path.split()
    given_names = given_options(context)
    for parameter in context.command.params:
        name = str(parameter.name)
        if not isinstance(parameter, click.Option) or name not in given_names or parameter.opts[0] in more:
            continue
        if name in without:
            continue
        # Only what was typed is repeated: a default may be another one in the next version.
        given = context.params[name]
        if parameter.is_flag:
            words.append(flag_of(parameter, given))
            continue
        if isinstance(given, dict):  # COMPONENT=REF, as pin_texts read it
            given = [f"{key}={value}" for key, value in given.items()]
        for value in given if parameter.multiple else (given,):
            words += [parameter.opts[0], str(value)]
    return shlex.join([*words, *more])


def flag_of(option: click.Option, value: object) -> str:
    """The flag that gives an option this value: ``--verify``, or ``--no-verify``."""
    return option.secondary_opts[0] if value is False else option.opts[0]


def _show_help(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001
    # click parses resiliently to complete words in a shell, where nothing may be printed.
    if value and not ctx.resilient_parsing:
        text = ctx.get_help() + "\n"
        put(json.dumps({"help": text}, indent=2) + "\n" if ctx.obj else text)
        ctx.exit()
