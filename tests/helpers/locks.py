"""Lock directories made by hand, as `envbuild lock` writes them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from envbuild.catalog.catalog import Catalog, HostDistribution, Selection, definition_digest, select
from envbuild.catalog.site import load_site
from envbuild.catalog.stack import Phase
from envbuild.core.digests import sha256_bytes
from envbuild.core.progress import SilentReporter
from envbuild.lock import lockfile
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs.request import LockRequest, inputs_digest
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory
from envbuild.lock.models import SCHEMA, Inputs, Lock, LockedBase, LockedComponent, LockedPhase, LockedTorch
from envbuild.lock.uv_lock import ResolvedPackage
from envbuild.store.local import LocalStore


def resolved_package(table: dict[str, Any]) -> ResolvedPackage:
    """A package of a uv.lock; it is of an index where its table does not say."""
    return ResolvedPackage.model_validate({"source": {"registry": "https://x/simple"}, **table})


MAIN = """\
# Written by `envbuild lock`.
megatron-core==0.16.1 ; sys_platform == 'linux' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
torch==2.13.0+cpu \\
    --hash=sha256:cc
    # via megatron-core
uvicorn[standard]==0.30
"""
COMPILE = "# empty\n"
DIGEST = sha256_bytes(b"")


def make_lock(path: Path, main: str = MAIN, **changes: object) -> Lock:
    """Write the files of a lock of stack mcore on debian12 into ``path``; ``changes`` are fields of the record."""
    path.mkdir(parents=True, exist_ok=True)
    texts = {"main": (main, 3), "compile": (COMPILE, 0), "git": (COMPILE, 0)}
    phases = {}
    for phase, (text, packages) in texts.items():
        (path / PHASE_FILES[phase]).write_text(text)
        phases[phase] = LockedPhase(file=PHASE_FILES[phase], packages=packages, digest=sha256_bytes(text.encode()))
    torch = LockedTorch(version="2.13.0+cpu", build="cpu", found_in="find-links")
    components = {
        "torch": LockedComponent(asked="==2.13.0", version="2.13.0+cpu", phase=Phase.MAIN, modules=("torch",)),
        "megatron-core": LockedComponent(asked="==0.16.1", version="0.16.1", phase=Phase.MAIN),
    }
    fields: dict = {
        "schema": SCHEMA,
        "stack": "mcore",
        "digest": lockfile.content_digest(DIGEST, torch, components, phases),
        "source_date_epoch": 1700000000,
        "inputs": Inputs(
            digest=DIGEST,
            stack_digest=DIGEST,
            base_digest=DIGEST,
            torch_build="cpu",
            uv="0",
            as_of="2026-01-02T03:04:05Z",
        ),
        "base": LockedBase(
            name="debian12",
            definition_digest=DIGEST,
            distribution="debian",
            release="12",
            platform="linux/amd64",
            glibc="2.36",
            python="3.11",
        ),
        "torch": torch,
        "components": components,
        "phases": phases,
    }
    (path / lockfile.PROJECT_FILE).write_text("[project]\n")
    fields["pyproject_digest"] = sha256_bytes((path / lockfile.PROJECT_FILE).read_bytes())
    lock = lockfile.sealed(Lock(**(fields | changes)))
    (path / lockfile.RECORD_FILE).write_text(_rendered(lock))
    return lock


_RENDERED: dict[str, str] = {}


def _rendered(lock: Lock) -> str:
    """The file of a lock; most tests have the same one."""
    key = lock.model_dump_json()
    if key not in _RENDERED:
        _RENDERED[key] = lockfile.render(lock)
    return _RENDERED[key]


def inputs_of(selection: Selection) -> Inputs:
    """What the record says of a lock that was made from a selection as it is now."""
    return Inputs(
        digest=inputs_digest(selection, LockRequest()),
        stack_digest=definition_digest(selection.stack),
        base_digest=definition_digest(selection.base),
        torch_build="cpu",
        uv="0",
        as_of="2026-01-02T03:04:05Z",
    )


def mcore_of(project: Path) -> Selection:
    """Stack mcore on debian12 for the CPU, as a project sees it."""
    return select(Catalog.open(project), "mcore", "cpu", "debian12", HostDistribution("debian", "12"))


@cache
def _shipped_inputs() -> Inputs:
    """Of the shipped definitions, which no test changes: those of a project without any of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return inputs_of(mcore_of(Path(folder)))


def lock_mcore(project: Path, main: str = MAIN) -> LockDirectory:
    """Such a lock in a project, of its definitions as they are now."""
    path = project / "lockfiles" / "mcore" / "debian12"
    make_lock(path, main, inputs=inputs_of(mcore_of(project)) if (project / "envs").exists() else _shipped_inputs())
    return lockfile.read_lock(path)


def lock_context(folder: Path, repositories: Any = None) -> LockContext:
    """A context of one lock that works in ``folder``, with a store in it."""
    reporter = SilentReporter()
    store = LocalStore(folder / "store", reporter)
    return LockContext(
        store=store,
        site=load_site({"HOME": str(folder)}),
        reporter=reporter,
        folder=folder,
        log=folder / "log",
        repositories=repositories or Repositories(store, reporter),
    )
