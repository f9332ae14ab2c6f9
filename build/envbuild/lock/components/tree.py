"""The tree of a component from git at its commit, read without a checkout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from envbuild.core.errors import ConfigurationError
from envbuild.git.refs import Commit
from envbuild.git.repository import GitRepository
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.project_metadata import PYPROJECT, UvSettings, uv_settings
from envbuild.lock.context import Repositories


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A component's tree: its repository's at its commit, of which the component may be a folder."""

    component: Chosen
    repository: GitRepository
    commit: Commit

    def top(self, path: str) -> str | None:
        """A file of the repository; None when there is none."""
        return self.repository.read_file(self.commit, path)

    def read(self, path: str) -> str | None:
        """A file of the component's own folder; None when there is none."""
        folder = self.component.subdirectory
        return self.top(f"{folder}/{path}" if folder else path)

    def pyproject(self) -> str | None:
        """The component's pyproject.toml; None when there is none."""
        return self.read(PYPROJECT)

    def has_folder(self, folder: str) -> bool:
        """Whether the repository has files in a folder."""
        return bool(self.repository.list_tree(self.commit, folder))

    def top_settings(self) -> UvSettings:
        """``[tool.uv]`` of the repository's pyproject.toml.

        Raises:
            ConfigurationError: the file cannot be understood.
        """
        try:
            return uv_settings(self.top(PYPROJECT))
        except ValueError as error:
            raise self.not_understood(PYPROJECT, error) from error

    def not_understood(self, file: str, error: Exception, fix: str = "") -> ConfigurationError:
        """The error for a file that has another form than is read here."""
        return ConfigurationError(
            f"cannot understand {file} of {self.repository.url} at {self.commit.sha[:12]}",
            why=f"{type(error).__name__}: {error}",
            fix=fix
            or "Upstream changed the file's form. Take a commit from before: envbuild lock --as-of DATE --name NAME.",
        ).at_upstream()


def trees_of(components: Iterable[Chosen], repositories: Repositories) -> Iterator[Tree]:
    """The trees of those components that come from git."""
    for component in components:
        if component.commit is not None:
            repository = repositories.open(component.git)
            yield Tree(component=component, repository=repository, commit=component.commit)


def tree_of(component: Chosen, repositories: Repositories) -> Tree | None:
    """The tree of a component; None: it does not come from git."""
    return next(trees_of([component], repositories), None)
