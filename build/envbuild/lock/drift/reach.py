"""Which findings the code in use can run into.

All of this is generous: names are compared without regard to what they stand for, and words in strings count as uses.
What is left over is certainly not reached from inside the consumer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from envbuild.lock.drift.bindings import FunctionNode, blocks_of
from envbuild.lock.drift.decorating import HARMLESS
from envbuild.lock.drift.findings import Finding, Moment
from envbuild.lock.drift.sources import SourceTree, parents
from envbuild.lock.drift.syntax import children, walk
from envbuild.lock.drift.tables import parse

_FROM = re.compile(rb"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|(?:[^\n\\]|\\\n)*)", re.MULTILINE)
_IMPORT = re.compile(rb"^[ \t]*import[ \t]+([^\n#]+)", re.MULTILINE)
# importlib.import_module("nemo.collections.llm"), lazy loaders, targets of configuration files.
_QUOTED = re.compile(rb"[\"']([A-Za-z_]\w*(?:\.\w+)+)[\"']")
_NAME = re.compile(rb"\w+")
_WORD = re.compile(r"\w+")
# Any other decorator may hand the function to a registry, from where it is called without being named.
_QUIET_DECORATORS = frozenset(name.rpartition(".")[2] for name in HARMLESS)


def mark_reached(findings: Sequence[Finding], consumer: SourceTree, entries: Sequence[str]) -> list[Finding]:
    """The findings, with those marked that no entry module leads to, or whose function nothing in use names."""
    imported = _imported(consumer.modules, consumer.files, entries) if entries else frozenset(consumer.modules)
    files = {consumer.modules[module]: module for module in imported}
    named = _named((consumer.files[file] for file in files), {part for finding in findings for part in _parts(finding)})
    near = [
        replace(finding, reached=finding.file in files and named.issuperset(_parts(finding))) for finding in findings
    ]
    if not entries or not any(_is_doubtful(finding, files, entries) for finding in near):
        return near
    live = _live_names(consumer, imported, entries)
    return [
        replace(finding, reached=not _is_doubtful(finding, files, entries) or live.issuperset(_parts(finding)))
        if finding.reached
        else finding
        for finding in near
    ]


def _parts(finding: Finding) -> list[str]:
    """The classes and functions that have to be used for a finding; special methods are, without being named."""
    if finding.at is Moment.IMPORT:
        return []
    return [part for part in finding.within.split(".") if part and not part.endswith("__")]


def _is_doubtful(finding: Finding, files: Mapping[str, str], entries: Sequence[str]) -> bool:
    """Whether it stands in a function or class outside the entries, which they need not use."""
    return finding.reached and bool(_parts(finding)) and not _is_below(files[finding.file], entries)


def _is_below(module: str, entries: Sequence[str]) -> bool:
    return any(name in entries for name in (module, *parents(module)))


def _named(texts: Iterable[bytes], names: Iterable[str]) -> set[str]:
    """Those of the names that occur anywhere but after ``def`` or ``class``."""
    rest = set(names)
    used: set[str] = set()
    for text in texts:
        if not rest:
            break
        # Looking for a text is far quicker than for a pattern, and most files have none of them.
        for name in [name for name in rest if name.encode() in text]:
            if re.search(rf"(?<!\bdef )(?<!\bclass )\b{re.escape(name)}\b".encode(), text):
                used.add(name)
                rest.remove(name)
    return used


# What the entries import


def _imported(modules: Mapping[str, str], files: Mapping[str, bytes], entries: Sequence[str]) -> frozenset[str]:
    """The modules that the entry modules, and what lies below them, import at any depth."""
    found: set[str] = set()
    waiting = [module for module in modules if _is_below(module, entries)]
    while waiting:
        name = waiting.pop()
        for module in (name, *parents(name)):
            if module in modules and module not in found:
                found.add(module)
                waiting.extend(_imports(module, modules[module], files[modules[module]]))
    return frozenset(found)


def _imports(module: str, file: str, text: bytes) -> Iterator[str]:
    """Dotted names that may be modules which this one imports."""
    package = module if file.endswith("/__init__.py") else module.rpartition(".")[0]
    for match in _FROM.finditer(text):
        source = match[1].decode()
        base = source.lstrip(".")
        if level := len(source) - len(base):
            folders = package.split(".")
            start = ".".join(folders[: len(folders) - level + 1])
            base = f"{start}.{base}" if base else start
        yield base
        for name in _NAME.findall(match[2]):
            yield f"{base}.{name.decode()}"
    for match in _IMPORT.finditer(text):
        for imported in match[1].decode(errors="replace").split(","):
            yield imported.split(" as ")[0].strip()
    for match in _QUOTED.finditer(text):
        yield match[1].decode(errors="replace")


# What of it they use


@dataclass
class _Uses:
    """Names used by what runs in any case, and by each definition if it is used itself."""

    live: set[str] = field(default_factory=set)
    by_definition: dict[str, set[str]] = field(default_factory=dict)

    def read(self, statements: Iterable[ast.stmt]) -> None:
        """Add the statements of a module."""
        for statement in statements:
            if isinstance(statement, FunctionNode | ast.ClassDef):
                self.by_definition.setdefault(statement.name, set()).update(_words(statement))
                if not all(map(_is_quiet, statement.decorator_list)):
                    self.live.add(statement.name)
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                for alias in statement.names:
                    self.by_definition.setdefault(alias.asname or alias.name, set()).add(alias.name)
            elif not _is_export_list(statement):
                self._read_plain(statement)

    def _read_plain(self, statement: ast.stmt) -> None:
        for child in children(statement):
            if isinstance(child, ast.expr):
                self.live.update(_words(child))
        for block in blocks_of(statement):
            self.read(block)

    def spread(self) -> set[str]:
        """All names that are used, directly or by something used."""
        waiting = list(self.live)
        while waiting:
            new = self.by_definition.pop(waiting.pop(), set()) - self.live
            self.live |= new
            waiting.extend(new)
        return self.live


def _live_names(consumer: SourceTree, modules: Iterable[str], entries: Sequence[str]) -> set[str]:
    """Names of functions and classes that the entries use, or that what they use uses."""
    uses = _Uses()
    for module in modules:
        try:
            tree = parse(consumer.files[consumer.modules[module]])
        except (SyntaxError, ValueError, RecursionError):
            continue
        if _is_below(module, entries):
            uses.live.update(_words(tree))
        uses.read(tree.body)
    return uses.spread()


def _words(node: ast.AST) -> Iterator[str]:
    """The identifiers in a piece of code, those in its short strings too."""
    for inner in walk(node):
        match inner:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                yield name
            case ast.Constant(value=str(text)) if " " not in text:
                yield from _WORD.findall(text)


def _is_quiet(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(function, "attr", getattr(function, "id", "")) in _QUIET_DECORATORS


def _is_export_list(statement: ast.stmt) -> bool:
    """Whether it is ``__all__ = ...``, which names things without using them."""
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets
    )
