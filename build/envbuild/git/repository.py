"""A repository: refs become commits with their dates."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone

from envbuild.core.errors import ConfigurationError, InternalError, NetworkError
from envbuild.core.progress import Reporter
from envbuild.git.client import GitSettings
from envbuild.git.mirror import Mirror
from envbuild.git.refs import BRANCHES, SHORTEST_COMMIT_DIGITS, TAGS, Commit, CommitKind, GitRef, RemoteRefs
from envbuild.git.tree import TreeReader
from envbuild.store.local import LocalStore

NEAR_NAMES = 5
# With a digit, since words such as `faced` are hex too.
_TOO_SHORT = re.compile(rf"(?=.*\d)[0-9a-f]{{4,{SHORTEST_COMMIT_DIGITS - 1}}}", re.IGNORECASE)
# As `git fetch origin pull/7/head` has it.
_PULL = re.compile(r"pull/\d+/(?:head|merge)$")
DEFAULT_SETTINGS = GitSettings()


class GitRepository(TreeReader):
    """A repository reached through git, kept as a blobless mirror in the store.

    The refs are listed once: one object sees one state of the repository.

    Args:
        url: any address that git takes; git's settings may rewrite it. Without user name or password.

    Raises:
        ConfigurationError: ``url`` is not an address, or holds a password.
    """

    def __init__(
        self, url: str, store: LocalStore, reporter: Reporter, settings: GitSettings = DEFAULT_SETTINGS
    ) -> None:
        super().__init__(Mirror(url, store, reporter, settings))
        self._host_refs: dict[str, str] = {}

    def resolve(self, ref: GitRef, as_of: date | datetime | None = None) -> Commit:
        """The commit that ``ref`` means.

        All 40 digits are that commit. Otherwise a branch or tag of this name, as in git; otherwise, from 7 hex digits
        on, the one commit of the repository that begins with them. A host's ref (``refs/pull/7/head``) is a branch.

        Args:
            as_of: a branch means its last first-parent commit committed by then: by the end of a day (UTC), or by a
                moment, both inclusive. Tags and commits are what they are.

        Raises:
            ConfigurationError: there is no such ref, it is ambiguous, or the branch is younger than ``as_of``.
            NetworkError: the server cannot be reached.
        """
        if ref.is_full_commit:
            return self._commit(self._full_commit(ref), CommitKind.COMMIT, ref.name)
        refs = self._mirror.refs()
        kind, name = self._named(ref.name, refs)
        if ref.is_of_the_host:
            return self._on_branch(self._host_ref(ref.name, refs), name, as_of)
        if kind is CommitKind.COMMIT:
            if not ref.may_be_commit:
                raise self._unknown(ref.name, refs)
            return self._commit(self._short_commit(ref.name.lower(), refs), kind, ref.name)
        if kind is CommitKind.BRANCH:
            return self._on_branch(refs.branches[name], name, as_of)
        self._mirror.fetch_commits([refs.tags[name]], f"fetch tag {name} of {self.url}")
        return self._commit(refs.tags[name], kind, name)

    def _on_branch(self, tip: str, name: str, as_of: date | datetime | None) -> Commit:
        self._mirror.fetch_commits([tip], f"fetch branch {name} of {self.url}")
        if as_of is not None:
            tip = self._first_parent(tip, name, last_second(as_of))
        return self._commit(tip, CommitKind.BRANCH, name)

    def _host_ref(self, name: str, refs: RemoteRefs) -> str:
        """The commit of a ref that is no branch and no tag; asked for once, by its name: hosts keep thousands."""
        if name not in self._host_refs:
            self._host_refs |= self._mirror.tips([name])
        if name not in self._host_refs:
            raise self._unknown(name, refs)
        return self._host_refs[name]

    def tips(self, branches: Sequence[str]) -> dict[str, str]:
        """The commits that branches are at now; nothing is fetched, and a branch that is gone is left out.

        Raises:
            NetworkError: the server cannot be reached.
        """
        names = {name: name.removeprefix(BRANCHES) for name in branches}
        commits = self._mirror.tips(list(names.values()))
        return {name: commits[short] for name, short in names.items() if short in commits}

    def differ(self, one: Commit, other: Commit, paths: Sequence[str]) -> bool:
        """Whether the trees of two commits differ in one of the files and folders."""
        arguments = ["diff-tree", "-r", "--no-renames", "--name-only", one.sha, other.sha, "--", *paths]
        return bool(self._mirror.local(arguments, f"compare {one.sha[:12]} with {other.sha[:12]}").strip())

    def first_parents(self, older: Commit, newer: Commit) -> list[str]:
        """The digits of the first-parent commits after ``older`` up to ``newer``, oldest first.

        None where that walk does not come by ``older``.
        """
        what = f"list the commits up to {newer.name}"
        # Without --ancestry-path, a branch that was rewritten would give commits that never followed `older`.
        walk = ["rev-list", "--first-parent", "--ancestry-path", "--reverse", f"{older.sha}..{newer.sha}"]
        return self._mirror.local(walk, what).split()

    def default_branch(self) -> str:
        """The branch that a clone takes by default.

        Raises:
            ConfigurationError: the repository has no default branch.
            NetworkError: the server cannot be reached.
        """
        if (branch := self._mirror.default_branch()) is None:
            raise ConfigurationError(
                f"{self.url} has no default branch",
                why="Its HEAD names no branch, or one that does not exist.",
                fix="Name a branch, tag or commit of it.",
            )
        return branch

    def tags_of(self, version: str) -> list[str]:
        """The tags that end with a version: ``v2.7.3``, ``core_v0.16.1``, ``2.7.3`` itself.

        Raises:
            NetworkError: the server cannot be reached.
        """
        # No digit or dot before it: 12.7.3 is another version than 2.7.3.
        ending = re.compile(rf"(?:.*[^0-9.])?{re.escape(version)}")
        return [tag for tag in self._mirror.refs().tags if ending.fullmatch(tag)]

    def _named(self, name: str, refs: RemoteRefs) -> tuple[CommitKind, str]:
        """The branch or tag of this name; ``COMMIT`` when there is neither."""
        branch, tag = name.removeprefix(BRANCHES), name.removeprefix(TAGS)
        is_branch = branch in refs.branches and not name.startswith(TAGS)
        is_tag = tag in refs.tags and not name.startswith(BRANCHES)
        if is_branch and is_tag:
            raise ConfigurationError(
                f"{name!r} is both a branch and a tag of {self.url}",
                why=f"The branch is at {refs.branches[branch]}, the tag at {refs.tags[tag]}.",
                fix=f"Write {BRANCHES}{branch} or {TAGS}{tag}.",
            )
        if is_branch:
            return CommitKind.BRANCH, branch
        return (CommitKind.TAG, tag) if is_tag else (CommitKind.COMMIT, name)

    def _full_commit(self, ref: GitRef) -> str:
        sha, mirror = ref.name.lower(), self._mirror
        if not mirror.matching([sha]):
            refs = mirror.refs()
            try:
                mirror.fetch_commits([sha], f"fetch commit {sha} of {self.url}")
            except NetworkError:
                # Not every server hands out a commit that no ref points at: look for it in the whole history.
                mirror.fetch_commits(refs.tips(), f"fetch all branches and tags of {self.url}")
                if not mirror.matching([sha]):
                    raise self._unknown(ref.name, refs) from None
        return sha

    def _short_commit(self, digits: str, refs: RemoteRefs) -> str:
        # All of it: whether a short commit is the only one must not depend on what was fetched before.
        self._mirror.fetch_commits(refs.tips(), f"fetch all branches and tags of {self.url}")
        commits = sorted(oid for oid in self._mirror.matching([digits]) if self._type_of(oid) == "commit")
        if not commits:
            raise self._unknown(digits, refs)
        if len(commits) > 1:
            raise ConfigurationError(
                f"{digits!r} is the beginning of {len(commits)} commits of {self.url}",
                why="\n".join(commits[:NEAR_NAMES]),
                fix="Write more digits, or all 40.",
            )
        return commits[0]

    def _type_of(self, oid: str) -> str:
        return self._mirror.local(["cat-file", "-t", oid], "look at an object").strip()

    def _unknown(self, name: str, refs: RemoteRefs) -> ConfigurationError:
        names = dict.fromkeys([*refs.branches, *refs.tags])
        plain = name.removeprefix(BRANCHES).removeprefix(TAGS)
        near = difflib.get_close_matches(plain, names, NEAR_NAMES, cutoff=0.5)
        fix = f"Similar names: {', '.join(near)}." if near else f"`git ls-remote {self.url}` lists all of them."
        if _PULL.match(name):
            fix = f"Write refs/{name}."
        if GitRef(name).is_of_the_host:
            like = "/".join(name.split("/")[:2])
            fix = f"`git ls-remote {self.url} '{like}/*'` lists those that it has; "
            fix += "a pull request's is refs/pull/NUMBER/head."
        if name.isdecimal() and not GitRef(name).is_full_commit:
            fix += f" If a version was meant, write version:{name}."
        if _TOO_SHORT.fullmatch(name):
            fix += f" If a commit was meant, write at least {SHORTEST_COMMIT_DIGITS} of its digits."
        what = "commit" if GitRef(name).may_be_commit else "branch or tag"
        return ConfigurationError(
            f"{self.url} has no {what} {name!r}",
            why=f"None of its {len(refs.branches)} branches and {len(refs.tags)} tags has that name"
            + (", and no commit in their history." + self._where_commits_go() if what == "commit" else "."),
            fix=fix,
        )

    def _where_commits_go(self) -> str:
        if self._mirror.is_shallow():
            return " The repository is shallow: older commits are missing."
        return " If it had it once, the branch was rewritten (a forced push)."

    def _first_parent(self, tip: str, branch: str, moment: datetime) -> str:
        # rev-list writes the committer's date in front of each commit, in seconds since 1970. Unlike log it heeds no
        # log.* setting of the user: log.showSignature adds lines (test_git_settings_of_the_user_do_not_interfere).
        walk = ["rev-list", "--first-parent", "--timestamp"]
        limit = [f"--min-age={int(moment.timestamp())}", "--max-count=1"]
        what = f"find branch {branch} as of {moment:%Y-%m-%d %H:%M:%S} UTC"
        commits = self._mirror.local([*walk, *limit, tip], what).split()
        if commits:
            return commits[1]
        first = self._mirror.local([*walk, tip], what).splitlines()[-1].split()
        shallow = self._where_commits_go() if self._mirror.is_shallow() else ""
        raise ConfigurationError(
            f"branch {branch} of {self.url} has no commit as old as {moment:%Y-%m-%d %H:%M:%S} UTC",
            why=f"Its first commit, {first[1]}, is of {_utc(int(first[0])):%Y-%m-%d %H:%M:%S} UTC.{shallow}",
            fix="Choose a later as-of date, or name a tag or commit.",
        )

    def _commit(self, sha: str, kind: CommitKind, name: str) -> Commit:
        object_type = self._type_of(sha)
        # The 40 digits may be those of an annotated tag's own object.
        if object_type == "tag":
            sha = self._mirror.local(["rev-parse", f"{sha}^{{}}"], "look at a tag").strip()
            object_type = self._type_of(sha)
        if object_type != "commit":
            raise ConfigurationError(
                f"{name!r} of {self.url} is not a commit",
                why=f"It is a {object_type}.",
                fix="Name a branch, a commit, or a tag of a commit.",
            )
        stamp = self._mirror.local(["rev-list", "--max-count=1", "--timestamp", sha], "read a date").split()[0]
        return Commit(sha=sha, committed_at=_utc(int(stamp)), kind=kind, name=name)


def last_second(as_of: date | datetime) -> datetime:
    """The last second that counts as of a day (its end, UTC) or a moment (itself, in UTC).

    Raises:
        InternalError: a moment without a time zone.
    """
    if not isinstance(as_of, datetime):
        return datetime.combine(as_of, time(), timezone.utc) + timedelta(days=1, seconds=-1)
    if as_of.tzinfo is None:
        raise InternalError("an as-of moment came without a time zone")
    return as_of.astimezone(timezone.utc).replace(microsecond=0)


def _utc(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)
