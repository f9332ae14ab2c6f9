"""Modules that were imported, or run as Python starts, from files that no package of the lock lists.

Libraries import what they find: megatron-core uses an `apex` that is installed, locked or not. So the files of what was
imported are compared with those that the lock's packages list, and those of the packages that the base brings.
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

from envbuild_smoke.environment import debian
from envbuild_smoke.environment.distributions import distributions, normalize
from envbuild_smoke.environment.installed import shortened
from envbuild_smoke.results import Finding

# Modules that Python imports by itself as it starts (docs.python.org, module site).
STARTUP_MODULES = ("sitecustomize", "usercustomize")
# What virtualenv, uv and ensurepip install into every environment, and Python imports as it starts.
_ENVIRONMENT_MODULES = ("_virtualenv", "_distutils_hack")
_ENVIRONMENT_PTH = "import _virtualenv"
_RUNNER = Path(__file__).parents[1]
# Where libraries keep modules that they write and load themselves, by the variable that names another place.
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": (),
    "TRITON_CACHE_DIR": ("~/.triton",),
    # Triton's cache is below TRITON_HOME where only that is set.
    "TRITON_HOME": (),
    "TORCH_EXTENSIONS_DIR": ("~/.cache/torch_extensions",),
}
_reported: set[str] = set()


def new_files() -> dict[str, str]:
    """Return the files of the modules that were imported since the last call, by module.

    A fork inherits what was reported before it. Files of Python, of the runner, and those that a library wrote into its
    own cache are left out.
    """
    files = {}
    # A copy: a thread of a library may import while this runs.
    for name, module in list(sys.modules.items()):
        file = _file(module)
        if file is None or file in _reported:
            continue
        _reported.add(file)
        if not _is_pythons(name, file) and not _is_runners(file) and not _is_in_a_cache(file):
            files[name] = file
    return files


def startup_findings(imported: Mapping[str, str | None]) -> list[Finding]:
    """Return `startup-code` for code that every interpreter runs as it starts, and that no package lists.

    `imported` are the files of the `STARTUP_MODULES` that the fork server had imported.
    """
    # A RECORD lists .pth files too: those of editable packages and of some tools are a package's own.
    listed = {
        os.path.realpath(str(distribution.locate_file(file)))
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or []
        if str(file).endswith(".pth") or Path(file).stem in STARTUP_MODULES
    }
    files = [file for file in imported.values() if file and not _is_pythons_startup(file)]
    if sys.prefix != sys.base_prefix:
        folders = sorted({Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))})
        files += [str(file) for folder in folders for file in sorted(folder.glob("*.pth")) if _runs_code(file)]
    return [Finding("startup-code", None, None, file) for file in files if os.path.realpath(file) not in listed]


class ListedFiles:
    """The files that a lock's packages list, and those of a base that brings packages itself."""

    def __init__(self, expected: Iterable[str], provided: Iterable[str] = ()) -> None:
        wanted, brought = {normalize(name) for name in expected}, {normalize(name) for name in provided}
        # A plan without expected packages does not define which modules are foreign.
        self._has_expectations = bool(wanted)
        self._files: set[str] = set()
        self._folders: tuple[str, ...] = ()
        # The first of each name on the path is the one in effect.
        first = {name: installed[0] for name, installed in distributions().items()}
        # A base that brings torch brings what torch needs: all that is installed in the same folder.
        roots = {_root(first[name]) for name in brought & first.keys()}
        for name, distribution in first.items():
            if name in wanted or _root(distribution) in roots:
                self._add(name, distribution)

    def findings(self, imported: Mapping[str, str]) -> list[Finding]:
        """Return `imported-unlisted` for modules whose files no package lists."""
        if not self._has_expectations:
            return []
        return shortened(
            [
                Finding("imported-unlisted", module.partition(".")[0], None, file)
                for module, file in sorted(imported.items())
                if not self._lists(file)
            ]
        )

    def _lists(self, file: str) -> bool:
        # An installer may link a package's files to its cache: then the folder decides where the file belongs.
        folder, name = os.path.split(file)
        names = (file, f"{os.path.realpath(folder)}/{name}", os.path.realpath(file))
        return any(name in self._files or name.startswith(self._folders) for name in names) or debian.lists(file)

    def _add(self, name: str, distribution: importlib.metadata.Distribution) -> None:
        root = _root(distribution)
        if text := distribution.read_text("RECORD"):
            rows = [row[0] for row in csv.reader(text.splitlines()) if row]
            # Modules have the path that was on sys.path: with links resolved or not.
            for folder in {root, os.path.realpath(root)}:
                self._files.update(f"{folder}/{row}" for row in rows)
            if source := _editable_source(distribution):
                self._folders += (f"{os.path.realpath(source)}/",)
            return
        # Without a RECORD (Debian's packages, an egg): the modules that the metadata names.
        tops = (distribution.read_text("top_level.txt") or name.replace("-", "_")).split()
        self._folders += tuple(f"{os.path.realpath(root)}/{top}{end}" for top in tops for end in ("/", "."))


def _root(distribution: importlib.metadata.Distribution) -> str:
    return str(distribution.locate_file("")).rstrip("/")


def _editable_source(distribution: importlib.metadata.Distribution) -> str | None:
    """Return the folder that an editable installation of a locked component points to (PEP 610)."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin["dir_info"]["editable"] and origin["url"].startswith("file://"):
            return str(origin["url"]).removeprefix("file://")
    return None


def _file(module: Any) -> str | None:
    """Return the file that a module was loaded from: of its spec, else its own `__file__`."""
    # Not getattr: modules that import lazily would begin to. An entry of sys.modules may be any object.
    with suppress(Exception):
        names = vars(module)
        spec = names.get("__spec__")
        origin = getattr(spec, "origin", None) if getattr(spec, "has_location", False) else names.get("__file__")
        if isinstance(origin, str) and origin.startswith("/"):
            return os.path.normpath(origin)
    return None


@cache
def _standard_library() -> tuple[str, ...]:
    return tuple({os.path.realpath(sysconfig.get_path(name)) + "/" for name in ("stdlib", "platstdlib")})


def _is_pythons(module: str, file: str) -> bool:
    """Return whether a module belongs to Python, by its folder and its name."""
    top = module.partition(".")[0]
    if top in STARTUP_MODULES:
        return True  # `startup_findings` checks these
    if top in _ENVIRONMENT_MODULES and file.startswith(f"{sysconfig.get_path('purelib')}/"):
        return True
    real = os.path.realpath(file)
    for folder in _standard_library():
        if real.startswith(folder):
            below = real[len(folder) :].split("/")[0]
            # A module put into the standard library's folder is not Python's; names that begin with _ are its
            # accelerators (_decimal).
            named = top in sys.stdlib_module_names or top.startswith("_")
            return named and below not in ("site-packages", "dist-packages")
    return False


def _is_pythons_startup(file: str) -> bool:
    """Return whether startup code belongs to the base's Python: distributions ship a sitecustomize.

    Where dpkg owns the Python the file has to be dpkg's, unchanged; elsewhere its folder decides.
    """
    library = sysconfig.get_path("stdlib")
    if debian.knows(f"{library}/os.py"):
        return debian.unchanged(file)
    return os.path.realpath(file).startswith((os.path.realpath(library) + os.sep, "/etc/"))


def _runs_code(pth: Path) -> bool:
    """Return whether a .pth file runs code, other than that of the environment's own tools."""
    lines = pth.read_text(encoding="utf-8", errors="replace").splitlines()
    # Module site executes the lines of a .pth file that begin so, and adds the others to sys.path.
    code = [line for line in lines if line.startswith(("import ", "import\t"))]
    return bool(code) and code != [_ENVIRONMENT_PTH]


def _is_runners(file: str) -> bool:
    return file.startswith(f"{_RUNNER}/") or file == f"{_RUNNER.parent}/__main__.py"


def _is_in_a_cache(file: str) -> bool:
    """Return whether a library wrote the file into its cache and loaded it by its path: no cache is in sys.path."""
    # Inductor's default is torchinductor_USER in the temporary folder.
    folders = [f"{tempfile.gettempdir()}/torchinductor_"]
    for variable, usual in _CACHES.items():
        named = [os.environ[variable]] if os.environ.get(variable) else []
        folders += [os.path.realpath(os.path.expanduser(folder)) + "/" for folder in (*named, *usual)]  # noqa: PTH111
    real = os.path.realpath(file)
    inside = [folder for folder in folders if real.startswith(folder)]
    # A folder on sys.path is no cache: whatever is in it would be imported by name, as any package that is not in the
    # lock.
    return bool(inside) and not any(
        os.path.realpath(entry).startswith(folder.rstrip("/")) for entry in sys.path for folder in inside if entry
    )
