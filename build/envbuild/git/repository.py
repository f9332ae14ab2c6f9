"""Git refs become commits with their dates, and single files are read from them without a checkout."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from pathlib import Path

from envbuild.core.errors import ConfigurationError, InternalError, NetworkError
from envbuild.core.progress import Reporter
from envbuild.git.mirror import Mirror, RemoteRefs
from envbuild.git.refs import SHORTEST_COMMIT_DIGITS, GitRef
from envbuild.store.local import LocalStore

NEAR_NAMES = 5
SYMLINK_ROUNDS = 8
_BRANCH, _TAG = "refs/heads/", "refs/tags/"
_SYMLINK, _SUBMODULE = "120000", "160000"
# Words are hex too, down from here.
_TOO_SHORT = re.compile(rf"(?=.*\d)[0-9a-f]{{4,{SHORTEST_COMMIT_DIGITS - 1}}}", re.IGNORECASE)
_ENTRY = re.compile(r"(\d{6}) (\w+) ([0-9a-f]{40})\t(.*)", re.DOTALL)


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


@dataclass(frozen=True)
class _Entry:
    mode: str
    kind: str
    oid: str


class GitRepository:
    """A repository reached through git, kept as a blobless mirror in the store.

    The refs are asked for once: one object sees one state of the repository.

    Args:
        url: whatever git takes; may be rewritten by git's settings. Without user name or password.
        offline: never talk to the server.
        log: receives the output of fetches.
        answer_seconds: how long the server may take to list its refs.
        fetch_seconds: how long one fetch may take.

    Raises:
        ConfigurationError: ``url`` is no address, or holds a password.
    """

    def __init__(
        self,
        url: str,
        store: LocalStore,
        reporter: Reporter,
        *,
        offline: bool = False,
        log: Path | None = None,
        answer_seconds: float = 120.0,
        fetch_seconds: float = 3600.0,
    ) -> None:
        self.url = url
        self._store = store
        self._mirror = Mirror(
            url,
            store,
            reporter,
            offline=offline,
            log=log,
            answer_seconds=answer_seconds,
            fetch_seconds=fetch_seconds,
        )

    def resolve(self, ref: GitRef, as_of: date | datetime | None = None) -> Commit:
        """The commit that ``ref`` means.

        All 40 digits are that commit. Otherwise a branch or tag of this name, as in git; otherwise, from 7 hex digits
        on, the one commit of the repository that begins with them.

        Args:
            as_of: a branch means its last first-parent commit committed by then: by the end of a day (UTC), or by a
                moment, both inclusive. Tags and commits are what they are.

        Raises:
            ConfigurationError: there is no such ref, it is ambiguous, or the branch is younger than ``as_of``.
            NetworkError: the server cannot be reached; or offline, and the mirror does not hold what is needed.
        """
        if ref.is_full_commit:
            return self._commit(self._full_commit(ref), CommitKind.COMMIT, ref.name)
        refs = self._mirror.refs()
        kind, name = self._named(ref.name, refs)
        if kind is CommitKind.COMMIT:
            if not ref.may_be_commit:
                raise self._unknown(ref.name, refs)
            return self._commit(self._short_commit(ref.name.lower(), refs), kind, ref.name)
        tip = (refs.branches if kind is CommitKind.BRANCH else refs.tags)[name]
        self._mirror.fetch_commits([tip], f"fetch {kind.value} {name} of {self.url}")
        if kind is CommitKind.BRANCH and as_of is not None:
            tip = self._first_parent(tip, name, last_second(as_of))
        return self._commit(tip, kind, name)

    def default_branch(self) -> str:
        """The branch that a clone without a word takes.

        Raises:
            ConfigurationError: the repository has none.
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
        ending = re.compile(rf"(?:.*[^0-9.])?{re.escape(version)}")
        return [tag for tag in self._mirror.refs().tags if ending.fullmatch(tag)]

    def _named(self, name: str, refs: RemoteRefs) -> tuple[CommitKind, str]:
        """Which of the repository's names is meant; ``COMMIT`` for none."""
        branch, tag = name.removeprefix(_BRANCH), name.removeprefix(_TAG)
        is_branch = branch in refs.branches and not name.startswith(_TAG)
        is_tag = tag in refs.tags and not name.startswith(_BRANCH)
        if is_branch and is_tag:
            raise ConfigurationError(
                f"{name!r} is both a branch and a tag of {self.url}",
                why=f"The branch is at {refs.branches[branch]}, the tag at {refs.tags[tag]}.",
                fix=f"Say which: {_BRANCH}{branch} or {_TAG}{tag}.",
            )
        if is_branch:
            return CommitKind.BRANCH, branch
        return (CommitKind.TAG, tag) if is_tag else (CommitKind.COMMIT, name)

    def _full_commit(self, ref: GitRef) -> str:
        sha, mirror = ref.name.lower(), self._mirror
        what = f"fetch commit {sha} of {self.url}"
        if not mirror.matching([sha]) and not mirror.offline:
            refs = mirror.refs()
            try:
                mirror.fetch_commits([sha], what)
            except NetworkError:
                # Not every server hands out a commit that no ref points at: look for it in the whole history.
                mirror.fetch_commits(refs.tips(), f"fetch all branches and tags of {self.url}")
                if not mirror.matching([sha]):
                    raise self._unknown(ref.name, refs) from None
        mirror.fetch_commits([sha], what)
        return sha

    def _short_commit(self, digits: str, refs: RemoteRefs) -> str:
        # All of it: whether a short commit is the only one must not depend on what was fetched before.
        self._mirror.fetch_commits(refs.tips(), f"fetch all branches and tags of {self.url}")
        found = sorted(oid for oid in self._mirror.matching([digits]) if self._type_of(oid) == "commit")
        if not found:
            raise self._unknown(digits, refs)
        if len(found) > 1:
            raise ConfigurationError(
                f"{digits!r} is the beginning of {len(found)} commits of {self.url}",
                why="\n".join(found[:NEAR_NAMES]),
                fix="Write more digits, or all 40.",
            )
        return found[0]

    def _type_of(self, oid: str) -> str:
        return self._mirror.local(["cat-file", "-t", oid], "look at an object").strip()

    def _unknown(self, name: str, refs: RemoteRefs) -> ConfigurationError:
        names = dict.fromkeys([*refs.branches, *refs.tags])
        plain = name.removeprefix(_BRANCH).removeprefix(_TAG)
        near = difflib.get_close_matches(plain, names, NEAR_NAMES, cutoff=0.5)
        fix = f"Near ones are: {', '.join(near)}." if near else "`git ls-remote` lists what there is."
        if name.isdecimal() and not GitRef(name).is_full_commit:
            fix += f" If a version was meant, write version:{name}."
        if _TOO_SHORT.fullmatch(name):
            fix += f" If a commit was meant, write at least {SHORTEST_COMMIT_DIGITS} of its digits."
        what = "commit" if GitRef(name).may_be_commit else "branch or tag"
        return ConfigurationError(
            f"{self.url} has no {what} {name!r}",
            why=f"It has {len(refs.branches)} branches and {len(refs.tags)} tags, and it is none of them"
            + (" and no commit in their history." if what == "commit" else "."),
            fix=fix,
        )

    def _first_parent(self, tip: str, branch: str, moment: datetime) -> str:
        walk = ["rev-list", "--first-parent", "--timestamp"]
        limit = [f"--min-age={int(moment.timestamp())}", "--max-count=1"]
        what = f"find branch {branch} as of {moment:%Y-%m-%d %H:%M:%S} UTC"
        found = self._mirror.local([*walk, *limit, tip], what).split()
        if found:
            return found[1]
        first = self._mirror.local([*walk, tip], what).splitlines()[-1].split()
        raise ConfigurationError(
            f"branch {branch} of {self.url} has no commit as old as {moment:%Y-%m-%d %H:%M:%S} UTC",
            why=f"Its first commit, {first[1]}, is of {_utc(int(first[0])):%Y-%m-%d %H:%M:%S} UTC.",
            fix="Choose a later as-of date, or name a tag or commit.",
        )

    def _commit(self, sha: str, kind: CommitKind, name: str) -> Commit:
        if self._type_of(sha) == "tag":
            sha = self._mirror.local(["rev-parse", f"{sha}^{{}}"], "look at a tag").strip()
        if self._type_of(sha) != "commit":
            raise ConfigurationError(
                f"{name!r} of {self.url} is no commit",
                why=f"It is a {self._type_of(sha)}.",
                fix="Name a branch, a commit, or a tag of a commit.",
            )
        stamp = self._mirror.local(["rev-list", "--max-count=1", "--timestamp", sha], "read a date").split()[0]
        tag, since = self._nearest_tag(sha)
        return Commit(
            sha=sha,
            committed_at=_utc(int(stamp)),
            kind=kind,
            name=name,
            nearest_tag=name if kind is CommitKind.TAG else tag,
            commits_since_tag=since,
        )

    def _nearest_tag(self, sha: str) -> tuple[str | None, int]:
        """The nearest tag by steps through parents, and how many commits ``sha`` has that the tag has not."""
        refs = self._mirror.last_refs()
        tags = {commit: name for name, commit in sorted(refs.tags.items(), reverse=True)} if refs else {}
        if sha in tags or not tags:
            return tags.get(sha), 0
        what = "find the nearest tag"
        lines = self._mirror.local(["rev-list", "--parents", sha], what).splitlines()
        parents = {commit: before for commit, *before in map(str.split, lines)}
        seen, queue = {sha}, deque([sha])
        while queue:
            commit = queue.popleft()
            if commit in tags:
                count = self._mirror.local(["rev-list", "--count", sha, f"^{commit}"], what)
                return tags[commit], int(count)
            ahead = [parent for parent in parents.get(commit, ()) if parent not in seen]
            seen.update(ahead)
            queue.extend(ahead)
        return None, 0

    def read_file(self, commit: Commit, path: str) -> str | None:
        """The text of a file, None when there is no such file. See :meth:`read_files`."""
        return self.read_files(commit, [path])[path]

    def read_files(self, commit: Commit, paths: Iterable[str]) -> dict[str, str | None]:
        """The text of several files by their paths, fetched together; None for what is no file at ``commit``.

        A symbolic link is followed inside the tree. Text is UTF-8; a byte that is none becomes U+FFFD.

        Raises:
            NetworkError: a file's content is not in the mirror and cannot be fetched.
        """
        found: dict[str, str | None] = dict.fromkeys(paths)
        pending = {path: _inside(path) for path in found}
        for _ in range(SYMLINK_ROUNDS):
            places = {asked: place for asked, place in pending.items() if place}
            if not places:
                break
            entries = self._entries(commit, sorted(set(places.values())))
            texts = self._texts({entry.oid for entry in entries.values() if entry.kind == "blob"})
            pending = {}
            for asked, place in places.items():
                entry = entries.get(place)
                if entry is None or entry.kind != "blob":
                    continue
                if entry.mode == _SYMLINK:
                    pending[asked] = _inside(posixpath.join(posixpath.dirname(place), texts[entry.oid]))
                else:
                    found[asked] = texts[entry.oid]
        return found

    def list_tree(self, commit: Commit, path: str = "", *, recursive: bool = False) -> list[str]:
        """The names in a directory, sorted; empty when it is none. ``recursive``: the files below it, as paths."""
        place = "" if path in ("", ".") else _inside(path)
        if place is None:
            return []
        prefix = f"{place}/" if place else ""
        found = self._entries(commit, [prefix] if prefix else [], recursive=recursive)
        return sorted(name.removeprefix(prefix) for name in found)

    def submodule_commit(self, commit: Commit, path: str) -> str | None:
        """The commit that the submodule at ``path`` is pinned to; None when there is no submodule."""
        place = _inside(path)
        entry = self._entries(commit, [place]).get(place) if place else None
        return entry.oid if entry and entry.mode == _SUBMODULE else None

    def submodule_url(self, commit: Commit, path: str) -> str | None:
        """Where .gitmodules says the submodule at ``path`` comes from; a relative address is made absolute.

        None when .gitmodules does not name it.
        """
        entry = self._entries(commit, [".gitmodules"]).get(".gitmodules")
        if entry is None or entry.kind != "blob":
            return None
        self._mirror.fetch_objects([entry.oid], f"fetch .gitmodules of {self.url}")
        arguments = ["config", "--blob", entry.oid, "--null", "--list"]
        settings = dict(
            line.partition("\n")[::2] for line in self._mirror.local(arguments, "read .gitmodules").split("\0")
        )
        for name, value in settings.items():
            if name.startswith("submodule.") and name.endswith(".path") and value == _inside(path):
                url = settings.get(name.removesuffix("path") + "url")
                return _absolute(self.url, url) if url else None
        return None

    def _entries(self, commit: Commit, paths: Sequence[str], *, recursive: bool = False) -> dict[str, _Entry]:
        arguments = ["ls-tree", "-z", "--full-tree", *(["-r"] if recursive else []), commit.sha, "--", *paths]
        output = self._mirror.local(arguments, f"list files of {commit.sha}")
        matches = filter(None, map(_ENTRY.fullmatch, output.split("\0")))
        return {match[4]: _Entry(match[1], match[2], match[3]) for match in matches}

    def _texts(self, oids: set[str]) -> dict[str, str]:
        if not oids:
            return {}
        self._mirror.fetch_objects(oids, f"fetch {len(oids)} file{'s' if len(oids) > 1 else ''} of {self.url}")
        texts = {}
        with self._store.staging("git-files") as folder:
            for oid in oids:
                # git writes the file itself: bytes as they are, with no warning of git's in between.
                self._mirror.local(["unpack-file", oid], "read a file", cwd=folder)
                (file,) = folder.iterdir()
                texts[oid] = file.read_bytes().decode(errors="replace")
                file.unlink()
        return texts


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


def _inside(path: str) -> str | None:
    """``path`` in git's form, None when it is the root or leaves the tree."""
    place = posixpath.normpath(path.rstrip("/"))
    outside = place in (".", "..") or place.startswith(("/", "../"))
    return None if outside else place


def _absolute(base: str, url: str) -> str:
    """A submodule's address; ``./`` and ``../`` count from the address of the repository itself, as in git."""
    if not url.startswith(("./", "../")):
        return url
    base = base.rstrip("/")
    while url.startswith(("./", "../")):
        if url.startswith("../"):
            cut = max(base.rfind("/"), base.rfind(":"))
            base = base[:cut] if base[cut] == "/" else base[: cut + 1]
        url = url.partition("/")[2]
    return f"{base}{url}" if base.endswith(":") else f"{base}/{url}"
