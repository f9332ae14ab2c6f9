"""The wheels of a project's own packages: built from its files, and part of the lock."""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from packaging.utils import parse_wheel_filename

from envbuild.core.digests import digest_of, sha256_file
from envbuild.core.errors import ConfigurationError, ResolutionError
from envbuild.core.files import machine_errors
from envbuild.core.process import answer, find_tool
from envbuild.lock.context import LockContext
from envbuild.lock.lockfile import WHEELS
from envbuild.lock.requirement_lines import PinnedRequirement
from envbuild.lock.uv.interpreter import behind_a_shim
from envbuild.lock.uv.named_index import named_indexes
from envbuild.lock.uv.program import run_uv, uv_version
from envbuild.lock.uv_lock import LockedFile, ResolvedPackage
from envbuild.lock.uv_project.exported import folder_of
from envbuild.lock.uv_project.tree import ProjectTree

KIND = "project-wheels"
_NOT_IMPORTED = frozenset({"tests", "test", "docs", "examples", "benchmarks", "scripts", "tools", "conftest", "setup"})


@dataclass(frozen=True)
class OwnWheel:
    """A wheel of a project's own package, in the lock's folder of wheels."""

    package: ResolvedPackage
    file: Path

    @cached_property
    def digest(self) -> str:
        return sha256_file(self.file)

    @property
    def version(self) -> str:
        return str(parse_wheel_filename(self.file.name)[1])

    @property
    def modules(self) -> tuple[str, ...]:
        """What it has at the top: packages and modules, but for what is not meant to be imported."""
        with zipfile.ZipFile(self.file) as wheel:
            names = [PurePosixPath(name) for name in wheel.namelist()]
        packages = {name.parts[0] for name in names if len(name.parts) == 2 and name.name == "__init__.py"}
        modules = {name.stem for name in names if len(name.parts) == 1 and name.suffix == ".py"}
        return tuple(sorted(name for name in packages | modules if name.isidentifier() and name not in _NOT_IMPORTED))

    @property
    def requirement(self) -> PinnedRequirement:
        """What pins it."""
        return PinnedRequirement(
            name=self.package.name,
            version=self.version,
            commit=None,
            hashes=frozenset([self.digest]),
            needed_by=(),
            text=f"{self.package.name}=={self.version} \\\n    --hash={self.digest}",
        )

    @property
    def locked(self) -> ResolvedPackage:
        """The package as uv.lock would have it of the wheel."""
        path = f"{WHEELS}/{self.file.name}"
        file = LockedFile.model_validate({"path": path, "hash": self.digest, "size": self.file.stat().st_size})
        as_wheel = {"version": self.version, "source": {"path": path}, "wheels": (file,), "sdist": None}
        return self.package.model_copy(update=as_wheel)


def own_wheel(package: ResolvedPackage, tree: ProjectTree, python: str, context: LockContext) -> OwnWheel:
    """Build a package of the project, or take the wheel that it is.

    Args:
        python: the version that the wheel is for.

    Raises:
        ConfigurationError: it is outside of the repository.
        ResolutionError: it does not build.
    """
    place = folder_of(package, tree)
    _refuse_elsewhere(package, place, tree)
    wheels = context.folder / WHEELS
    with machine_errors(wheels):
        wheels.mkdir(exist_ok=True)
        if place.suffix == ".whl":
            return OwnWheel(package, Path(shutil.copy(place, wheels)))
    if tree.commit is None or tree.changed:
        built = context.folder / "built" / package.name
        _build(package, place, tree, python, context, built)
    else:
        parts = {"commit": tree.commit.sha, "package": package.name, "python": python, "uv": uv_version()}
        key = digest_of({**parts, "place": str(place.relative_to(tree.top))})
        entry = context.store.get_or_build(
            KIND, key, lambda folder: _build(package, place, tree, python, context, folder / WHEELS)
        )
        context.store.use(KIND, key)
        built = entry.path / WHEELS
    (wheel,) = built.glob("*.whl")
    with machine_errors(wheels):
        return OwnWheel(package, Path(shutil.copy(wheel, wheels)))


def _build(
    package: ResolvedPackage, place: Path, tree: ProjectTree, python: str, context: LockContext, into: Path
) -> None:
    """Build a wheel into a folder."""
    top = tree.top
    if not tree.is_copy:
        # A build writes next to its sources: build/, *.egg-info.
        top = context.folder / "sources" / package.name
        _copy(tree, top)
    sources = top / place.relative_to(tree.top)
    # What builds it is taken from the project's indexes, too, of which the site may have mirrors.
    indexes = named_indexes({name: url for name, url in context.site.indexes.items() if name in tree.indexes})
    mirrors = [word for index in indexes for word in ("--index", index.argument)]
    stamp = int(tree.commit.committed_at.timestamp()) if tree.commit else 0
    step = context.reporter.step(f"build {package.title} of the project")
    with step, _own_build(tree, place):
        run_uv(
            ["build", "--wheel", "--out-dir", into, "--python", behind_a_shim(python) or python, *mirrors, sources],
            what=f"build {package.title} of {tree.title}",
            log=context.log,
            cwd=top,
            on_line=context.reporter.update,
            # What zip files and compilers state as the time.
            variables={"SOURCE_DATE_EPOCH": str(stamp)} if stamp else {},
        )


@contextlib.contextmanager
def _own_build(tree: ProjectTree, place: Path) -> Iterator[None]:
    try:
        yield
    except ResolutionError as error:
        # What helps with other people's packages, another release or date, does not help with one's own.
        where = f"{place.relative_to(tree.top)} of {tree.git}" if tree.is_copy else place
        raise error.with_context(fix=f"Correct it: `uv build --wheel` in {where} must succeed.") from error


def _refuse_elsewhere(package: ResolvedPackage, place: Path, tree: ProjectTree) -> None:
    if not place.is_relative_to(tree.top):
        raise ConfigurationError(
            f"{package.name} is outside of the repository of {tree.title}",
            why=f"Its source is {place}, and the repository is {tree.top}: no commit says what was built.",
            fix="Move it into the repository, make it a submodule, or take it from git or an index.",
        )


def _copy(tree: ProjectTree, into: Path) -> None:
    """Copy the files of the project's repository that git knows or would add; of a project in none, all."""
    if into.exists():
        return
    with machine_errors(into):
        if tree.commit is None:
            shutil.copytree(tree.top, into, symlinks=True, ignore=lambda folder, names: _left_out(tree, folder, names))
            return
        for name in _files(tree):
            source, target = tree.top / name, into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            elif source.exists() or source.is_symlink():
                shutil.copy2(source, target, follow_symlinks=False)


def _left_out(tree: ProjectTree, folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name in (".venv", "__pycache__") or Path(folder, name) in tree.ours]


def _files(tree: ProjectTree) -> list[str]:
    words = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = answer([find_tool("git", "git"), "-C", tree.top, *words], what=f"list the files of {tree.top}")
    # setuptools refuses a project with several folders that could be its package, as envs/ could.
    return [name for name in listed.split("\0") if name and not {*(tree.top / name).parents} & {*tree.ours}]
