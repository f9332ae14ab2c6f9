"""What a component's tree says of its sources: its own pyproject.toml and its workspace's, and places in the tree."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from packaging.utils import canonicalize_name

from envbuild.catalog.site import index_variable
from envbuild.core.errors import ConfigurationError
from envbuild.core.exit_status import mask
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.project_metadata import (
    PYPROJECT,
    UvSource,
    project_table,
    uv_settings,
)
from envbuild.lock.components.tree import Tree

_PROJECT_FILES = (PYPROJECT, "setup.py")


class IndexNotConfiguredError(ConfigurationError):
    """A component takes a package from an index of which the site does not say where it is."""


def sources_of(tree: Tree) -> tuple[UvSource, ...]:
    """The sources of a component from git, as uv reads them; paths count from the top of the tree.

    Raises:
        ValueError: a pyproject.toml has another form.
    """
    own, top, folder = uv_settings(tree.pyproject()), uv_settings(tree.top(PYPROJECT)), tree.component.subdirectory
    if not folder or not top.is_workspace:
        return tuple(_from_top(source, folder) for source in own.sources())
    # A member of a workspace has the indexes of the workspace, and its sources where it has none itself.
    sources = [_from_top(source, folder) for source in own.sources(top)]
    named = {source.package for source in sources}
    return (*sources, *(_from_top(source, "") for source in top.sources() if source.package not in named))


def _from_top(source: UvSource, folder: str) -> UvSource:
    return replace(source, path=posixpath.normpath(posixpath.join(folder, source.path))) if source.path else source


def folder_of(source: UvSource, tree: Tree) -> str:
    """The folder of the component's tree that a source means; empty for its top.

    Raises:
        ConfigurationError: the tree does not have it.
    """
    for folder in _members(tree) if source.workspace else [source.path]:
        place = "" if folder == "." else folder
        files = [tree.top(posixpath.join(place, name)) for name in _PROJECT_FILES]
        name = canonicalize_name(project_table(files[0] or "").name) if source.workspace else source.package
        if any(files) and name == source.package:
            return place
    raise ConfigurationError(
        f"{tree.component.title} has no project of {source.package} in its tree",
        why=f"It takes it from {source.text}, which is outside of the commit, in a submodule, or not there.",
        fix=f"Say which to take instead: --pin {source.package}=VERSION --name NAME, or make it a component of the "
        "stack.",
    )


def _members(tree: Tree) -> Iterator[str]:
    """The folders of a workspace's members, its top among them."""
    patterns = uv_settings(tree.top(PYPROJECT)).members
    yield "."
    for pattern in patterns:
        folders = [""]
        for word in posixpath.normpath(pattern).split("/"):
            folders = [
                posixpath.join(folder, name)
                for folder in folders
                for name in tree.repository.list_tree(tree.commit, folder)
                if fnmatchcase(name, word)
            ]
        yield from folders


def configured_index(source: UvSource, by: Chosen, indexes: Mapping[str, str]) -> str:
    """The name of a source's index, which the site has an address of.

    Args:
        indexes: addresses by name.

    Raises:
        IndexNotConfiguredError: the site has none.
    """
    if source.index in indexes:
        return source.index
    declared = mask(source.index_url)
    raise IndexNotConfiguredError(
        f"{by.title} takes {source.package} from index {source.index!r}, and the site's configuration does not name it",
        why=(f"Its {PYPROJECT} declares it as {declared}." if declared else f"Its {PYPROJECT} does not declare it.")
        + f" On another index {source.package} may be another package.",
        fix="Write into the configuration file where it is, or where a mirror of it is:\n"
        f'[indexes]\n{source.index} = "{declared or "URL"}"',
    )


def refuse_two_addresses(declared: dict[str, tuple[str, Chosen]], source: UvSource, by: Chosen) -> None:
    """Note the address of a source's index; one name cannot mean two.

    Raises:
        ConfigurationError: another component has another index of that name.
    """
    if not source.index or not source.index_url:
        return
    # Names that differ in case or punctuation share the variables of a password.
    url, other = declared.setdefault(index_variable(source.index), (source.index_url, by))
    if url.rstrip("/") != source.index_url.rstrip("/"):
        raise ConfigurationError(
            f"{other.title} and {by.title} have two indexes of the name {source.index!r}",
            why=f"{mask(url)} and {mask(source.index_url)}. A lock and the site's configuration have indexes by name.",
            fix=f"Take another commit of one of them, or give {source.package} a version of its own: "
            f"--pin {source.package}=VERSION --name NAME",
        )
