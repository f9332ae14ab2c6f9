"""The compilers of this machine: a CUDA toolkit that fits the lock's CUDA, and a host compiler.

Inside a container the toolkit of its image is the machine's own: found by the same variables and places.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.core.process import answer, run
from envbuild.wheels.toolchain.host_compiler import find_host_compiler, refuse_too_new

HOME_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
USUAL_HOME = Path("/usr/local/cuda")
# The index's packages of older CUDAs (nvidia-cuda-nvcc-cu12 12.6.85, 12.8.93 and 12.9.86) have ptxas and no nvcc.
FIRST_INDEX_MAJOR = 13
_LISTED = re.compile(r"^sm_(\d+)$", re.MULTILINE)
_RELEASE = re.compile(r"release (\d+\.\d+), V(\d+\.\d+\.\d+)")


@dataclass(frozen=True, kw_only=True)
class Compilers:
    """The compilers' versions, as the build key has them.

    Attributes:
        cuda: the toolkit's, such as ``13.0.88``.
        host: name and version, such as ``g++ 12.2.0``.
        source: this machine's toolkit, or one of the package index.
        packages: the versions of the index's packages that the toolkit is made of.
    """

    cuda: str
    host: str
    source: Literal["system", "index"] = "system"
    packages: Mapping[str, str] = field(default_factory=dict)


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


@dataclass(frozen=True, kw_only=True)
class Toolkits:
    """What a look at this machine's toolkits found.

    Attributes:
        home: the first that fits; ``version`` is its own. None: none fits.
        others: the others that were met until then, a line each.
    """

    home: Path | None
    version: str
    others: tuple[str, ...]

    def listed(self) -> str:
        """The others, for people."""
        return "Found:\n" + ("\n".join(f"  {line}" for line in self.others) or "  no toolkit at all")


def look_for_toolkit(cuda: str, environ: Mapping[str, str] = os.environ) -> Toolkits:
    """The first toolkit of this machine whose version is ``cuda`` (major.minor).

    Looks at CUDA_HOME, CUDA_PATH, the nvcc on PATH, and /usr/local/cuda.
    """
    others: list[str] = []
    for home, where in _homes(environ).items():
        version = cuda_version(home)
        if version and version.rpartition(".")[0] == cuda:
            return Toolkits(home=home, version=version, others=tuple(others))
        others.append(f"{where}: {home}: {f'CUDA {version}' if version else 'no nvcc that runs'}")
    return Toolkits(home=None, version="", others=tuple(others))


def find_toolchain(cuda: str, environ: Mapping[str, str] = os.environ) -> Toolchain:
    """The first toolkit of this machine whose version is ``cuda`` (major.minor), and the host compiler.

    Raises:
        MachineError: there is none, or no C++ compiler that goes with it; names what was found and what to do.
    """
    toolkits = look_for_toolkit(cuda, environ)
    if toolkits.home is None:
        raise no_toolkit(cuda, toolkits)
    return toolchain_at(toolkits.home, toolkits.version, environ)


def toolchain_at(home: Path, version: str, environ: Mapping[str, str] = os.environ) -> Toolchain:
    """The toolkit in a folder, with the host compiler.

    Raises:
        MachineError: there is no host compiler, or nvcc refuses it.
    """
    host = find_host_compiler(environ)
    refuse_too_new(host, home, version)
    return Toolchain(home=home, cuda=version, cc=host.cc, cxx=host.cxx, host=host.both)


def refuse_unknown_sm(toolchain: Toolchain, sm: Iterable[str]) -> None:
    """Refuse SMs that nvcc does not compile for, before anything is built.

    Raises:
        CheckRefusedError: there is one; names those that nvcc knows.
    """
    refused = [one for one in sm if _is_refused(toolchain.nvcc, one)]
    if not refused:
        return
    finished = run([toolchain.nvcc, "--list-gpu-code"], what="ask nvcc for its architectures", check=False)
    known = sorted(set(_LISTED.findall(finished.output)), key=int)
    raise CheckRefusedError(
        f"CUDA {toolchain.cuda} does not compile for {', '.join(f'sm_{one}' for one in refused)}",
        why=f"Its nvcc ({toolchain.nvcc}) knows {', '.join(f'sm_{one}' for one in known)}, from sm_90 on also with the "
        "suffix a, from sm_100 on also with f.",
        fix="Correct `sm` of the target's file in envs/targets/ (`envbuild list targets`). For GPUs that CUDA has "
        "dropped lock the stack on a base with an older CUDA, for newer GPUs on one with a newer CUDA: --base NAME",
    )


def _is_refused(nvcc: Path, sm: str) -> bool:
    """Whether nvcc says that it does not know an SM; asked so, it compiles nothing, and it knows of suffixes too."""
    pair = f"-gencode=arch=compute_{sm},code=sm_{sm}"
    finished = run(
        [nvcc, "--dryrun", pair, "-c", "-x", "cu", "/dev/null"], what="ask nvcc for an architecture", check=False
    )
    return finished.status != 0 and "Unsupported gpu architecture" in finished.output


def no_toolkit(cuda: str, toolkits: Toolkits) -> MachineError:
    """The error for a machine without a toolkit of version ``cuda``."""
    major = cuda.partition(".")[0]
    other = "Or take the package index's own, which needs no root: --toolkit index"
    if int(major) < FIRST_INDEX_MAJOR:
        other = f"The package index has none of CUDA {major}: its nvidia-cuda-nvcc-cu{major} is without nvcc."
    return MachineError(
        f"there is no CUDA toolkit {cuda} on this machine",
        why=f"The lock's torch is made for that CUDA, and what is compiled against it must be too. {toolkits.listed()}",
        fix=f"Install the CUDA toolkit {cuda} and point CUDA_HOME at it. {other}",
    )


def _homes(environ: Mapping[str, str]) -> dict[Path, str]:
    homes: dict[Path, str] = {}
    for name in HOME_VARIABLES:
        if value := environ.get(name):
            # The first name of a folder stays: it is the one that messages show.
            homes.setdefault(Path(value).expanduser().absolute(), name)
    if on_path := shutil.which("nvcc", path=environ.get("PATH")):
        # A link or a script that calls the real one: the toolkit says itself where it is.
        homes.setdefault(_top(Path(on_path)), "nvcc on PATH")
    # Last: what the user names or has on PATH is meant, and this is a link that installers set.
    if USUAL_HOME.is_dir():
        homes.setdefault(USUAL_HOME, str(USUAL_HOME))
    return homes


def _top(nvcc: Path) -> Path:
    """The folder of the toolkit whose nvcc this is, from what ``nvcc --dryrun`` says of itself."""
    output = run([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], what="ask nvcc where it is", check=False).output
    match = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    return Path(match[1].strip()).resolve() if match else nvcc.resolve().parent.parent


def cuda_version(home: Path) -> str:
    """The version of the toolkit in a folder, as its nvcc says it; empty where none runs."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file() or not os.access(nvcc, os.X_OK):
        return ""
    with contextlib.suppress(MachineError):
        if match := _RELEASE.search(answer([nvcc, "--version"], what="ask nvcc for its version")):
            return match[2]
    return ""
