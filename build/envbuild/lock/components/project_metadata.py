"""What a pyproject.toml declares before a build (PEP 508, 518, 621), and the places in its ``[tool.uv.sources]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.core import tomlread
from envbuild.git.refs import GitRef

PYPROJECT = "pyproject.toml"
_BEFORE_BUILD = ("dependencies", "optional-dependencies")
# PEP 518: what builds a project that does not say.
DEFAULT_BUILD_REQUIRES = ("setuptools>=40.8.0",)
# What uv takes for one (PEP 685).
_EXTRA = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
# transformer-engine-torch's sdist names the core of one CUDA major version, whatever it is built against.
# cu12 up to 2.13.0, cu13 from 2.15.0: 2.13.0 with the extra core-cu13 locks both cores (uv 0.13.8).
_CUDA_NAME = re.compile(r"^(?P<stem>.+)[-_.]cu(?P<major>\d\d)$")


def read_requirement(line: str) -> Requirement | None:
    """A PEP 508 line; None for one that cannot be read: uv reports what is wrong with it."""
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def name_of(line: str) -> str:
    """The package that a PEP 508 line names; empty for one that cannot be read."""
    requirement = read_requirement(line)
    return canonicalize_name(requirement.name) if requirement is not None else ""


def readable(lines: Iterable[str]) -> list[Requirement]:
    """The PEP 508 lines that can be read."""
    return [requirement for line in lines if (requirement := read_requirement(line)) is not None]


def refuse_unreadable(lines: Sequence[str], extras: Sequence[str], python: str = "") -> None:
    """Look at requirements, names of extras and Pythons: for one that it cannot read, uv drops all of a project.

    Raises:
        ValueError: one cannot be read.
    """
    if wrong := [line for line in lines if read_requirement(line) is None]:
        raise ValueError(f"It states what is not a requirement: {wrong[0]!r}")
    if wrong := [extra for extra in extras if _EXTRA.fullmatch(extra) is None]:
        raise ValueError(f"It states what is not the name of an extra: {wrong[0]!r}")
    SpecifierSet(python)  # its error is a ValueError, and names it


@dataclass(frozen=True, kw_only=True)
class ProjectTable:
    """What ``[project]`` of a pyproject.toml states of the project itself, and where setuptools has its version from.

    Attributes:
        name: as it is written; empty like the others where it is not stated.
        version_attribute: the variable of a module that holds the version, with its module.
        version_file: the file that holds it.
    """

    name: str
    version: str
    requires_python: str
    version_attribute: str
    version_file: str


def project_table(pyproject: str) -> ProjectTable:
    """The table of a pyproject.toml.

    Raises:
        ValueError: the text is not TOML.
    """
    document = _read(pyproject)
    project = tomlread.table_at(document, "project")
    # setuptools' [tool.setuptools.dynamic] names a variable of a module, or a file (its guide, "Dynamic Metadata").
    dynamic = tomlread.table_at(document, "tool", "setuptools", "dynamic", "version")
    file = dynamic.get("file")
    return ProjectTable(
        name=str(project.get("name", "")),
        version=str(project.get("version", "")),
        requires_python=str(project.get("requires-python", "")),
        version_attribute=str(dynamic.get("attr", "")),
        version_file=file if isinstance(file, str) else "",
    )


def _read(pyproject: str) -> dict[str, Any]:
    try:
        return tomlread.loads(pyproject)
    except ValueError as error:
        raise ValueError(f"Its {PYPROJECT} cannot be read: {error}") from error


def before_build(text: str) -> tuple[list[str], list[str]] | None:
    """The requirements and the extras that [project] states; ``None``: it leaves them to the build.

    Raises:
        ValueError: the text is not TOML, or not of that form.
    """
    project = _read(text).get("project")
    if not isinstance(project, dict):
        return None
    open_fields = project.get("dynamic", [])
    main, optional = project.get("dependencies", []), project.get("optional-dependencies", {})
    if not isinstance(optional, dict) or not all(map(are_texts, (open_fields, main, *optional.values()))):
        raise ValueError(f"Its {PYPROJECT} states dependencies in [project] in another form than lists of texts.")
    # What is neither stated nor dynamic is empty, and no build may fill it (PEP 621).
    if any(field in open_fields for field in _BEFORE_BUILD):
        return None
    lines = [*main, *(marked_line(line, "", extra) for extra, texts in optional.items() for line in texts)]
    return lines, list(optional)


def are_texts(value: object) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def build_requires(pyproject: str | None) -> tuple[str, ...]:
    """What a project must have installed to be built, as PEP 508 lines (PEP 518); ``None``: it has no pyproject.toml.

    Raises:
        ValueError: the text is not TOML, or not of that form.
    """
    lines = _read(pyproject or "").get("build-system", {})
    if isinstance(lines, dict):
        lines = lines.get("requires", list(DEFAULT_BUILD_REQUIRES))
    if not are_texts(lines):
        raise ValueError(f"[build-system] requires is not a list of strings: {lines!r}")
    return tuple(lines)


def build_backend(pyproject: str) -> str:
    """What builds a project (PEP 517); empty where it does not say.

    Raises:
        ValueError: the text is not TOML.
    """
    return str(tomlread.table_at(_read(pyproject), "build-system").get("build-backend", ""))


def needed_of_environment(lines: Sequence[str]) -> tuple[str, ...]:
    """What a build without isolation needs of the environment, of what it requires.

    Of setuptools no upper limit: it would hold for all packages, and uv does not hold such a build to it either.
    """
    return tuple(map(_without_limit_of_setuptools, lines))


def _without_limit_of_setuptools(line: str) -> str:
    requirement = read_requirement(line)
    if requirement is None or canonicalize_name(requirement.name) != "setuptools":
        return line
    lower = [str(clause) for clause in requirement.specifier if clause.operator in (">", ">=")]
    requirement.specifier = SpecifierSet(",".join(lower))
    return str(requirement)


def marked_line(line: str, marker: str, extra: str) -> str:
    """A requirement that holds under a marker and an extra, in addition to its own."""
    markers = [marker, f"extra == '{extra}'" if extra else ""]
    if not any(markers):
        return line
    if (requirement := read_requirement(line)) is not None and requirement.marker is not None:
        markers.insert(0, str(requirement.marker))
        requirement.marker = None
        line = str(requirement)
    stated = [text for text in markers if text]
    return f"{line} ; {stated[0] if len(stated) == 1 else ' and '.join(f'({text})' for text in stated)}"


def with_cuda_names(lines: Sequence[str], cuda_major: str | None) -> tuple[list[str], list[str]]:
    """Requirements with the names of a base's CUDA in them, and what was rewritten, as ``old -> new``."""
    requires, rewritten = [], []
    for line in lines:
        requirement = read_requirement(line)
        match = _CUDA_NAME.match(requirement.name) if requirement is not None else None
        if requirement is None or match is None or cuda_major in (None, match["major"]):
            requires.append(line)
            continue
        new = line.replace(requirement.name, f"{match['stem']}-cu{cuda_major}", 1)
        requires.append(new)
        rewritten.append(f"{line} -> {new}")
    return requires, rewritten


RefKind: TypeAlias = Literal["", "rev", "tag", "branch"]

# The keys that name a commit, as uv knows them, and what git calls such a name.
_REFS: dict[RefKind, str] = {"rev": "", "tag": "refs/tags/", "branch": "refs/heads/"}


@dataclass(frozen=True, kw_only=True)
class UvSource:
    """One place that a package is taken from: a git repository, the address of a file, an index, or the same tree.

    Attributes:
        ref: what of the repository, in upstream's words; empty for its default branch.
        ref_kind: the key that says so.
        subdirectory: the folder of the repository that holds the package; empty for its top.
        marker: on which platforms and Pythons it holds, as a PEP 508 marker; empty for all.
        extra: the one extra of the component that it holds for; empty for all.
        group: the one dependency group that it holds for; no group is ever installed with a component.
        index: the name of a package index.
        index_url: its address, as the same file declares it; empty where it does not.
        explicit: no other package is taken from that index, or the same file does not declare it.
        path: a folder or file, relative to the file that says so.
        workspace: a member of the same workspace.
    """

    package: str
    git: str = ""
    ref: str = ""
    ref_kind: RefKind = ""
    url: str = ""
    subdirectory: str = ""
    marker: str = ""
    extra: str = ""
    group: str = ""
    index: str = ""
    index_url: str = ""
    explicit: bool = False
    path: str = ""
    workspace: bool = False

    @property
    def git_ref(self) -> GitRef | None:
        """What to ask the repository for; None: its default branch."""
        return GitRef(f"{_REFS[self.ref_kind]}{self.ref}") if self.ref_kind else None

    @property
    def text(self) -> str:
        """What is taken, for people."""
        if self.index:
            return f"index {self.index}"
        if self.path or self.workspace:
            return f"path {self.path}" if self.path else "the same workspace"
        return self.url or f"{self.ref or 'the default branch'} of {self.git}"


@dataclass(frozen=True)
class UvSettings:
    """``[tool.uv]`` of a pyproject.toml. Each part raises a ValueError where it has another form than uv takes."""

    _table: Mapping[str, Any] = field(default_factory=dict)

    def sources(self, workspace: UvSettings | None = None) -> tuple[UvSource, ...]:
        """The places that ``[tool.uv.sources]`` names, in its order.

        Args:
            workspace: of which the project is a member: its indexes count too.
        """
        tables = self._table.get("sources", {})
        if not isinstance(tables, dict):
            raise _malformed(f"[tool.uv.sources] is not a table: {tables!r}")
        listed, indexes = [], {**(workspace._indexes() if workspace is not None else {}), **self._indexes()}
        for name, entries in tables.items():
            for entry in entries if isinstance(entries, list) else [entries]:
                if not isinstance(entry, dict):
                    raise _malformed(f"[tool.uv.sources] {name} is neither a table nor a list of tables: {entry!r}")
                listed.append(_source(name, entry, indexes))
        return tuple(listed)

    def _indexes(self) -> dict[str, dict[str, Any]]:
        """The tables ``[[tool.uv.index]]`` by name."""
        tables = self._table.get("index", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise _malformed(f"[[tool.uv.index]] is not a list of tables: {tables!r}")
        return {str(table["name"]): table for table in tables if "name" in table}

    @property
    def built_without_isolation(self) -> frozenset[str]:
        """The packages that upstream builds in the environment itself (``no-build-isolation-package``), by name."""
        return frozenset(canonicalize_name(name) for name in self._texts("no-build-isolation-package"))

    @property
    def overrides(self) -> tuple[str, ...]:
        """The PEP 508 lines of ``override-dependencies``."""
        lines = self._texts("override-dependencies")
        refuse_unreadable(lines, ())
        return lines

    @property
    def is_workspace(self) -> bool:
        """Whether the project is the top of a workspace."""
        return "workspace" in self._table

    @property
    def members(self) -> tuple[str, ...]:
        """The patterns of the folders of a workspace's members."""
        patterns = tomlread.table_at(self._table, "workspace").get("members", [])
        if not are_texts(patterns):
            raise _malformed(f"[tool.uv.workspace] members is not a list of strings: {patterns!r}")
        return tuple(patterns)

    def _texts(self, key: str) -> tuple[str, ...]:
        texts = self._table.get(key, [])
        if not are_texts(texts):
            raise _malformed(f"[tool.uv] {key} is not a list of strings: {texts!r}")
        return tuple(texts)


def uv_settings(pyproject: str | None) -> UvSettings:
    """``[tool.uv]`` of a pyproject.toml; empty where there is none.

    Raises:
        ValueError: the text is not TOML, or not of that form.
    """
    tool = tomlread.loads(pyproject or "").get("tool", {})
    settings = tool.get("uv", {}) if isinstance(tool, dict) else tool
    if not isinstance(settings, dict):
        raise _malformed(f"[tool.uv] is not a table: {settings!r}")
    return UvSettings(settings)


def _malformed(why: str) -> ValueError:
    return ValueError(why)


def _source(name: str, entry: dict[str, Any], indexes: dict[str, dict[str, Any]]) -> UvSource:
    keys = ("git", "url", "index", "path", "subdirectory", "marker", "extra", "group", *_REFS)
    texts = {key: entry[key] for key in keys if key in entry}
    if wrong := [key for key, text in texts.items() if not isinstance(text, str) or not text]:
        raise _malformed(
            f"[tool.uv.sources] {name}: {wrong[0]} must be a string that is not empty: {texts[wrong[0]]!r}"
        )
    index = indexes.get(texts.get("index", ""), {})
    named = [key for key in _REFS if key in texts]
    if len(named) > 1:
        raise _malformed(f"[tool.uv.sources] {name} has both {named[0]} and {named[1]}")
    try:
        marker = str(Marker(texts["marker"])) if "marker" in texts else ""
    except InvalidMarker as error:
        raise _malformed(f"[tool.uv.sources] {name}: {texts['marker']!r} is not a marker: {error}") from error
    return UvSource(
        package=canonicalize_name(name),
        git=texts.get("git", "").removeprefix("git+"),
        ref=texts[named[0]] if named else "",
        ref_kind=named[0] if named else "",
        url=texts.get("url", ""),
        subdirectory=texts.get("subdirectory", ""),
        marker=marker,
        extra=canonicalize_name(texts.get("extra", "")),
        group=texts.get("group", ""),
        index=texts.get("index", ""),
        index_url=str(index.get("url", "")),
        # uv refuses a name that nothing declares: where the index is only its users know.
        explicit=index.get("explicit") is True or (bool(texts.get("index")) and not index),
        path=texts.get("path", ""),
        workspace=entry.get("workspace") is True,
    )
