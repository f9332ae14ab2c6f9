"""Files and directories of a commit, read from the mirror without a checkout."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass

from envbuild.git.mirror import Mirror
from envbuild.git.refs import Commit

# Links to links are followed so far; a link to itself ends here.
SYMLINK_ROUNDS = 8
_SYMLINK, _SUBMODULE = "120000", "160000"
# `git ls-tree -z`: mode, type and object, and the path as it is; without -z special names are quoted.
_ENTRY = re.compile(r"(\d{6}) (\w+) ([0-9a-f]{40})\t(.*)", re.DOTALL)


@dataclass(frozen=True)
class _Entry:
    mode: str
    kind: str
    oid: str


class TreeReader:
    """Reads what commits of one repository contain; the contents of files are fetched when first read."""

    def __init__(self, mirror: Mirror) -> None:
        self.url = mirror.url
        self._mirror = mirror
        self._trees: dict[str, dict[str, _Entry]] = {}
        self._read: dict[tuple[str, str], str | None] = {}

    def read_file(self, commit: Commit, path: str) -> str | None:
        """The text of a file, which is read once; None when there is no such file. See :meth:`read_files`."""
        key = (commit.sha, path)
        if key not in self._read:
            self._read[key] = self.read_files(commit, [path])[path]
        return self._read[key]

    def read_files(self, commit: Commit, paths: Iterable[str]) -> dict[str, str | None]:
        """The text of several files by their paths, fetched together; None for what is not a file at ``commit``.

        A symbolic link is followed inside the tree. Text is UTF-8; other bytes become U+FFFD.

        Raises:
            NetworkError: a file's content is not in the mirror and cannot be fetched.
        """
        contents: dict[str, str | None] = dict.fromkeys(paths)
        pending = {path: _inside(path) for path in contents}
        for _ in range(SYMLINK_ROUNDS):
            places = {path: place for path, place in pending.items() if place}
            if not places:
                break
            tree = self._tree(commit)
            files = {path: tree[place] for path, place in places.items() if place in tree}
            files = {path: entry for path, entry in files.items() if entry.kind == "blob"}
            texts = self._texts({entry.oid for entry in files.values()})
            pending = {}
            for path, entry in files.items():
                if entry.mode == _SYMLINK:
                    pending[path] = _inside(posixpath.join(posixpath.dirname(places[path]), texts[entry.oid]))
                else:
                    contents[path] = texts[entry.oid]
        return contents

    def list_tree(self, commit: Commit, path: str = "", *, recursive: bool = False) -> list[str]:
        """The names in a directory, sorted, or none; ``recursive``: the files below it, as paths."""
        place = "" if path in ("", ".") else _inside(path)
        if place is None:
            return []
        prefix = f"{place}/" if place else ""
        tree = self._tree(commit)
        below = [name.removeprefix(prefix) for name in tree if name.startswith(prefix)]
        return sorted(name for name in below if (tree[prefix + name].kind != "tree" if recursive else "/" not in name))

    def submodule_commit(self, commit: Commit, path: str) -> str | None:
        """The commit that the submodule at ``path`` is pinned to; None when there is no submodule."""
        place = _inside(path)
        entry = self._tree(commit).get(place) if place else None
        return entry.oid if entry and entry.mode == _SUBMODULE else None

    def submodule_url(self, commit: Commit, path: str) -> str | None:
        """The address of the submodule at ``path`` in .gitmodules; a relative one is made absolute.

        None when .gitmodules does not name it.
        """
        entry = self._tree(commit).get(".gitmodules")
        if entry is None or entry.kind != "blob":
            return None
        self._mirror.fetch_objects([entry.oid], f"fetch .gitmodules of {self.url}")
        # --null: a line break between key and value, a NUL behind each (git-config(1)).
        arguments = ["config", "--blob", entry.oid, "--null", "--list"]
        settings = dict(
            line.partition("\n")[::2] for line in self._mirror.local(arguments, "read .gitmodules").split("\0")
        )
        for name, value in settings.items():
            if name.startswith("submodule.") and name.endswith(".path") and value == _inside(path):
                url = settings.get(name.removesuffix("path") + "url")
                return _absolute(self.url, url) if url else None
        return None

    def _tree(self, commit: Commit) -> dict[str, _Entry]:
        """All files and folders of a commit by their paths: listed once, since a process for each file costs more."""
        if commit.sha not in self._trees:
            arguments = ["ls-tree", "-z", "--full-tree", "-r", "-t", commit.sha]
            output = self._mirror.local(arguments, f"list files of {commit.sha}")
            matches = filter(None, map(_ENTRY.fullmatch, output.split("\0")))
            self._trees[commit.sha] = {match[4]: _Entry(match[1], match[2], match[3]) for match in matches}
        return self._trees[commit.sha]

    def _texts(self, oids: set[str]) -> dict[str, str]:
        contents = self._mirror.contents(oids) if oids else {}
        return {oid: content.decode(errors="replace") for oid, content in contents.items()}


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
            # HOST:PATH, as ssh has it, has no slash before its first folder.
            cut = max(base.rfind("/"), base.rfind(":"))
            base = base[:cut] if base[cut] == "/" else base[: cut + 1]
        url = url.partition("/")[2]
    return f"{base}{url}" if base.endswith(":") else f"{base}/{url}"
