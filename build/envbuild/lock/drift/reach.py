"""Which findings the code in use can run into.

Both questions are answered generously, from the text: a name in a comment counts as a use. What is left over is
certainly not reached from inside the consumer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from envbuild.lock.drift.findings import Finding
from envbuild.lock.drift.sources import SourceTree, parents

_FROM = re.compile(rb"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|(?:[^\n\\]|\\\n)*)", re.MULTILINE)
_IMPORT = re.compile(rb"^[ \t]*import[ \t]+([^\n#]+)", re.MULTILINE)
# importlib.import_module("nemo.collections.llm"), lazy loaders, targets of configuration files.
_QUOTED = re.compile(rb"[\"']([A-Za-z_]\w*(?:\.\w+)+)[\"']")
_NAME = re.compile(rb"\w+")


def mark_reached(findings: Sequence[Finding], consumer: SourceTree, entries: Sequence[str]) -> list[Finding]:
    """The findings, with those marked that no entry module leads to, or whose function nothing names."""
    if not findings:
        return []
    imported = _imported(consumer.modules, consumer.files, entries) if entries else frozenset(consumer.modules)
    files = {consumer.modules[module] for module in imported}
    names = {part.encode() for finding in findings for part in _parts(finding)}
    used = _used((consumer.files[file] for file in files), names)
    return [
        replace(
            finding, reached=finding.file in files and all(part.encode() in used for part in _parts(finding))
        )
        for finding in findings
    ]


def _parts(finding: Finding) -> list[str]:
    """The classes and functions around a finding; special methods are called without being named."""
    return [part for part in finding.within.split(".") if part and not (part.startswith("__") and part.endswith("__"))]


def _used(texts: Iterable[bytes], names: set[bytes]) -> set[bytes]:
    """Those of the names that occur anywhere but after ``def`` or ``class``."""
    used: set[bytes] = set()
    for text in texts:
        rest = names - used
        if not rest:
            break
        pattern = rb"(?<!\bdef )(?<!\bclass )\b(?:%s)\b" % b"|".join(sorted(re.escape(name) for name in rest))
        used.update(re.findall(pattern, text))
    return used


def _imported(modules: Mapping[str, str], files: Mapping[str, bytes], entries: Sequence[str]) -> frozenset[str]:
    """The modules that the entry modules import, at any depth."""
    found: set[str] = set()
    waiting = list(entries)
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
        for name in match[1].decode(errors="replace").split(","):
            yield name.split(" as ")[0].strip()
    for match in _QUOTED.finditer(text):
        yield match[1].decode(errors="replace")
