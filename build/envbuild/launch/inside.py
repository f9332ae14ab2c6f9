"""Runs one command inside a .sqsh on a node of a cluster that has no pyxis: ``python -m envbuild.launch.inside``.

The network is the node's: ranks of several nodes talk to each other. Variables of the job reach the image by name, as
with pyxis' ``--container-env``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from envbuild.core.errors import EnvbuildError
from envbuild.core.sandbox import Bind
from envbuild.launch.gpus import find_driver
from envbuild.launch.open_image import open_image
from envbuild.launch.runtimes import probe


def main(words: Sequence[str]) -> int:
    """Run the command, and return its exit status; what keeps it from starting is printed."""
    parser = argparse.ArgumentParser(prog="envbuild.launch.inside")
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--bind", action="append", default=[], type=_bind, metavar="SOURCE:TARGET[:ro]")
    parser.add_argument("--env", action="append", default=[], metavar="NAME")
    parser.add_argument("--gpus", action="store_true", help="the node's GPUs and driver are seen inside")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(words)
    variables = {name: os.environ[name] for name in arguments.env if name in os.environ}
    try:
        driver = find_driver() if arguments.gpus else None
        with open_image(probe(None), arguments.image, driver=driver) as image:
            sandbox = replace(image.sandbox(arguments.bind, variables), network=True)
            command = image.command(sandbox, arguments.command)
            return subprocess.run(command, env=sandbox.process_environment(), check=False).returncode
    except EnvbuildError as error:
        print(f"error: {error.what}\n  cause: {error.why}\n  help: {error.fix}", file=sys.stderr)
        return error.exit_code


def _bind(text: str) -> Bind:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    return Bind(source=Path(source), target=target or source, writable=mode != "ro")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
