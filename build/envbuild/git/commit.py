"""A commit, and how it was named."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum


class CommitKind(str, Enum):
    """What the user named to get a commit."""

    BRANCH = "branch"
    TAG = "tag"
    COMMIT = "commit"


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit, and how it was found.

    Attributes:
        sha: 40 hex digits.
        committed_at: the committer's date, UTC, whole seconds.
        name: the branch or tag, or the digits that were asked for.
        nearest_tag: the tag in its history that the fewest steps lead to; None without one. Tags come and go: this
            is for people, and no input of a digest.
        commits_since_tag: how many commits it has that the tag has not.
    """

    sha: str
    committed_at: datetime
    kind: CommitKind
    name: str
    nearest_tag: str | None = None
    commits_since_tag: int = 0

    @property
    def describe(self) -> str | None:
        """As ``git describe`` writes it: ``v2.3.0``, or ``v2.3.0-17-g0123456789``; None without a tag."""
        if self.nearest_tag is None or not self.commits_since_tag:
            return self.nearest_tag
        return f"{self.nearest_tag}-{self.commits_since_tag}-g{self.sha[:10]}"
