"""What runs in an interpreter and stands in no RECORD: bytecode in the place of sources, and code that starts with it.

Looked at in images too: what hashed the image's file need not be inside of it, but in a changed copy.
"""

import importlib.metadata
import importlib.util
import marshal
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from envbuild_smoke import debian
from envbuild_smoke.installed import Finding, RecordedFile, finding, shortened

# What Python imports by itself as it starts (docs.python.org, module site).
STARTING = ("sitecustomize", "usercustomize")
# The file that virtualenv and uv put into every environment they make.
OF_THE_ENVIRONMENT = "import _virtualenv"
_HEADER_BYTES = 16
_HASHED, _CHECKED = 1, 2


def bytecode_findings(files: Mapping[str, Sequence[RecordedFile]], modules: Iterable[str]) -> list[Finding]:
    """Return `bytecode-differs` for bytecode that Python would take and that its source does not compile to.

    Of the packages that have one of `modules` (`megatron.core`); the sources themselves are compared with RECORD.
    """
    tops = {module.partition(".")[0] for module in modules}
    findings = []
    for package, entries in files.items():
        if any(entry.name.partition("/")[0] in tops for entry in entries):
            sources = [entry.path for entry in entries if entry.name.endswith(".py")]
            findings += [
                finding("bytecode-differs", package, path, cache) for path in sources if (cache := _other(path))
            ]
    return shortened(findings)


def startup_findings(started: Mapping[str, str | None]) -> list[Finding]:
    """Return `startup-code` for code that every interpreter runs as it starts, and that no package lists.

    `started` are the files of the modules in `STARTING` that the template process had imported.
    """
    listed = {
        os.path.realpath(str(distribution.locate_file(file)))
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or []
        if str(file).endswith(".pth") or Path(file).stem in STARTING
    }
    files = [file for file in started.values() if file and not _of_the_python(file)]
    if sys.prefix != sys.base_prefix:
        files += [
            file for folder in _site_folders() for file in sorted(map(str, folder.glob("*.pth"))) if _imports(file)
        ]
    return [finding("startup-code", None, None, file) for file in files if os.path.realpath(file) not in listed]


def _of_the_python(file: str) -> bool:
    """Return whether code that starts belongs to the Python, which the lock's base has: distributions bring some.

    Where dpkg has the Python it has to be dpkg's, as it came; elsewhere its place says so.
    """
    library = sysconfig.get_path("stdlib")
    if debian.knows(f"{library}/os.py"):
        return debian.unchanged(file)
    return os.path.realpath(file).startswith((os.path.realpath(library) + os.sep, "/etc/"))


def _other(source: str) -> str | None:
    """Return the bytecode's file when Python would take it and it is not the source's."""
    cache = importlib.util.cache_from_source(source)
    try:
        data, text = Path(cache).read_bytes(), Path(source).read_bytes()
        return cache if _taken(data, source, text) and not _compiled(data, text, source) else None
    except OSError:
        return None


def _taken(data: bytes, source: str, text: bytes) -> bool:
    """Return whether Python imports the bytecode instead of compiling the source (PEP 552)."""
    if data[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags = int.from_bytes(data[4:8], "little")
    if flags & _HASHED:
        return not flags & _CHECKED or data[8:_HEADER_BYTES] == importlib.util.source_hash(text)
    status = Path(source).stat()
    of_source = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:_HEADER_BYTES], "little")) == of_source


def _compiled(data: bytes, text: bytes, source: str) -> bool:
    with suppress(ValueError, EOFError, TypeError, SyntaxError):
        return bool(marshal.loads(data[_HEADER_BYTES:]) == compile(text, source, "exec", dont_inherit=True))  # noqa: S302
    return False


def _site_folders() -> list[Path]:
    """Return the environment's own folders in which Python reads .pth files."""
    return sorted({Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))})


def _imports(file: str) -> bool:
    """Return whether a .pth file runs code, other than what makes the environment one."""
    lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    code = [line for line in lines if line.startswith(("import ", "import\t"))]
    return bool(code) and code != [OF_THE_ENVIRONMENT]
