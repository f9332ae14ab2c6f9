"""The step `record`: writes the files of a lock."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from packaging.utils import canonicalize_name

from envbuild.core.background import interruptible
from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.files import machine_errors
from envbuild.lock import lockfile
from envbuild.lock.checks.check import CheckResult
from envbuild.lock.context import LockContext
from envbuild.lock.lockfile import PHASE_FILES, LockedPhase
from envbuild.lock.project.pyproject import render_project
from envbuild.lock.record.record import record_of
from envbuild.lock.resolve.resolve import ResolvedPlan
from envbuild.lock.uv.resolution import export, with_local_hashes

INSTALLS = {
    "main": "uv pip install --no-deps --require-hashes -r main.txt",
    "compile": "uv pip install --no-deps --require-hashes --no-build-isolation -r compile.txt",
    "git": "uv pip install --no-deps --no-build-isolation -r git.txt",
}


def write_lock(resolved: ResolvedPlan, checked: CheckResult, context: LockContext) -> None:
    """Write all files of the lock into the context's folder."""
    with context.reporter.step("write the lock"):
        phases = _write_phases(resolved, context)
        project = context.folder / lockfile.PROJECT_FILE
        with machine_errors(context.folder):
            project.write_text(render_project(resolved.plan.project, pins=resolved.pins))
            record = record_of(resolved, checked, phases, sha256_file(project))
            (context.folder / lockfile.RECORD_FILE).write_text(lockfile.render(record))


def _write_phases(resolved: ResolvedPlan, context: LockContext) -> dict[str, LockedPhase]:
    plan, resolution = resolved.plan, resolved.resolution
    # A component of the compile phase is built there, also where one of phase main depends on it.
    late = {canonicalize_name(name) for name in plan.project.compiled()}
    with interruptible(ThreadPoolExecutor(2)) as pool:
        exported = pool.submit(export, context.folder, None, plan.what, context.log)
        with_compile = export(context.folder, "compile", plan.what, context.log)
    main = [block for block in exported.result() if _key(block) not in late]
    in_main = {_key(block) for block in main}
    compiled = [block for block in with_compile if _key(block) not in in_main]
    blocks = {
        "main": with_local_hashes([block for block in main if not _from_git(block)], resolution, plan.torch),
        "compile": with_local_hashes([block for block in compiled if not _from_git(block)], resolution, plan.torch),
        "git": [block for block in (*main, *compiled) if _from_git(block)],
    }
    phases = {}
    for phase, lines in blocks.items():
        text = f"# Written by `envbuild lock`. Phase {phase}: {len(lines)} packages.\n# {INSTALLS[phase]}\n"
        text += "".join(f"{line}\n" for line in lines)
        with machine_errors(context.folder):
            (context.folder / PHASE_FILES[phase]).write_text(text)
        phases[phase] = LockedPhase(file=PHASE_FILES[phase], packages=len(lines), digest=sha256_bytes(text.encode()))
    return phases


def _from_git(block: str) -> bool:
    return " @ git+" in block.split("\n", 1)[0]


def _key(block: str) -> str:
    return re.split(r"==| @ |\[", block, maxsplit=1)[0].strip()
