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

# The exit code of core.errors.MachineError, which costs too much to import here.
MACHINE = 11


def _on_sigterm(signum: int, frame: object) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the command line and exit with the code of what happened."""
    _open_closed_streams()
    signal.signal(signal.SIGTERM, _on_sigterm)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
        signal.signal(signal.SIGHUP, _on_sigterm)
    arguments = sys.argv[1:]
    try:
        code = run(arguments)
    except BrokenPipeError:
        code = 0
    except KeyboardInterrupt:
        # Work has been stopped; another Ctrl-C has nothing left to stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from envbuild.cli.report import report
        from envbuild.core.errors import InterruptedByUserError

        code = report(InterruptedByUserError(), arguments)
    # The work is over and has its exit code: a signal that comes now changes nothing.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            # The reader of our output left (`envbuild list stacks | head -1`); Python would complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
            code = code or MACHINE
    sys.exit(code)


def _open_closed_streams() -> None:
    """Give a process that was started with closed streams (``>&-``) something to write to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open for as long as the process lives


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code."""
    as_json = "--json" in arguments
    match [word for word in arguments if word != "--json"]:
        case [] | ["-h" | "--help"]:
            text = help_text()
            print(_object({"help": text}) if as_json else text, end="\n" if as_json else "")
            return 0
        case ["--version"]:
            print(_object({"version": __version__}) if as_json else f"envbuild {__version__}")
            return 0
    from envbuild.cli.group import run_command

    if arguments[0] == "--json":
        # Every command has the option; before the command's name it means the same.
        arguments = [*arguments[1:], "--json"]
    return run_command(arguments)


def _object(value: dict[str, str]) -> str:
    import json

    return json.dumps(value, indent=2)
