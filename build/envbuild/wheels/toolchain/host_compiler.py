"""The host compiler: it compiles what is not for the GPU, and nvcc takes versions up to some newest one only."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import MachineError
from envbuild.core.process import answer, run

# Where a toolkit has the header with nvcc's own rules; the second place is that of conda's packages.
RULES = ("include/crt/host_config.h", "targets/*/include/crt/host_config.h")
# The conditions before its "#error -- unsupported GNU version!" and "unsupported clang version!".
_NEWEST_GCC = re.compile(r"^#if __GNUC__ > (\d+)\s*$", re.MULTILINE)
_FIRST_CLANG_TOO_NEW = re.compile(r"unsupported clang version! clang version must be less than (\d+)")
_MACROS = re.compile(r"^#define (__GNUC__|__clang_major__) (\d+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class HostCompiler:
    """A C and a C++ compiler; ``version`` is the name and version of the latter, such as ``g++ 12.2.0``."""

    cc: Path
    cxx: Path
    cc_version: str
    version: str

    @property
    def both(self) -> str:
        """Names and versions; the C++ compiler's alone where both are of one version, as they are nearly always."""
        same = self.cc_version.split()[-1] == self.version.split()[-1]
        return self.version if same else f"{self.cc_version}, {self.version}"


def find_host_compiler(environ: Mapping[str, str] = os.environ) -> HostCompiler:
    """The compilers that CC and CXX name, else gcc and g++.

    Raises:
        MachineError: one is not there.
    """
    names = {"CC": environ.get("CC") or "gcc", "CXX": environ.get("CXX") or "g++"}
    paths = {}
    for variable, name in names.items():
        program = shutil.which(name, path=environ.get("PATH"))
        if program is None:
            raise MachineError(
                f"the compiler {name} is not on this machine",
                why=f"nvcc and the packages need a host compiler; {variable} names another one: a program alone, "
                "without arguments.",
                fix="Install one: apt-get install gcc g++",
            )
        paths[variable] = Path(program)
    versions = {name: f"{Path(names[name]).name} {_version(name, path)}" for name, path in paths.items()}
    return HostCompiler(cc=paths["CC"], cxx=paths["CXX"], cc_version=versions["CC"], version=versions["CXX"])


def _version(variable: str, compiler: Path) -> str:
    try:
        # Debian's gcc answers -dumpversion with the major version alone (12); asked both, with all of it (12.2.0).
        text = answer([compiler, "-dumpfullversion", "-dumpversion"], what=f"ask {compiler} for its version")
    except MachineError as error:
        text = error.why
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        raise MachineError(
            f"{compiler} cannot be used as a compiler",
            why=f"{variable} names it, and -dumpversion prints no version: {text[:200] or 'nothing'}",
            fix=f"Point {variable} at gcc or clang, or unset it.",
        )
    return text


def refuse_too_new(host: HostCompiler, home: Path, cuda: str) -> None:
    """Refuse a host compiler that the nvcc in ``home`` refuses, before anything is built.

    Raises:
        MachineError: it is newer than the newest that nvcc takes.
    """
    rules = next((path for pattern in RULES for path in sorted(home.glob(pattern)) if path.is_file()), None)
    if rules is None:
        return  # nvcc itself says what is wrong with its headers
    text = rules.read_text(errors="replace")
    finished = run(
        [host.cxx, "-dM", "-E", "-x", "c++", "/dev/null"], what="ask the C++ compiler what it is", check=False
    )
    macros = {name: int(value) for name, value in _MACROS.findall(finished.output)}
    # clang has gcc's macro too, with the 4 of the gcc that it resembles.
    clang = "__clang_major__" in macros
    major = macros.get("__clang_major__" if clang else "__GNUC__", 0)
    version = (_FIRST_CLANG_TOO_NEW if clang else _NEWEST_GCC).search(text)
    if version is None:
        return
    newest = int(version[1]) - 1 if clang else int(version[1])
    if major <= newest:
        return
    c, cpp, package = ("clang", "clang++", "clang") if clang else ("gcc", "g++", "g++")
    raise MachineError(
        f"the host compiler {host.version} is too new for CUDA {cuda}",
        why=f"The newest {c} that its nvcc takes is {newest} ({rules}).",
        fix=f"Install an older one next to it, apt-get install {package}-{newest}, and name it: "
        f"CC={c}-{newest} CXX={cpp}-{newest}\nWithout root one of conda-forge does: CC and CXX take paths.",
    )
