"""The ``envbuild`` program: finds the command, runs it, and turns failures into explanations and exit codes.

Nothing heavy is imported here, not even click: ``envbuild --help`` must cost little more than starting Python.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from envbuild import __version__
from envbuild.cli.commands import help_text
from envbuild.cli.output import discard, open_closed_streams, put
from envbuild.core.interruptions import interrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> NoReturn:
    """Run the command line and exit with the code of what happened."""
    # First: the next file that is opened would get the number of a closed stream.
    open_closed_streams()
    for number in SIGNALS:
        if number is signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:  # nohup has SIGHUP ignored
            signal.signal(number, interrupt)
    code = run(sys.argv[1:])
    # The work is over and has its exit code: a signal that comes now changes nothing.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # noqa: PERF203 - one stream at a time
            # Results are written by put(), which tells; the rest has no reader (`envbuild list stacks | head -1`).
            discard(stream)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and explain its failure, if any; returns the exit code."""
    try:
        return _dispatch(arguments)
    except BrokenPipeError:
        return 0  # the reader has what it wants (`| head -1`)
    except KeyboardInterrupt:
        # Work has been stopped; another Ctrl-C has nothing left to stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from envbuild.cli.report import report
        from envbuild.core.errors import InterruptedByUserError

        return report(InterruptedByUserError(), arguments)
    except Exception as error:  # noqa: BLE001 - the last place where an error can be explained
        from envbuild.cli.report import explain, report

        return report(explain(error), arguments)


def _dispatch(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    match [word for word in arguments if word != "--json"]:
        case [] | ["-h" | "--help"]:
            put(_object({"help": help_text()}) if as_json else help_text())
            return 0
        case ["--version"]:
            put(_object({"version": __version__}) if as_json else f"envbuild {__version__}\n")
            return 0
    from envbuild.cli.group import run_command

    if arguments[0] == "--json":
        # Every command has the option; before the command's name it means the same.
        arguments = [*arguments[1:], "--json"]
    return run_command(arguments)


def _object(value: dict[str, str]) -> str:
    import json

    return json.dumps(value, indent=2) + "\n"
