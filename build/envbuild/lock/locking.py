"""``envbuild lock``: from a stack and a base to a lock directory, or to the word that nothing changed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from envbuild.catalog.catalog import Selection, definition_digest
from envbuild.catalog.data import data_root
from envbuild.catalog.site import Site
from envbuild.core import locks
from envbuild.core.digests import digest_of, sha256_bytes, short
from envbuild.core.errors import CheckRefusedError, ConfigurationError, EnvbuildError
from envbuild.core.files import machine_errors, remove_tree, replace_tree
from envbuild.core.progress import Reporter
from envbuild.lock import project, record
from envbuild.lock.record import (
    PHASE_FILES,
    Inputs,
    Lock,
    LockDirectory,
    LockedBase,
    LockedComponent,
    LockedPhase,
    LockedTorch,
    read_lock,
)
from envbuild.lock.resolve import Resolution, export, resolve, with_local_hashes
from envbuild.lock.torch_builds import TorchSource, torch_source
from envbuild.lock.uv import uv_version
from envbuild.store.local import LocalStore

# Raised when a lock made from the same inputs would come out differently.
FORMAT = 1


@dataclass(frozen=True)
class LockResult:
    """A lock directory, and whether this call made it."""

    directory: LockDirectory
    built: bool


def lock_path(project_dir: Path, stack: str, base: str) -> Path:
    """Where the lock of a stack on a base is written."""
    return project_dir / "lockfiles" / stack / base


def find_lock(project_dir: Path, stack: str, base: str) -> LockDirectory:
    """The lock of a stack on a base: the project's own, else the one that comes with envbuild.

    Raises:
        ConfigurationError: there is none; says how to make it.
    """
    for root in (project_dir, data_root()):
        path = lock_path(root, stack, base)
        if (path / record.RECORD_FILE).is_file():
            return read_lock(path)
    raise ConfigurationError(
        f"there is no lock of stack {stack} on base {base}",
        why=f"{lock_path(project_dir, stack, base)} does not exist.",
        fix=f"Make it first: envbuild lock --stack {stack} --base {base} --target TARGET",
    )


def inputs_digest(selection: Selection, torch_build: str) -> str:
    """The digest of everything that decides a lock, except the moment."""
    return digest_of(
        {
            "format": FORMAT,
            "stack": definition_digest(selection.stack),
            "base": definition_digest(selection.base),
            "torch_build": torch_build,
            "uv": uv_version(),
        }
    )


def lock_stack(
    selection: Selection,
    *,
    project_dir: Path,
    site: Site,
    store: LocalStore,
    reporter: Reporter,
    torch_build: str | None = None,
    upgrade: bool = False,
) -> LockResult:
    """Lock a stack on a base, unless its lock is there already and nothing that decides it changed.

    Args:
        torch_build: the build of torch to take instead of the base's (``index``: the package index's own).
        upgrade: resolve anew, as of now, even if nothing changed.

    Raises:
        ResolutionError: the stack does not resolve.
        NetworkError: an index, or the place of torch's build, cannot be reached.
    """
    path = lock_path(project_dir, selection.stack_name, selection.base_name)
    build = torch_build or selection.base.torch.build
    inputs = inputs_digest(selection, build)
    with locks.exclusive(
        store.root / "locks" / f"lockfiles-{short(sha256_bytes(str(path.resolve()).encode()))}.lock",
        on_wait=lambda: reporter.note(f"another envbuild is writing {path}: waiting for it"),
    ):
        if not upgrade and (path / record.RECORD_FILE).is_file():
            try:
                current = read_lock(path)
            except (CheckRefusedError, ConfigurationError) as error:
                raise _unreadable(error, path) from error
            if current.lock.inputs.digest == inputs:
                return LockResult(current, built=False)
        with store.staging("lock") as work:
            _resolve_into(work, selection, build, inputs, site, reporter, store.root / "logs" / "lock.log")
            _publish(work, path)
    return LockResult(read_lock(path), built=True)


def _unreadable(error: EnvbuildError, path: Path) -> EnvbuildError:
    error.fix = f"Restore {path} from version control, or replace it: run the same command with --upgrade."
    return error


def _publish(work: Path, path: Path) -> None:
    """Copy the finished files beside the lock and swap the directories."""
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*"):
        remove_tree(leftover)
    with machine_errors(path):
        staged = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new."))
    try:
        with machine_errors(path):
            staged.chmod(0o755)
            for name in (record.RECORD_FILE, "pyproject.toml", "uv.lock", *PHASE_FILES.values()):
                (staged / name).write_bytes((work / name).read_bytes())
        replace_tree(staged, path)
    finally:
        remove_tree(staged)


def _resolve_into(
    work: Path, selection: Selection, build: str, inputs: str, site: Site, reporter: Reporter, log: Path
) -> None:
    stack, base = selection.stack, selection.base
    name = f"{selection.stack_name} on {selection.base_name}"
    what = f"resolve stack {name}"
    with machine_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
    source = TorchSource("package-index", None)
    if "torch" in stack.components:
        with reporter.step(f"find torch's build {build!r}"):
            source = torch_source(site, stack.components["torch"].version, build, base.python.version)
    as_of = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def write(pins: dict[str, str] | None, working: TorchSource | None) -> None:
        text = project.render_project(
            name=selection.stack_name,
            stack=stack,
            base=base,
            torch_build=build,
            as_of=as_of,
            pins=pins,
            source=working,
        )
        with machine_errors(work):
            (work / "pyproject.toml").write_text(text)

    with reporter.step(f"resolve {name}"):
        write(None, source)
        resolution = resolve(work, source, what, log, reporter.update)
        write(dict(resolution.pins), source)
        resolution = resolve(work, source, what, log, reporter.update)
    with reporter.step("write the lock"):
        phases = _write_phases(work, resolution, source, what, log)
        write(dict(resolution.pins), None)
        lock = _record(selection, resolution, source, build, inputs, as_of, phases)
        with machine_errors(work):
            (work / record.RECORD_FILE).write_text(record.render(lock))


def _write_phases(
    work: Path, resolution: Resolution, source: TorchSource, what: str, log: Path
) -> dict[str, LockedPhase]:
    main = export(work, None, what, log)
    both = export(work, "compile", what, log)
    in_main = {block.split("==")[0] for block in main}
    blocks = {
        "main": with_local_hashes(main, resolution, source),
        "compile": with_local_hashes(
            [block for block in both if block.split("==")[0] not in in_main], resolution, source
        ),
        "git": [],
    }
    installs = {
        "main": "uv pip install --no-deps --require-hashes -r main.txt",
        "compile": "uv pip install --no-deps --require-hashes --no-build-isolation -r compile.txt",
        "git": "uv pip install --no-deps --no-build-isolation -r git.txt",
    }
    phases = {}
    for phase, lines in blocks.items():
        text = f"# Written by `envbuild lock`. Phase {phase}: {len(lines)} packages.\n# {installs[phase]}\n"
        text += "".join(f"{line}\n" for line in lines)
        with machine_errors(work):
            (work / PHASE_FILES[phase]).write_text(text)
        phases[phase] = LockedPhase(file=PHASE_FILES[phase], packages=len(lines), digest=sha256_bytes(text.encode()))
    return phases


def _record(
    selection: Selection,
    resolution: Resolution,
    source: TorchSource,
    build: str,
    inputs: str,
    as_of: str,
    phases: dict[str, LockedPhase],
) -> Lock:
    stack, base = selection.stack, selection.base
    torch = LockedTorch(version=resolution.pins.get("torch", ""), build=build, found_in=source.kind)
    components = {
        name: LockedComponent(asked=spec.version, version=resolution.pins[name], phase=spec.phase, modules=spec.modules)
        for name, spec in stack.components.items()
    }
    base_digest = definition_digest(base)
    return Lock(
        schema=record.SCHEMA,
        stack=selection.stack_name,
        digest=record.content_digest(base_digest, torch, components, phases),
        source_date_epoch=resolution.newest_upload,
        inputs=Inputs(
            digest=inputs,
            stack_digest=definition_digest(stack),
            base_digest=base_digest,
            torch_build=build,
            uv=uv_version(),
            as_of=as_of,
        ),
        base=LockedBase(
            name=selection.base_name,
            definition_digest=base_digest,
            distribution=base.distribution,
            release=base.release,
            platform=base.platform,
            glibc=base.glibc,
            python=base.python.version,
        ),
        torch=torch,
        components=components,
        phases=phases,
    )
