"""Bytecode of installed packages against their sources: Python takes the bytecode, RECORD lists the sources.

Checked in images too: the runner hashes the image's file, but may run in a changed copy of its root file system.
"""

import importlib.util
import marshal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from envbuild_smoke.environment.installed import RecordedFile, shortened
from envbuild_smoke.results import Finding

# PEP 552: magic number, flags, then mtime and size of the source or, with bit 0 of the flags set, its hash; bit 1 says
# whether Python compares that hash.
_HEADER_BYTES = 16
_HASHED, _CHECKED = 1, 2


def bytecode_findings(files: Mapping[str, Sequence[RecordedFile]], modules: Iterable[str]) -> list[Finding]:
    """Return `bytecode-differs` for bytecode that Python would take and that its source does not compile to.

    Only packages that have one of `modules` (`megatron.core`) are checked: compiling all sources takes minutes.
    """
    tops = {module.partition(".")[0] for module in modules}
    findings = []
    for package, entries in files.items():
        # A RECORD names files with / on every platform: the first part is the import name, which often is not the
        # package's.
        if any(entry.name.partition("/")[0] in tops for entry in entries):
            sources = [entry.path for entry in entries if entry.name.endswith(".py")]
            findings += [
                Finding("bytecode-differs", package, path, cache) for path in sources if (cache := _differing(path))
            ]
    return shortened(findings)


def _differing(source: str) -> str | None:
    """Return the bytecode's file when Python would take it and it is not the source's."""
    # Of the running Python alone: bytecode of another version, or another optimization level, is not loaded by the
    # ranks.
    cache = importlib.util.cache_from_source(source)
    try:
        data, text = Path(cache).read_bytes(), Path(source).read_bytes()
        return cache if _is_taken(data, source, text) and not _is_compiled_from(data, text, source) else None
    except OSError:
        return None


def _is_taken(data: bytes, source: str, text: bytes) -> bool:
    """Return whether Python imports the bytecode instead of compiling the source (PEP 552)."""
    if data[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags = int.from_bytes(data[4:8], "little")
    if flags & _HASHED:
        return not flags & _CHECKED or data[8:_HEADER_BYTES] == importlib.util.source_hash(text)
    status = Path(source).stat()
    of_source = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:_HEADER_BYTES], "little")) == of_source


def _is_compiled_from(data: bytes, text: bytes, source: str) -> bool:
    with suppress(ValueError, EOFError, TypeError, SyntaxError):
        # Code objects compare by value: constants, names, bytecode and line numbers. The file's bytes may differ, since
        # marshal writes shared objects as references.
        return bool(marshal.loads(data[_HEADER_BYTES:]) == compile(text, source, "exec", dont_inherit=True))  # noqa: S302
    return False
