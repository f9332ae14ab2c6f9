"""Prints a failure: error, cause and help, with the known failures it matches; also as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import click

from envbuild.cli.output import put
from envbuild.core.digests import Json
from envbuild.core.errors import (
    CertificationCannotRunError,
    CertificationFailedError,
    EnvbuildError,
    InternalError,
    InterruptedByUserError,
    MachineError,
    UsageError,
)
from envbuild.core.files import os_error
from envbuild.core.interruptions import has_come, is_interruption
from envbuild.core.text import printable_lines
from envbuild.diagnose.signatures import Signature, match_text

# Stages of failures that an environment in which cases are to run has behind it.
BEFORE_ANYTHING_RUNS = ("lock", "install", "build", "sqsh")
LOG_TAIL_BYTES = 256 * 1024
# Of a line; --json has all of it.
MOST_CHARACTERS = 4000


def usage_error(error: click.ClickException) -> UsageError:
    """Click's complaint about the command line as one of ours."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "envbuild"
    return UsageError("the command line is wrong", why=error.format_message(), fix=f"See {command} --help")


def explain(error: Exception) -> EnvbuildError:
    """The envbuild error for any exception; a traceback is shown only for faults of envbuild."""
    if isinstance(error, InterruptedByUserError):
        return error
    # An unexpected error after a signal: something took the KeyboardInterrupt for a failure of its own. pydantic does,
    # while it makes a class.
    if is_interruption(error) or (has_come() and not isinstance(error, EnvbuildError)):
        return InterruptedByUserError()
    if isinstance(error, EnvbuildError):
        return error
    # Without an errno it is an error of a library, and not of the machine.
    if isinstance(error, OSError) and error.errno is not None:
        return os_error(error, Path(str(error.filename or ".")), "use")
    return InternalError.explaining(error)


def report(error: EnvbuildError, arguments: list[str]) -> int:
    """Print the error and return its exit code, which stands also where nothing can be printed."""
    if "--json" in arguments:
        with contextlib.suppress(BrokenPipeError, MachineError):
            put(json.dumps({"error": as_json(error)}, indent=2) + "\n")
    print_error(error)
    return error.exit_code


def as_json(error: EnvbuildError) -> dict[str, Json]:
    """The object that ``--json`` prints under the key ``error``: the error, and what is known about it."""
    return {**error.as_json(), "known": [{**match.as_json()} for match in _known(error)]}


def print_error(error: EnvbuildError) -> None:
    # An empty NO_COLOR asks for nothing: https://no-color.org
    text = render(error, _known(error), colour=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
    with contextlib.suppress(OSError):  # there is nowhere to print it
        print(text, file=sys.stderr)


def render(error: EnvbuildError, matches: list[Signature], *, colour: bool) -> str:

    def style(text: str, **how: object) -> str:
        return click.style(text, **how) if colour else text  # type: ignore[arg-type]

    lines = [f"{style('error:', fg='red', bold=True)} {style(printable_lines(error.what), bold=True)}"]
    for label, text in (("cause", error.why), ("help", error.fix), ("log", str(error.log) if error.log else "")):
        if text:
            first, *rest = (printable_lines(line[:MOST_CHARACTERS]) for line in text.splitlines())
            lines.append(f"  {style(f'{label}:', bold=True)}{' ' * (6 - len(label))}{first}")
            lines += [f"         {line}" for line in rest]
    for match in matches:
        lines.append(f"  known failure {match.id}: {match.cause}")
        lines.append(f"         help: {match.fix}  ({match.source})")
    return "\n".join(lines)


def _known(error: EnvbuildError) -> list[Signature]:
    text = error.why
    if error.log and error.log.is_file():
        with error.log.open("rb") as stream:
            # The log of a build may have gigabytes; what failed is at its end.
            stream.seek(max(0, error.log.stat().st_size - LOG_TAIL_BYTES))
            # Commands append to one log, each below its own words (core.process.run): the last one failed.
            text += "\n" + ("\n" + stream.read().decode(errors="replace")).rpartition("\n$ ")[2]
    ran = isinstance(error, CertificationFailedError | CertificationCannotRunError)
    return match_text(text, BEFORE_ANYTHING_RUNS if ran else ())[:3]
