"""The ``envbuild`` program: finds the command, runs it, and turns failures into explanations and exit codes.

Nothing heavy is imported here, not even click: ``envbuild --help`` must cost little more than starting Python.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from envbuild import __version__
from envbuild.cli.commands import help_text


def _on_sigterm(signum: int, frame: object) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the command line and exit with the code of what happened."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    arguments = sys.argv[1:]
    try:
        code = run(arguments)
    except BrokenPipeError:
        code = 0
    except KeyboardInterrupt:
        from envbuild.cli.report import report
        from envbuild.core.errors import InterruptedByUserError

        code = report(InterruptedByUserError(), arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output left (`envbuild list stacks | head -1`); Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code."""
    match arguments:
        case [] | ["-h" | "--help"]:
            print(help_text(), end="")
            return 0
        case ["--version"]:
            print(f"envbuild {__version__}")
            return 0
    from envbuild.cli.group import run_command

    return run_command(arguments)
