"""The wheels of a project's own packages: built from its files, and part of the lock."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename

from envbuild.core.digests import sha256_file
from envbuild.core.errors import ConfigurationError
from envbuild.core.files import machine_errors
from envbuild.core.process import answer, find_tool
from envbuild.lock.context import LockContext
from envbuild.lock.lockfile import PROJECT_FILE, WHEELS
from envbuild.lock.requirement_lines import PinnedRequirement
from envbuild.lock.uv.interpreter import behind_a_shim
from envbuild.lock.uv.program import run_uv
from envbuild.lock.uv_lock import ResolvedPackage
from envbuild.lock.uv_project.exported import folder_of
from envbuild.lock.uv_project.tree import ProjectTree


@dataclass(frozen=True)
class OwnWheel:
    """A wheel of a project's own package, in the lock's folder of wheels."""

    package: ResolvedPackage
    file: Path

    @property
    def requirement(self) -> PinnedRequirement:
        """What pins it."""
        version, digest = str(parse_wheel_filename(self.file.name)[1]), sha256_file(self.file)
        name = self.package.name
        return PinnedRequirement(
            name=name,
            version=version,
            commit=None,
            hashes=frozenset([digest]),
            needed_by=(),
            text=f"{name}=={version} \\\n    --hash={digest}",
        )


def own_wheel(package: ResolvedPackage, tree: ProjectTree, python: str, context: LockContext) -> OwnWheel:
    """Build a package of the project, or take the wheel that it is.

    Args:
        python: the version that the wheel is for.

    Raises:
        ConfigurationError: it is outside of the repository, or not there.
        ResolutionError: it does not build.
    """
    place = folder_of(package, tree)
    _refuse_elsewhere(package, place, tree)
    wheels = context.folder / WHEELS
    with machine_errors(wheels):
        wheels.mkdir(exist_ok=True)
        if place.suffix == ".whl":
            return OwnWheel(package, Path(shutil.copy(place, wheels)))
    # Its build writes next to its sources: build/, *.egg-info.
    copy = context.folder / "sources" / package.name
    _copy(tree, copy)
    sources = copy / place.relative_to(tree.top)
    built = context.folder / "built" / package.name
    stamp = tree.commit.committed_at.timestamp() if tree.commit and tree.commit.committed_at else 0
    with context.reporter.step(f"build {package.title} of the project"):
        run_uv(
            ["build", "--wheel", "--out-dir", built, "--python", behind_a_shim(python) or python, sources],
            what=f"build {package.title} of {tree.title}",
            log=context.log,
            cwd=copy,
            on_line=context.reporter.update,
            # What zip files and compilers state as the time.
            variables={"SOURCE_DATE_EPOCH": str(int(stamp))} if stamp else {},
        )
    (wheel,) = built.glob("*.whl")
    with machine_errors(wheels):
        return OwnWheel(package, Path(shutil.move(wheel, wheels / wheel.name)))


def _refuse_elsewhere(package: ResolvedPackage, place: Path, tree: ProjectTree) -> None:
    if not place.is_relative_to(tree.top):
        raise ConfigurationError(
            f"{package.name} is outside of the repository of {tree.title}",
            why=f"Its source is {place}, and the repository is {tree.top}: no commit says what was built.",
            fix="Move it into the repository, make it a submodule, or take it from git or an index.",
        )
    if not place.exists() or (place.is_dir() and not (place / PROJECT_FILE).exists() and not any(place.iterdir())):
        raise ConfigurationError(
            f"{package.name} of {tree.title} is not there",
            why=f"{place} is empty or missing: a submodule that is not checked out, say.",
            fix="Check it out: git submodule update --init --recursive",
        )


def _copy(tree: ProjectTree, into: Path) -> None:
    """Copy the files of the project's repository that git knows or would add; of a project in none, all."""
    if into.exists():
        return
    with machine_errors(into):
        if tree.commit is None:
            shutil.copytree(tree.top, into, symlinks=True, ignore=shutil.ignore_patterns(".venv", "__pycache__"))
            return
        for name in _files(tree.top):
            source, target = tree.top / name, into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            elif source.exists() or source.is_symlink():
                shutil.copy2(source, target, follow_symlinks=False)


def _files(top: Path) -> list[str]:
    words = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = answer([find_tool("git", "git"), "-C", top, *words], what=f"list the files of {top}")
    return [name for name in listed.split("\0") if name]
