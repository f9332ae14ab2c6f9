"""Git repositories that are dictionaries, for what only reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from typing import Any

from envbuild.catalog.stack import Component
from envbuild.git.refs import Commit, CommitKind, GitRef
from envbuild.lock.components.models import Chosen, DecidedBy
from envbuild.lock.components.tree import Tree

TIP = "a" * 40


@dataclass
class FakeRepository:
    """One commit's files; ``resolved`` holds what was resolved, ``asked_for`` the branches that were asked for."""

    url: str
    files: Mapping[str, str] = field(default_factory=dict)
    submodules: Mapping[str, str] = field(default_factory=dict)
    submodule_urls: Mapping[str, str] = field(default_factory=dict)
    kind: CommitKind = CommitKind.BRANCH
    resolved: list[tuple[str, date | datetime | None]] = field(default_factory=list)
    asked_for: list[str] = field(default_factory=list)

    def resolve(self, ref: GitRef, as_of: date | datetime | None = None) -> Commit:
        self.resolved.append((ref.name, as_of))
        sha = ref.name if ref.is_full_commit else TIP
        kind = CommitKind.COMMIT if ref.may_be_commit else self.kind
        return Commit(sha=sha, committed_at=datetime(2025, 1, 2, 3, tzinfo=timezone.utc), kind=kind, name=ref.name)

    def tips(self, branches: Sequence[str]) -> dict[str, str]:
        self.asked_for += branches
        return dict.fromkeys(branches, TIP)

    def default_branch(self) -> str:
        return "main"

    def read_file(self, commit: Commit, path: str) -> str | None:
        return self.files.get(path)

    def list_tree(self, commit: Commit, path: str = "") -> list[str]:
        return [name.removeprefix(f"{path}/") for name in self.files if name.startswith(f"{path}/")]

    def submodule_commit(self, commit: Commit, path: str) -> str | None:
        return self.submodules.get(path)

    def submodule_url(self, commit: Commit, path: str) -> str | None:
        return self.submodule_urls.get(path)


def fake_tree(repository: FakeRepository, component: Any = None, **spec: Any) -> Any:
    """The tree of a component at the tip of a repository's main branch."""
    commit = repository.resolve(GitRef("main"))
    if component is None:
        component = Chosen(
            name="kernels",
            spec=Component.model_validate({"git": repository.url, **spec}),
            asked="main",
            origin=DecidedBy.STACK,
            because="the stack's file",
            git=repository.url,
            commit=commit,
        )
    served: Any = repository
    return Tree(component=component, repository=served, commit=commit)


class FakeRepositories:
    """Repositories by address; an address that is not there has no files."""

    def __init__(self, *repositories: FakeRepository) -> None:
        self.all = {repository.url: repository for repository in repositories}

    def quiet(self) -> FakeRepositories:
        return self

    def open(self, url: str) -> FakeRepository:
        return self.all.setdefault(url, FakeRepository(url))
