"""``envbuild export``: a lock in the formats that other tools read, held to the lock's own versions and hashes.

uv writes pylock.toml and CycloneDX. The lock's files are what it starts from, since uv.lock is not committed: it names
the index of whoever locked.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.catalog.fields import MACHINES
from envbuild.catalog.stack import Phase
from envbuild.core import tomlread
from envbuild.core.errors import CheckRefusedError, ResolutionError, UsageError
from envbuild.lock.context import LockContext, run_context, work_folder
from envbuild.lock.lockfile import PHASE_FILES, PROJECT_FILE, UV_LOCK, WHEELS, LockDirectory, snapshot
from envbuild.lock.project.pyproject import with_indexes
from envbuild.lock.record.content import (
    Content,
    locked_content,
    normalized,
    of_cyclonedx,
    of_pylock,
    of_uv_lock,
    packages_by_index,
)
from envbuild.lock.requirement_lines import without_packages
from envbuild.lock.uv.program import run_uv
from envbuild.lock.uv.resolution import PREVIEW, lock_arguments, resolve_without_interpreter, written_lock
from envbuild.lock.uv.torch_builds import TorchSource, locked_torch
from envbuild.lock.uv_lock import parse_uv_lock

# The glibc versions that uv 0.13 has a platform for.
_PLATFORMS_OF_UV = (17, 28, *range(31, 41))
_TABLE = "[[packages]]\n"


class Format(str, Enum):
    """What a lock can be written as."""

    REQUIREMENTS = "requirements"
    PYLOCK = "pylock"
    CYCLONEDX = "cyclonedx"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A lock in another format.

    Attributes:
        notes: what the reader of the file has to know, for people.
    """

    text: str
    packages: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Export:
    """One export: a private copy of the lock, and what uv needs to work on it."""

    lock: LockDirectory
    phases: tuple[str, ...]
    context: LockContext

    @property
    def folder(self) -> Path:
        return self.lock.path

    def source(self) -> TorchSource:
        return locked_torch(self.context.site, self.lock.lock)

    @property
    def what(self) -> str:
        return f"export the lock of stack {self.lock.lock.stack} on {self.lock.lock.base.name}"

    def uv(self, arguments: Sequence[str | Path]) -> None:
        run_uv(arguments, what=self.what, log=self.context.log, cwd=self.folder, on_line=self.context.reporter.update)


def export_lock(lock: LockDirectory, kind: Format, phases: Collection[str], context: Context) -> Exported:
    """Write ``lock``'s ``phases`` as ``kind``.

    Raises:
        UsageError: ``phases`` names none of the lock's, or what is not one.
        CheckRefusedError: what came out is not what is locked.
        NetworkError: an index, a repository, or the place of torch's build cannot be reached.
        ResolutionError: the index does not have what is locked any more.
    """
    chosen = tuple(phase for phase in PHASE_FILES if phase in phases and lock.file(phase))
    if not chosen or not set(phases) <= set(PHASE_FILES):
        filled = [phase for phase in PHASE_FILES if lock.file(phase)]
        raise UsageError(
            f"phases {', '.join(phases) or 'none'} cannot be exported",
            why=f"The phases of a lock are {', '.join(PHASE_FILES)}; this one has packages in {', '.join(filled)}.",
            fix=f"Name some of them: --phases {','.join(filled)}",
        )
    if kind is Format.REQUIREMENTS:
        return _requirements(lock, chosen)
    label = f"export-{lock.lock.stack}-{lock.lock.base.name}"
    with work_folder(run_context(context), "export", label) as work, context.reporter.step(f"export as {kind.value}"):
        copy = snapshot(lock, work.folder / "lock")
        export = _Export(lock=copy, phases=chosen, context=work)
        return _pylock(export) if kind is Format.PYLOCK else _cyclonedx(export, lock.path / UV_LOCK)


def _title(lock: LockDirectory, phases: Sequence[str]) -> str:
    record = lock.lock
    return f"`envbuild export`: stack {record.stack} on {record.base.name}, phases {', '.join(phases)}, {record.digest}"


def _requirements(lock: LockDirectory, phases: Sequence[str]) -> Exported:
    """The phase files in one; host-free, as they are."""
    files = [file for phase in phases if (file := lock.file(phase))]
    lines = [line for file in files for line in file.read_text().splitlines() if not line.startswith("#")]
    command = ["uv pip install --no-deps", *([f"--find-links {WHEELS}"] if lock.lock.wheels else [])]
    if phases == ("main",) or set(phases) <= {"main", "compile"}:
        command.append("--require-hashes")  # what comes from git has none
    isolated = {*locked_content(lock, ("git",))} - {*lock.shared_builds} if lock.builds else set()
    later = (name for phase in phases if phase != "main" for name in locked_content(lock, (phase,)))
    shared = sorted({*later} - isolated)
    command += [f"--no-build-isolation-package {name}" for name in shared]
    usage = textwrap.wrap(" ".join([*command, "-r FILE"]), width=116, break_on_hyphens=False, break_long_words=False)
    header = [f"# {_title(lock, phases)}", *[f"#   {line}" for line in usage]]
    return Exported(text="\n".join([*header, *lines, ""]), packages=len(locked_content(lock, phases)))


def _pylock(export: _Export) -> Exported:
    """PEP 751, from the lock's own hashed requirements: no uv.lock is needed, and nothing is resolved."""
    source, base = export.source(), export.lock.lock.base
    wanted = locked_content(export.lock, export.phases)
    # The newest platform that the base still has. Before 2.17 (manylinux2014) uv knows none.
    glibc = max(minor for minor in _PLATFORMS_OF_UV if minor <= max(17, int(base.glibc.split(".")[1])))
    # PEP 751 asks for a hash of every file. --no-deps: the phase files name every package already.
    arguments: list[str | Path] = ["pip", "compile", "--format", "pylock.toml", "--no-deps", "--generate-hashes"]
    # Nothing is built: any Python does.
    arguments += ["--no-header", "--python-version", base.python, "--python", sys.executable]
    arguments += ["--python-platform", f"{MACHINES[base.platform]}-manylinux_2_{glibc}"]
    written: list[str] = []
    # Each index about its own packages alone: uv would ask all of them, and take the first that has a name.
    for index, files in _requirements_by_index(export).items():
        file = export.folder / f"pylock.{len(written)}.toml"
        export.uv([*arguments, *source.args_for(index), "--output-file", file, *files])
        written.append(file.read_text())
    # A wheel of the lock's own is named from the lock's folder.
    joined = _joined(written).replace(f'"{export.folder.absolute()}/{WHEELS}/', f'"{WHEELS}/')
    text = f"# {_title(export.lock, export.phases)}\n{joined}"
    _compare(export, "the pylock.toml that uv wrote", of_pylock(text), wanted)
    notes = ["pylock.toml names the package indexes that it was made with, in the address of every file"]
    if source.kind == "find-links":
        notes.append(f"torch {export.lock.lock.torch.version} is named by the place where this machine found it")
    if set(export.phases) != {"main"}:
        notes.append("what compiles against torch needs it installed first, and --no-build-isolation: see the docs")
    return Exported(text=text, packages=len(wanted), notes=tuple(notes))


def _requirements_by_index(export: _Export) -> dict[str, list[Path]]:
    """The requirement files of each index that packages are locked from; those of all others under an empty name."""
    listed: dict[str, list[Path]] = {}
    own = export.lock.own_wheels
    for phase in export.phases:
        path, every = export.folder / PHASE_FILES[phase], packages_by_index(export.lock, phase)
        if phase == Phase.MAIN.value and own:
            # As files: an index may have another package of that name.
            text = without_packages(path.read_text(), own)
            path.write_text(text + "".join(f"{name} @ {wheel.as_uri()}\n" for name, wheel in own.items()))
        for index, packages in every.items():
            if others := {name for other in every.values() for name in other - packages}:
                file = export.folder / f"{len(listed)}-{path.name}"
                file.write_text(without_packages(path.read_text(), others))
            if packages:
                listed.setdefault(index, []).append(file if others else path)
    return listed


def _joined(written: Sequence[str]) -> str:
    """The packages of several pylock.toml by name, as uv writes one."""
    head = written[0].split(_TABLE)[0]
    tables = [table.rstrip("\n") for text in written for table in text.split(_TABLE)[1:]]
    tables.sort(key=lambda table: str(tomlread.loads(_TABLE + table)["packages"][0]["name"]))
    return "\n".join([head.rstrip("\n"), *(f"\n{_TABLE}{table}" for table in tables), ""])


def _holds(uv_lock: str, wanted: Content) -> bool:
    """Whether a uv.lock, which nobody has reviewed, has just these packages."""
    try:
        return not _differences(of_uv_lock(parse_uv_lock(uv_lock)), wanted)
    except ValueError:
        return False


def _cyclonedx(export: _Export, existing: Path) -> Exported:
    """CycloneDX 1.5 with the dependency graph, which only a uv.lock has: the one that is there, or one made anew."""
    everything = locked_content(export.lock, PHASE_FILES)
    wanted = locked_content(export.lock, export.phases)
    uv_lock = export.folder / UV_LOCK
    if existing.is_file() and _holds(existing.read_text(), everything):
        uv_lock.write_bytes(existing.read_bytes())
    else:
        _lock_again(export)
        _compare(export, "the uv.lock that was made anew", of_uv_lock(written_lock(export.folder)), everything)
    file = export.folder / "bom.json"
    # CycloneDX is a preview of uv 0.13 too; the option takes several of them with a comma.
    arguments: list[str | Path] = ["export", PREVIEW[0], f"{PREVIEW[1]},sbom-export", "--frozen", "--quiet"]
    arguments += ["--format", "cyclonedx1.5", "--no-emit-project", "--extra", "compile", "--output-file", file]
    # uv knows no phases: what belongs to another one is left out by name.
    for name in sorted(set(everything) - set(wanted)):
        arguments += ["--no-emit-package", name]
    export.uv(arguments)
    text = normalized(file.read_text(), export.lock.lock, export.phases, wanted)
    _compare(export, "the CycloneDX document that uv wrote", of_cyclonedx(text), wanted)
    return Exported(text=text, packages=len(wanted))


def _lock_again(export: _Export) -> None:
    """``uv lock`` of the lock's own project, whose constraints leave nothing to choose."""
    source = export.source()
    project = export.folder / PROJECT_FILE
    project.write_text(with_indexes(project.read_text(), source))
    text = (export.folder / PROJECT_FILE).read_text()
    try:
        # Every version is pinned: with any Python uv writes the same.
        resolve_without_interpreter(text, export.folder, source, export.what, export.context)
    except ResolutionError:
        (export.folder / PROJECT_FILE).write_text(text)
        export.uv(lock_arguments(source))  # a commit that only builds with the base's Python


def _compare(export: _Export, which: str, written: Content, wanted: Content) -> None:
    if problems := _differences(written, wanted):
        raise CheckRefusedError(
            f"cannot {export.what}: {which} is not what is locked",
            why="\n".join(problems),
            fix="The index serves other files under these names than when the lock was made. Find out who changed "
            "them, or lock again with --upgrade.",
            log=export.context.log,
        )


def _differences(written: Content, wanted: Content) -> list[str]:
    """Where what was written has other packages, versions or commits, or files that the lock does not know."""
    problems = [f"{name} is missing" for name in wanted if name not in written]
    for name, package in written.items():
        locked = wanted.get(name)
        if locked is None:
            problems.append(f"{name} {package.version} is not in the lock")
        elif package.commit != locked.commit or (package.version != locked.version and locked.commit is None):
            problems.append(f"{name}: {package.commit or package.version} instead of {locked.commit or locked.version}")
        elif strange := package.hashes - locked.hashes:
            problems.append(f"{name} {package.version}: a file with {min(strange)}, which the lock does not have")
        elif locked.hashes and not package.hashes and not package.local:
            problems.append(f"{name} {package.version}: none of its files has a hash")
    return problems
