"""Modules that were imported from files that nothing of the lock lists.

Libraries import by themselves what they find: megatron-core takes an `apex` that lies there, locked or not. Here the
files of what was imported, wherever it was, are held against those of the lock's packages and of what the base brings.
"""

import csv
import importlib.metadata
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from envbuild_smoke import debian
from envbuild_smoke.installed import Finding, finding, shortened
from envbuild_smoke.names import normalize
from envbuild_smoke.unlisted import STARTING

CODE = "imported-unlisted"
# What tools put into every environment that they make, and Python imports as it starts (virtualenv, uv, ensurepip).
_OF_THE_ENVIRONMENT = ("_virtualenv", "_distutils_hack")
_RUNNER = Path(__file__).parent
# Where libraries keep modules that they write and load themselves, by the variable that names another place.
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": (),
    "TRITON_CACHE_DIR": ("~/.triton",),
    "TRITON_HOME": (),
    "TORCH_EXTENSIONS_DIR": ("~/.cache/torch_extensions",),
}
_told: set[str] = set()


def new_files() -> dict[str, str]:
    """Return the files of the modules that were imported since this was asked last, by module.

    A fork knows what was asked before it. Left out is what is the Python's, the runner's, or was written by a library
    into a cache of its own.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        file = _file(module)
        if file is None or file in _told:
            continue
        _told.add(file)
        if not _of_the_python(name, file) and not _of_the_runner(file) and not _in_a_cache(file):
            found[name] = file
    return found


class ListedFiles:
    """The files that a lock's packages list, and those of a base that brings packages itself."""

    def __init__(self, expected: Iterable[str], provided: Iterable[str] = ()) -> None:
        wanted, brought = {normalize(name) for name in expected}, {normalize(name) for name in provided}
        # A plan that expects nothing says nothing of strangers either.
        self._asked = bool(wanted)
        self._files: set[str] = set()
        self._folders: tuple[str, ...] = ()
        first: dict[str, importlib.metadata.Distribution] = {}
        for distribution in importlib.metadata.distributions():
            # The first on the path is the one in effect.
            first.setdefault(normalize(distribution.metadata["Name"] or ""), distribution)
        # A base that brings torch brings what that needs: all that is installed beside it.
        roots = {_root(first[name]) for name in brought & first.keys()}
        for name, distribution in first.items():
            if name and (name in wanted or _root(distribution) in roots):
                self._add(name, distribution)

    def findings(self, imported: Mapping[str, str]) -> list[Finding]:
        """Return `imported-unlisted` for modules whose files nobody lists."""
        if not self._asked:
            return []
        return shortened(
            [
                finding(CODE, module.partition(".")[0], None, file)
                for module, file in sorted(imported.items())
                if not self._lists(file)
            ]
        )

    def _lists(self, file: str) -> bool:
        # An installer may link a package's files to its cache: then the folder tells where the file belongs.
        beside = f"{os.path.realpath(os.path.dirname(file))}/{os.path.basename(file)}"  # noqa: PTH119, PTH120 - a string
        names = (file, beside, os.path.realpath(file))
        return any(name in self._files or name.startswith(self._folders) for name in names) or debian.lists(file)

    def _add(self, name: str, distribution: importlib.metadata.Distribution) -> None:
        root = _root(distribution)
        if text := distribution.read_text("RECORD"):
            rows = [row[0] for row in csv.reader(text.splitlines()) if row]
            for folder in {root, os.path.realpath(root)}:
                self._files.update(f"{folder}/{row}" for row in rows)
            if source := _editable(distribution):
                self._folders += (f"{os.path.realpath(source)}/",)
            return
        # Without a list (a base's own, an egg): the modules that it says it has.
        tops = (distribution.read_text("top_level.txt") or name.replace("-", "_")).split()
        self._folders += tuple(f"{os.path.realpath(root)}/{top}{end}" for top in tops for end in ("/", "."))


def _root(distribution: importlib.metadata.Distribution) -> str:
    return str(distribution.locate_file("")).rstrip("/")


def _editable(distribution: importlib.metadata.Distribution) -> str | None:
    """Return the folder that an editable installation of a locked component points to."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        said = json.loads(distribution.read_text("direct_url.json") or "{}")
        if said["dir_info"]["editable"] and said["url"].startswith("file://"):
            return str(said["url"]).removeprefix("file://")
    return None


def _file(module: Any) -> str | None:
    """Return the file that a module was loaded from; its own words count where its loader left none."""
    # Not getattr: modules that import lazily would begin to. What stands among modules and is none may do anything.
    with suppress(Exception):
        names = vars(module)
        spec = names.get("__spec__")
        origin = getattr(spec, "origin", None) if getattr(spec, "has_location", False) else names.get("__file__")
        if isinstance(origin, str) and origin.startswith("/"):
            return os.path.normpath(origin)
    return None


@cache
def _library() -> tuple[str, ...]:
    return tuple({os.path.realpath(sysconfig.get_path(name)) + "/" for name in ("stdlib", "platstdlib")})


def _of_the_python(module: str, file: str) -> bool:
    """Return whether it belongs to the Python: by its place and its name."""
    top = module.partition(".")[0]
    if top in STARTING:
        return True  # has a check of its own
    if top in _OF_THE_ENVIRONMENT and file.startswith(f"{sysconfig.get_path('purelib')}/"):
        return True
    real = os.path.realpath(file)
    for folder in _library():
        if real.startswith(folder):
            below = real[len(folder) :].split("/")[0]
            named = top in sys.stdlib_module_names or top.startswith("_")
            return named and below not in ("site-packages", "dist-packages")
    return False


def _of_the_runner(file: str) -> bool:
    return file.startswith(f"{_RUNNER}/") or file == f"{_RUNNER.parent}/__main__.py"


def _in_a_cache(file: str) -> bool:
    """Return whether a library wrote it there and loaded it by its place: no cache is on the path."""
    folders = [f"{tempfile.gettempdir()}/torchinductor_"]
    for variable, usual in _CACHES.items():
        named = [os.environ[variable]] if os.environ.get(variable) else []
        folders += [os.path.realpath(os.path.expanduser(folder)) + "/" for folder in (*named, *usual)]  # noqa: PTH111
    real = os.path.realpath(file)
    inside = [folder for folder in folders if real.startswith(folder)]
    return bool(inside) and not any(
        os.path.realpath(entry).startswith(folder.rstrip("/")) for entry in sys.path for folder in inside if entry
    )
