"""Which CUDA toolkit wheels are compiled with: this machine's, or one made of the package index's packages."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from envbuild.core.errors import EnvbuildError, MachineError, NetworkError, ResolutionError
from envbuild.lock.lockfile import LockDirectory
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.host_compiler import find_host_compiler
from envbuild.wheels.toolchain.index_toolkit import NVCC, install_toolkit, pinned_packages, specifiers
from envbuild.wheels.toolchain.toolchain import (
    FIRST_INDEX_MAJOR,
    Compilers,
    Toolchain,
    Toolkits,
    look_for_toolkit,
    no_toolkit,
    toolchain_at,
)

NOT_LOOKED_FOR = Toolkits(home=None, version="", others=())


class ToolkitRequest(str, Enum):
    """What the user wants: ``auto`` is this machine's toolkit where one fits, else the package index's."""

    AUTO = "auto"
    SYSTEM = "system"
    INDEX = "index"


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """The toolkit that was chosen.

    Attributes:
        compilers: what the build key needs to know; known before anything is installed.
        toolchain: gives the compilers themselves, and installs them when they are not there.
    """

    compilers: Compilers
    toolchain: Callable[[], Toolchain]


def choose_toolkit(
    request: ToolkitRequest,
    lock: LockDirectory,
    cuda: str,
    sources: WheelSources,
    environ: Mapping[str, str] = os.environ,
) -> Toolkit:
    """The toolkit of version ``cuda`` (major.minor) that a lock's wheels are compiled with.

    Raises:
        MachineError: there is none where it was looked for, or no host compiler that goes with it.
        NetworkError: the index is needed, and cannot be reached.
    """
    toolkits = NOT_LOOKED_FOR if request is ToolkitRequest.INDEX else look_for_toolkit(cuda, environ)
    if toolkits.home is not None:
        here = toolchain_at(toolkits.home, toolkits.version, environ)
        return Toolkit(compilers=here, toolchain=lambda: here)
    if request is ToolkitRequest.SYSTEM:
        raise no_toolkit(cuda, toolkits)
    major = cuda.partition(".")[0]
    if int(major) < FIRST_INDEX_MAJOR:
        if request is ToolkitRequest.AUTO:
            raise no_toolkit(cuda, toolkits)
        no_nvcc = (
            f"Its packages of CUDA {major} (nvidia-cuda-nvcc-cu{major}) have no nvcc; those of {FIRST_INDEX_MAJOR} do."
        )
        raise _not_on_the_index(cuda, toolkits, no_nvcc)
    # Before the index is asked. Whether nvcc takes its version is seen after the installation: a header of the toolkit
    # has the rules (refuse_too_new).
    host = find_host_compiler(environ)
    try:
        packages = pinned_packages(lock, cuda, sources)
    except (NetworkError, ResolutionError) as error:
        raise _not_had(error, lock, cuda, toolkits) from error
    versions = {package.name: package.version for package in packages}
    # Enough for the build keys: where the wheelhouse has every wheel, no toolkit is installed.
    compilers = Compilers(cuda=versions[NVCC], host=host.both, source="index", packages=versions)
    if request is ToolkitRequest.AUTO:
        sources.reporter.note(f"no CUDA toolkit {cuda} on this machine: taking {NVCC} {compilers.cuda} of the index")

    @functools.cache
    def install() -> Toolchain:
        try:
            home = install_toolkit(packages, lock, sources)
        except NetworkError as error:
            raise _not_had(error, lock, cuda, toolkits) from error
        installed = toolchain_at(home, compilers.cuda, environ)
        # toolchain_at knows the folder alone, and so takes it for the machine's; the build key has the source and the
        # packages.
        return dataclasses.replace(installed, source=compilers.source, packages=versions)

    return Toolkit(compilers=compilers, toolchain=install)


def _not_had(error: EnvbuildError, lock: LockDirectory, cuda: str, toolkits: Toolkits) -> EnvbuildError:
    """What an error of uv means where the index's toolkit was wanted."""
    wanted = ", ".join(f"{name}{text}" for name, text in specifiers(cuda).items())
    tried = f"On the index, as of {lock.lock.inputs.as_of}: {wanted}\n{error.why}"
    if isinstance(error, ResolutionError):
        return _not_on_the_index(cuda, toolkits, tried, error)
    where = "" if toolkits is NOT_LOOKED_FOR else f"This machine has no toolkit that fits. {toolkits.listed()}\n"
    return NetworkError(
        f"the CUDA toolkit {cuda} cannot be installed from the package index: it cannot be reached",
        why=where + tried,
        fix=f"{error.fix}\nOr install the CUDA toolkit {cuda} and point CUDA_HOME at it.",
        log=error.log,
    )


def _not_on_the_index(cuda: str, toolkits: Toolkits, why: str, error: EnvbuildError | None = None) -> MachineError:
    where = "" if toolkits is NOT_LOOKED_FOR else f"This machine has no toolkit that fits either. {toolkits.listed()}\n"
    return MachineError(
        f"the package index has no CUDA toolkit {cuda}",
        why=where + why,
        fix=f"Install the CUDA toolkit {cuda} and point CUDA_HOME at it"
        + (", or lock as of a day on which the index had these (`envbuild lock --as-of`)." if error else "."),
        log=error.log if error else None,
    )
