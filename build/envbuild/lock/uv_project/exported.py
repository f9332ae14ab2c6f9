"""What `uv export` says that a project installs: pinned requirements, and folders and files of its own."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from envbuild.catalog.base import Base
from envbuild.core.errors import ConfigurationError, EnvbuildError, ResolutionError
from envbuild.core.files import machine_errors
from envbuild.core.text import quoted_command
from envbuild.lock.components.upstream import holds_on
from envbuild.lock.context import LockContext
from envbuild.lock.lockfile import UV_LOCK
from envbuild.lock.requirement_lines import PinnedRequirement, read_requirements
from envbuild.lock.uv.interpreter import behind_a_shim
from envbuild.lock.uv.program import run_uv
from envbuild.lock.uv.resolution import PREVIEW
from envbuild.lock.uv_lock import ResolvedPackage, UvLock, parse_uv_lock
from envbuild.lock.uv_project.tree import ProjectTree

# `-e ./packages/core`, `./other ; marker`: a folder or a file of the project.
_LOCAL = re.compile(r"^(?:-e )?(?P<path>\.{1,2}(?:/\S*)?|/\S+|file:\S+)(?: ; (?P<marker>[^\\\n]+))?", re.MULTILINE)

_LOCAL_KINDS = ("editable", "directory", "path")


@dataclass(frozen=True, kw_only=True)
class ProjectPackages:
    """What a project installs on a base.

    Attributes:
        uv_lock: with the installed packages alone.
        requirements: what is taken from indexes, repositories and addresses.
        local: what is in folders and files of the project.
    """

    uv_lock: UvLock
    requirements: tuple[PinnedRequirement, ...]
    local: tuple[ResolvedPackage, ...]


def project_packages(tree: ProjectTree, base: Base, context: LockContext) -> ProjectPackages:
    """The packages that ``uv sync --locked`` installs of a project on a base, with its extras and groups.

    Raises:
        ConfigurationError: uv.lock does not match pyproject.toml, is for other Pythons or platforms than the base's, or
            the extras exclude each other.
    """
    uv_lock = read_uv_lock(tree)
    _refuse_other_platform(tree, uv_lock, base)
    _refuse_missing(tree, uv_lock)
    text = _export(tree, uv_lock, base, context)
    requirements = tuple(line for line in read_requirements(text) if holds_on(_marker(line), base))
    local = tuple(
        _local_package(match["path"], uv_lock, tree)
        for match in _LOCAL.finditer(text)
        if holds_on((match["marker"] or "").strip(), base)
    )
    packages = [*(_package(line, uv_lock, base) for line in requirements), *local]
    return ProjectPackages(
        uv_lock=uv_lock.model_copy(update={"packages": tuple(sorted(packages, key=lambda package: package.name))}),
        requirements=tuple(replace(line, text=_without_local_lines(line.text)) for line in requirements),
        local=local,
    )


def read_uv_lock(tree: ProjectTree) -> UvLock:
    """The project's uv.lock.

    Raises:
        ConfigurationError: it cannot be understood.
    """
    file = tree.folder / UV_LOCK
    with machine_errors(file, "read"):
        text = file.read_text()
    try:
        return parse_uv_lock(text)
    except ValueError as error:
        raise ConfigurationError(
            f"cannot understand {file}",
            why=str(error),
            fix="Restore it from version control, or write it anew: uv lock",
        ) from error


def python_is_for(uv_lock: UvLock, base: Base) -> bool:
    """Whether a uv.lock is for a base's Python."""
    wanted, python = SpecifierSet(uv_lock.requires_python), base.python.version
    # A base names no patch release of its Python.
    return wanted.contains(f"{python}.0") or wanted.contains(f"{python}.99")


def _refuse_other_platform(tree: ProjectTree, uv_lock: UvLock, base: Base) -> None:
    python, wanted = base.python.version, uv_lock.requires_python
    if not python_is_for(uv_lock, base):
        raise ConfigurationError(
            f"{tree.title} is not for the base's Python",
            why=f"Its {UV_LOCK} is for Python {wanted}, and the base has {python}.",
            fix="Take a base with such a Python: envbuild list bases",
        )
    markers = uv_lock.supported_markers
    if markers and not any(holds_on(marker, base) for marker in markers):
        raise ConfigurationError(
            f"{tree.title} is not for the base's platform",
            why=f"Its {UV_LOCK} is for: {'; '.join(markers)}.",
            fix="Add the base's platform to [tool.uv] environments of the project, and run uv lock.",
        )


def _refuse_missing(tree: ProjectTree, uv_lock: UvLock) -> None:
    for package in uv_lock.packages:
        place = folder_of(package, tree) if {*_LOCAL_KINDS} & package.source.keys() else tree.folder
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            raise ConfigurationError(
                f"{package.name} of {tree.title} is not there",
                why=f"{place} is empty or missing: a submodule that is not checked out, say.",
                fix="Check it out: git submodule update --init --recursive",
            )


def _export(tree: ProjectTree, uv_lock: UvLock, base: Base, context: LockContext) -> str:
    definition = tree.definition
    words = [word for extra in definition.extras for word in ("--extra", extra)]
    words += [word for group in definition.groups for word in ("--group", group)]
    arguments = ["export", *PREVIEW, "--locked", "--offline", "--format", "requirements.txt", "--no-header", "--quiet"]
    arguments += words

    def export(*, own_indexes: bool) -> str:
        return run_uv(
            arguments,
            what=f"export {tree.title}",
            log=context.log,
            cwd=tree.folder,
            own_indexes=own_indexes,
            variables={"UV_PYTHON": _python(uv_lock, base)},
        ).output

    # A uv.lock that matches is known to without a network. With a mirror among the user's own settings uv 0.13.8 takes
    # one that names the index itself for old, and resolves; one that was made with the mirror is old without it.
    try:
        return export(own_indexes=False)
    except EnvbuildError as error:
        with contextlib.suppress(EnvbuildError):
            return export(own_indexes=True)
        raise _not_exported(tree, error, words) from error


def _not_exported(tree: ProjectTree, error: EnvbuildError, words: Sequence[str]) -> EnvbuildError:
    if "incompatible with the declared conflicts" in error.why or "is not defined in" in error.why:
        return ConfigurationError(
            f"{tree.title} cannot be installed with {quoted_command(*words)}",
            why=error.why,
            fix="Name extras and groups that the project has and that go together.",
            log=error.log,
        )
    if not isinstance(error, ResolutionError) and "--offline" not in error.why and "network" not in error.why:
        return error
    return ConfigurationError(
        f"{UV_LOCK} of {tree.title} does not match its pyproject.toml",
        why=error.why,
        fix=f"Run `uv lock` in {tree.folder} and commit what it writes.",
        log=error.log,
    )


def _python(uv_lock: UvLock, base: Base) -> str:
    """A Python that uv may run: an export is the same with each that the project is for."""
    own = ".".join(map(str, sys.version_info[:3]))
    if SpecifierSet(uv_lock.requires_python).contains(own):
        return sys.executable
    return str(behind_a_shim(base.python.version) or base.python.version)


def _marker(line: PinnedRequirement) -> str:
    return str(Requirement(line.text.split("\n")[0].rstrip(" \\")).marker or "")


def _without_local_lines(text: str) -> str:
    # A block of lines ends where the next name begins, and a path begins with none.
    return "\n".join(line for line in text.split("\n") if line[:1].isspace() or line[:1].isalnum())


def _package(line: PinnedRequirement, uv_lock: UvLock, base: Base) -> ResolvedPackage:
    """The package of uv.lock that a requirement pins."""
    named = [package for package in uv_lock.packages if package.name == line.name]
    fitting = [package for package in named if _is_pinned_by(package, line)]
    # Of two from different indexes, the one for the base.
    for package in fitting:
        if not package.resolution_markers or any(holds_on(marker, base) for marker in package.resolution_markers):
            return package
    return fitting[0]


def _is_pinned_by(package: ResolvedPackage, line: PinnedRequirement) -> bool:
    if line.commit is not None:
        return package.source.get("git", "").endswith(f"#{line.commit}")
    if line.version:
        return package.version == line.version and "git" not in package.source
    return "url" in package.source


def _local_package(path: str, uv_lock: UvLock, tree: ProjectTree) -> ResolvedPackage:
    wanted = (tree.folder / path.removeprefix("file://")).resolve()
    for package in uv_lock.packages:
        for kind in _LOCAL_KINDS:
            if kind in package.source and (tree.folder / package.source[kind]).resolve() == wanted:
                return package
    raise ConfigurationError(
        f"{UV_LOCK} of {tree.title} has no package in {path}",
        why="`uv export` names it.",
        fix="Write it anew: uv lock",
    )


def folder_of(package: ResolvedPackage, tree: ProjectTree) -> Path:
    """The folder, or file, that a local package is in."""
    return next((tree.folder / path).resolve() for kind, path in package.source.items() if kind != "subdirectory")
