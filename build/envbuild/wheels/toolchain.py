"""The compilers of this machine: a CUDA toolkit that fits the lock's CUDA, and a host compiler."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import MachineError
from envbuild.core.process import run

HOME_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
USUAL_HOME = Path("/usr/local/cuda")
_RELEASE = re.compile(r"release (\d+\.\d+), V(\d+\.\d+\.\d+)")
LATER = "Toolkits from the package index (nvidia-cuda-nvcc) are not taken by themselves yet."


@dataclass(frozen=True, kw_only=True)
class Compilers:
    """The compilers' versions, as the build key has them.

    Attributes:
        cuda: the toolkit's, such as ``13.0.88``.
        host: name and version, such as ``g++ 12.2.0``.
    """

    cuda: str
    host: str


@dataclass(frozen=True, kw_only=True)
class Toolchain(Compilers):
    """Compilers that are there.

    Attributes:
        home: the toolkit's folder, with ``bin/nvcc``.
        cc: the C compiler; ``cxx``: the C++ compiler.
    """

    home: Path
    cc: Path
    cxx: Path

    @property
    def nvcc(self) -> Path:
        """The real nvcc."""
        return self.home / "bin" / "nvcc"


def find_toolchain(cuda: str, environ: Mapping[str, str] = os.environ) -> Toolchain:
    """The first toolkit of this machine whose version is ``cuda`` (major.minor), and the host compiler.

    Looks at CUDA_HOME, CUDA_PATH, the nvcc on PATH, and /usr/local/cuda.

    Raises:
        MachineError: there is none, or no C++ compiler; names what was found and what to do.
    """
    seen: list[str] = []
    for where, home in _homes(environ):
        version = _cuda_version(home)
        if version and version.rpartition(".")[0] == cuda:
            cc, cxx, host = _host_compiler(environ)
            return Toolchain(home=home, cuda=version, cc=cc, cxx=cxx, host=host)
        seen.append(f"{where}: {home}: {f'CUDA {version}' if version else 'no nvcc that runs'}")
    raise MachineError(
        f"there is no CUDA toolkit {cuda} on this machine",
        why="The lock's torch is made for that CUDA, and what is compiled against it must be too. Found:\n"
        + ("\n".join(f"  {line}" for line in seen) or "  no toolkit at all"),
        fix=f"Install the CUDA toolkit {cuda} and point CUDA_HOME at it. {LATER}",
    )


def _homes(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    found: dict[Path, str] = {}
    for name in HOME_VARIABLES:
        if value := environ.get(name):
            found.setdefault(Path(value).expanduser().absolute(), name)
    if on_path := shutil.which("nvcc", path=environ.get("PATH")):
        # A link or a script that calls the real one: the toolkit says itself where it is.
        found.setdefault(_top(Path(on_path)), "nvcc on PATH")
    if USUAL_HOME.is_dir():
        found.setdefault(USUAL_HOME, str(USUAL_HOME))
    return iter([(where, home) for home, where in found.items()])


def _top(nvcc: Path) -> Path:
    """The folder of the toolkit whose nvcc this is, from what ``nvcc --dryrun`` says of itself."""
    output = run([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], what="ask nvcc where it is", check=False).output
    match = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    return Path(match[1].strip()).resolve() if match else nvcc.resolve().parent.parent


def _cuda_version(home: Path) -> str:
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file() or not os.access(nvcc, os.X_OK):
        return ""
    match = _RELEASE.search(run([nvcc, "--version"], what="ask nvcc for its version", check=False).output)
    return match[2] if match else ""


def _host_compiler(environ: Mapping[str, str]) -> tuple[Path, Path, str]:
    names = {"CC": environ.get("CC") or "gcc", "CXX": environ.get("CXX") or "g++"}
    paths = {}
    for variable, name in names.items():
        found = shutil.which(name, path=environ.get("PATH"))
        if found is None:
            raise MachineError(
                f"the compiler {name} is not on this machine",
                why=f"nvcc and the packages need a host compiler; {variable} names another one.",
                fix="Install one: apt-get install gcc g++",
            )
        paths[variable] = Path(found)
    asked = run([paths["CXX"], "-dumpfullversion", "-dumpversion"], what="ask the C++ compiler for its version")
    return paths["CC"], paths["CXX"], f"{Path(names['CXX']).name} {asked.output.strip()}"
