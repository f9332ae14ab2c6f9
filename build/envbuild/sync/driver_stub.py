"""Stubs of the NVIDIA driver's libraries, for modules that load them when they are imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envbuild.catalog.data import data_root
from envbuild.core.files import machine_errors
from envbuild.sync.install_target import RunCommand

# Of a machine without a GPU.
DRIVER = "libcuda"
# NVML, of a machine with one GPU. Without it torch asks the driver itself whether there is one, which counts as a start
# of CUDA, and imports that ask for more only where there is one would not be seen.
MANAGEMENT = "libnvidia-ml"


def stub_source(name: str) -> Path:
    """The source of a stub."""
    return data_root() / f"containers/native/{name}_stub.c"


def make_stub(run: RunCommand, folder: Path, seen: str, log: Path, name: str = DRIVER) -> bool:
    """Compile a stub into ``folder``; False where there is no C compiler.

    Args:
        run: runs a program in the place where modules are imported.
        seen: the folder as it is seen from there.
    """
    with machine_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.c").write_bytes(stub_source(name).read_bytes())
    library = f"{name}.so.1"
    words = ["-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", f"{seen}/{library}", f"{seen}/{name}.c"]
    # By a shell: where there is no gcc, that is an exit status and no error.
    finished = run(["sh", "-c", 'gcc "$@"', "sh", *words], what=f"compile a stub of {library}", log=log)
    return finished.status == 0


def variables_with_stub(variables: Mapping[str, str], seen: str) -> dict[str, str]:
    """The variables with which the loader finds the stubs of a folder."""
    before = variables.get("LD_LIBRARY_PATH", "")
    return {**variables, "LD_LIBRARY_PATH": f"{seen}:{before}" if before else seen}
