"""Names of branches, tags and commits, the listing of those that a repository has, and a commit that was found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum

# git refuses shorter ones on large repositories, and words such as `add` or `face` are hex too.
SHORTEST_COMMIT_DIGITS = 7
COMMIT_DIGITS = 40
_LISTED = re.compile(r"^([0-9a-f]{40})\trefs/(heads|tags)/(.+?)(\^\{\})?$", re.MULTILINE)
_LISTED_COMMIT = re.compile(r"^([0-9a-f]{40})\t(refs/\S+)$", re.MULTILINE)
BRANCHES, TAGS = "refs/heads/", "refs/tags/"
_COMMIT = re.compile(rf"[0-9a-f]{{{SHORTEST_COMMIT_DIGITS},{COMMIT_DIGITS}}}", re.IGNORECASE)


@dataclass(frozen=True)
class GitRef:
    """A branch, a tag, or a commit (all 40 hex digits, or at least 7), as the user wrote it.

    ``refs/heads/NAME`` and ``refs/tags/NAME`` state which of the two NAME is. Other names under ``refs/`` are the
    host's, such as ``refs/pull/7/head``, and move as branches do.
    """

    name: str

    @property
    def is_full_commit(self) -> bool:
        """Whether the name is all 40 digits of a commit."""
        return self.may_be_commit and len(self.name) == COMMIT_DIGITS

    @property
    def is_of_the_host(self) -> bool:
        """Whether the name is under ``refs/``, and of no branch and no tag: ``refs/pull/7/head``."""
        return self.name.startswith("refs/") and not self.name.startswith((BRANCHES, TAGS))

    @property
    def may_be_commit(self) -> bool:
        """Whether the name could be a commit, whole or short."""
        return _COMMIT.fullmatch(self.name) is not None


def listed_commits(output: str) -> dict[str, str]:
    """The commits in the output of ``git ls-remote``, by the whole names of their refs."""
    return {name: commit for commit, name in _LISTED_COMMIT.findall(output)}


@dataclass(frozen=True)
class RemoteRefs:
    """The branches and tags of a repository: name to commit, tag objects peeled."""

    branches: Mapping[str, str]
    tags: Mapping[str, str]

    @classmethod
    def listed(cls, output: str) -> RemoteRefs:
        """Read the output of ``git ls-remote``."""
        refs: dict[str, dict[str, str]] = {"heads": {}, "tags": {}}
        for commit, kind, name, peeled in _LISTED.findall(output):
            # An annotated tag is listed twice: its own object, and with ^{} the commit that it points at.
            if peeled or name not in refs[kind]:
                refs[kind][name] = commit
        return cls(branches=refs["heads"], tags=refs["tags"])

    def tips(self) -> set[str]:
        """The commits that branches and tags point at."""
        return {*self.branches.values(), *self.tags.values()}


class CommitKind(str, Enum):
    """What the user named to get a commit."""

    BRANCH = "branch"
    TAG = "tag"
    COMMIT = "commit"


# The date of a commit whose repository was not read.
UNREAD = datetime.fromtimestamp(0, timezone.utc)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit, and how it was found.

    Attributes:
        sha: 40 hex digits.
        committed_at: the committer's date, UTC, whole seconds.
        name: the branch or tag, or the digits that were asked for.
    """

    sha: str
    committed_at: datetime
    kind: CommitKind
    name: str

    @property
    def is_read(self) -> bool:
        """Whether its repository was read, so that its date is known and its files can be had."""
        return self.committed_at != UNREAD

    @property
    def title(self) -> str:
        """Which one it is, for people: the tag that was asked for, else its first digits."""
        return self.name if self.kind is CommitKind.TAG else self.sha[:12]
