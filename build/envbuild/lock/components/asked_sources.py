"""Which of the sources of components a resolution asks for, and those that must not be asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from envbuild.core.errors import EnvbuildError, NetworkError, ResolutionError
from envbuild.lock.components.models import ALWAYS, ANY, BUILD, PROJECT, Chosen, GitSource, GitSources, MissingSource
from envbuild.lock.components.tree_sources import IndexNotConfiguredError
from envbuild.lock.components.upstream import SOURCES
from envbuild.lock.uv_lock import Packages, ResolvedPackage


def where(by: Chosen) -> str:
    folder = f"{by.subdirectory}/" if by.subdirectory else ""
    return f"{folder}{SOURCES} of {by.title}"


def refuse_two(taken: Sequence[GitSource]) -> None:
    """Refuse two commits of one package."""
    first: dict[str, GitSource] = {}
    for source in taken:
        other = first.setdefault(source.name, source)
        if other.identity != source.identity:
            commit = other.chosen.commit
            ref = commit.sha[:12] if commit else "VERSION"
            raise ResolutionError(
                f"{other.by.title} and {source.by.title} take {source.name} from two places",
                why=f"{other.text()}\n{source.text()}",
                fix=f"Say which: --pin {source.name}={ref}, or pin one of the two where it agrees with the other.",
            )


def settle(git_sources: GitSources, packages: Sequence[ResolvedPackage]) -> GitSources:
    """What a resolution really takes, of what might be taken.

    Args:
        packages: of uv.lock.

    Raises:
        ResolutionError: it takes a package that two of its packages want at different commits.
    """
    tables = {package.name: package for package in packages}
    takeable = git_sources.in_force.keys()
    now = git_sources
    while True:
        force = now.in_force
        asked = tuple(
            source
            for source in now.candidates
            if (source.by.name not in takeable or source.by.name in force) and _is_asked(source, force, tables)
        )
        if asked == now.candidates:
            refuse_two(asked)
            return now
        # Again: what was left out just now may have been all that asked for another one.
        now = replace(now, candidates=asked)


def refuse_missing(git_sources: GitSources, packages: Sequence[ResolvedPackage]) -> None:
    """Refuse a resolution that takes a package from the index which upstream takes from a place where it is not.

    Raises:
        NetworkError: it does, and the place cannot be reached now.
        ResolutionError: it does; names the package.
    """
    tables = {package.name: package for package in packages}
    for source in git_sources.missing:
        if _is_asked(source, git_sources.in_force, tables):
            if is_outage(source.error) or source.barred:
                raise named_source_error(source.error, source.name, source.by, source.place)
            raise ResolutionError(
                f"{source.name} cannot be taken from where {source.by.title} takes it",
                why=words_of(source),
                fix=source.error.fix,
            ).about(source.name)


def is_outage(error: EnvbuildError) -> bool:
    """Whether a source may be there again soon: another version of the package is no answer to that."""
    return isinstance(error, NetworkError) and not error.gone


def refuse_barred(git_sources: GitSources, packages: Collection[str]) -> None:
    """Refuse to go on where one of these packages is asked for, and its index is not configured.

    Raises:
        IndexNotConfiguredError: it is.
    """
    for source in git_sources.missing:
        if source.barred and source.name in packages:
            raise source.error


def named_source_error(error: EnvbuildError, package: str, by: Chosen, place: str) -> EnvbuildError:
    if isinstance(error, IndexNotConfiguredError):
        return error
    return error.with_context(
        why=f"{where(by)} takes {package} from {place}.\n{error.why}",
        fix=f"{error.fix}\nOr say which {package} to take instead: --pin {package}=VERSION --name NAME".lstrip(),
    )


def words_of(source: MissingSource) -> str:
    """Why a source cannot be had, for people."""
    return (
        f"{where(source.by)} takes {source.name} from {source.place}.\n{source.error.what}\n{source.error.why}".rstrip()
    )


def _is_asked(source: GitSource | MissingSource, force: Mapping[str, GitSource], tables: Packages) -> bool:
    table = tables.get(source.by.name)
    other = force.get(source.by.name)
    if table is None or source.name not in tables:
        return False
    if other is not None and other.chosen.commit != source.by.commit:
        return False  # of a commit that is not in the lock
    # uv.lock does not list with a package what builds it, nor what the project requires.
    if source.parts & {BUILD, PROJECT}:
        return True
    lists = {ALWAYS: table.dependencies, **table.optional_dependencies}
    parts = lists if ANY in source.parts else source.parts
    return any(dependency.name == source.name for part in parts for dependency in lists.get(part, ()))
