"""The command line in this process: 0.3 s less a call than a process of its own.

What a process would have of its own is put in its place for the call and back after it: the current directory, the
environment, the folder of temporary files that follows from it, the streams, functions' caches, and locks that are held
until a process ends. Signals, streams that break
and kills need a real process: :meth:`conftest.Tool.start`, or ``in_process=False``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from envbuild.cli.main import run
from envbuild.core import locks


def run_here(arguments: list[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run one command line, as ``python -m envbuild`` would in ``cwd`` with ``env``."""
    assert threading.current_thread() is threading.main_thread(), "the current directory is the process's"
    before, there, streams = dict(os.environ), Path.cwd(), (sys.stdout, sys.stderr)
    with _stream() as out, _stream() as err:
        temporary = tempfile.tempdir
        try:
            _clear_caches()
            os.chdir(cwd)
            _set_environment(env)
            tempfile.tempdir = None
            sys.stdout, sys.stderr = out, err
            code = run(list(arguments))
        finally:
            sys.stdout, sys.stderr = streams
            tempfile.tempdir = temporary
            _set_environment(before)
            os.chdir(there)
            locks.release_all()
            _clear_caches()
        return subprocess.CompletedProcess(arguments, code, _text(out), _text(err))


def _set_environment(values: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(values):
        del os.environ[name]
    for name, value in values.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _stream() -> IO[str]:
    # A file: what programs inherit as their standard output has a descriptor.
    return tempfile.TemporaryFile("w+", encoding="utf-8", newline="")


def _text(stream: IO[str]) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


# What is asked of a machine, and holds for the life of a process: programs on PATH, their versions. All other caches
# are of what files say.
_OF_MACHINES = ("envbuild.core.", "envbuild.image.", "envbuild.wheels.", "envbuild.lock.uv.interpreter")


def _clear_caches() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(_OF_MACHINES):
            for value in vars(module).values():
                clear = getattr(value, "cache_clear", None)
                if clear is not None:
                    clear()
