"""Loads what a wheel contains, after the locked torch: every library with all symbols bound, then the modules."""

from __future__ import annotations

import json
import os
import re
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import CheckRefusedError
from envbuild.core.exit_status import innermost_calls, tail
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.process import Finished, ProcessOptions, run
from envbuild.wheels.audit.symbols import is_foreign_symbol
from envbuild.wheels.plan import WheelPlan

DOING = "@doing "
# Loads every library with all its symbols bound, after torch where there is one, then imports modules.
# torch first: extensions have no path to libtorch.so of their own, and find it once torch has loaded it.
# RTLD_NOW: bound lazily, a function that is missing would show at its first call alone (dlopen(3)).
# Marks begin with a line break: what libraries print need not end with one.
_PROBE = """
import ctypes, faulthandler, importlib, json, os, sys
folder, libraries, modules, limit = json.loads(sys.argv[1])
# Shortly before its time is over a process says where it is.
faulthandler.dump_traceback_later(0.9 * limit)
sys.path.insert(0, folder)
print("\\n@doing import torch", flush=True)
try:
    import torch
except ModuleNotFoundError:
    pass
answers = {"libraries": {}, "modules": {}}
for name in libraries:
    print("\\n@doing load " + name, flush=True)
    try:
        ctypes.CDLL(os.path.join(folder, name), mode=os.RTLD_NOW)
    except OSError as error:
        answers["libraries"][name] = str(error)
for name in modules:
    print("\\n@doing import " + name, flush=True)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        answers["modules"][name] = ["missing", str(error), error.name or ""]
    except ImportError as error:
        answers["modules"][name] = ["import", str(error), ""]
    except Exception as error:
        answers["modules"][name] = ["other", f"{type(error).__name__}: {error}", ""]
print("\\n@found " + json.dumps(answers))
"""


@dataclass(frozen=True)
class Loaded:
    """What loading found.

    Attributes:
        problems: what is wrong.
        unknown: modules and libraries of which nothing is known here, and why.
    """

    problems: tuple[str, ...]
    unknown: Mapping[str, str]


def load(wheel: Path, libraries: Sequence[str], plan: WheelPlan, environment: Path, scratch: Path, log: Path) -> Loaded:
    """Unpack a wheel into ``scratch`` and load its libraries and modules with the environment's Python.

    Raises:
        CheckRefusedError: the interpreter did not live to tell, or did not come back within the recipe's time.
    """
    # A build that goes on may have been checked before.
    with machine_errors(scratch), zipfile.ZipFile(wheel) as archive:
        remove_tree(scratch)
        archive.extractall(scratch)
    job = json.dumps([str(scratch), list(libraries), list(plan.modules), plan.recipe.check_limit_seconds])
    # LD_LIBRARY_PATH and LD_PRELOAD of this machine would bring what the environment lacks, and hide it.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_", "VIRTUAL_ENV"))}
    finished = _in_time([environment / "bin" / "python", "-I", "-c", _PROBE, job], plan, kept, scratch, log)
    # Libraries may print, also when the interpreter ends.
    _, mark, answer = finished.output.rpartition("\n@found ")
    if not mark:
        why = f"a module or a library of it ended the interpreter that loaded it: {tail(finished.output) or 'silently'}"
        return Loaded((why,), {})
    answers = json.loads(answer.splitlines()[0])
    problems: list[str] = []
    unknown: dict[str, str] = {}
    for name, why in answers["libraries"].items():
        if _of_driver(why) or is_foreign(why, plan.recipe.foreign_symbols):
            unknown[name] = why
        else:
            problems.append(f"{name} does not load: {why}")
    for name, (kind, why, missing) in answers["modules"].items():
        # An exception of the module's own is no verdict: it may come of the GPU that this machine lacks.
        if (kind == "missing" and is_elsewhere(missing, scratch)) or kind == "other" or _of_driver(why):
            unknown[name] = why
        else:
            problems.append(f"module {name} does not import: {why}")
    return Loaded(tuple(problems), unknown)


def _in_time(
    command: Sequence[str | Path], plan: WheelPlan, environment: Mapping[str, str], scratch: Path, log: Path
) -> Finished:
    limit = plan.recipe.check_limit_seconds
    lines: list[str] = []
    began = time.monotonic()
    try:
        return run(
            command,
            what=f"load what {plan.name} contains",
            log=log,
            on_line=lines.append,
            options=ProcessOptions(
                env=environment,
                cwd=scratch,
                timeout_seconds=limit,
                error=CheckRefusedError,
                fix="It was not kept. It ended the interpreter that loaded it.",
                whole=True,
            ),
        )
    except CheckRefusedError as error:
        # run() has one error for both: before the limit the interpreter failed, after it it was ended.
        if time.monotonic() - began < limit:
            raise
        doing = [line.removeprefix(DOING) for line in lines if line.startswith(DOING)]
        raise CheckRefusedError(
            f"the wheel of {plan.name} is refused: loading what it contains did not end within {limit} s",
            why=f"It was at: {doing[-1] if doing else 'the start of Python'}\n" + innermost_calls("\n".join(lines)),
            fix="It was not kept; its object files were. Where this machine's disk is so slow, raise "
            f"check_limit_seconds in envs/wheels/{plan.parts.package}.toml and run again.",
            log=log,
        ) from error


def is_elsewhere(module: str, unpacked: Path) -> bool:
    """Whether a missing module is of another package of the compile phase, which the import check of `sync` has.

    A folder of the wheel without an ``__init__.py`` is another package's too, into which it puts its files.
    """
    top = unpacked / module.partition(".")[0]
    return not (top / "__init__.py").is_file() and not top.with_suffix(".py").is_file()


def is_foreign(why: str, beginnings: Sequence[str]) -> bool:
    """Whether a library did not load for want of a symbol that another package's library brings."""
    match = re.search(r"undefined symbol: (\w+)", why)
    return match is not None and is_foreign_symbol(match[1], beginnings)


def _of_driver(why: str) -> bool:
    """Whether a library is missing that only a machine with NVIDIA's driver has."""
    return bool(re.search(r"lib(cuda|nvidia-ml)\.so\.1: cannot open shared object file", why))
