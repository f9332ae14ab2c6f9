"""The import check: every module that a stack names must import, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from envbuild.core.errors import CheckRefusedError
from envbuild.core.process import Finished, describe_status, interruptible, tail
from envbuild.core.progress import Reporter
from envbuild.lock.record import Lock
from envbuild.sync.place import Run


def modules_of(lock: Lock) -> dict[str, tuple[str, ...]]:
    """The modules that must import, by component."""
    return {name: item.modules for name, item in lock.components.items() if item.modules}


def check_imports(modules: Mapping[str, Sequence[str]], python: str, run: Run, logs: Path, reporter: Reporter) -> None:
    """Import every module with ``python``, as many at once as there are processors.

    A process each: an import that only works after another one is not hidden.

    Raises:
        CheckRefusedError: a module does not import; holds each traceback's end.
    """

    def one(component: str, module: str) -> tuple[str, str, Finished]:
        # -I: neither the current directory nor PYTHON* variables nor a user's packages may help.
        argv = [python, "-I", "-c", "import importlib, sys; importlib.import_module(sys.argv[1])", module]
        return component, module, run(argv, what=f"import {module}", log=logs / f"import-{module}.log")

    work = [(component, module) for component, names in modules.items() for module in names]
    with reporter.step(f"import {len(work)} modules"), interruptible(ThreadPoolExecutor(os.cpu_count() or 1)) as pool:
        results = list(pool.map(lambda item: one(*item), work))
    failed = [(component, module, finished) for component, module, finished in results if finished.status != 0]
    if not failed:
        return
    why = "\n".join(
        f"{module} ({component}) {describe_status(finished.status)}:\n{tail(finished.output, lines=6)}"
        for component, module, finished in failed
    )
    raise CheckRefusedError(
        f"{len(failed)} of {len(work)} modules of the stack do not import",
        why=why,
        fix="The lock resolves and installs, but does not work: a package that is needed and not declared, or two "
        "that do not belong together. Name it under [requirements] of the stack with the reason, and lock again.",
        log=logs / f"import-{failed[0][1]}.log",
    )
