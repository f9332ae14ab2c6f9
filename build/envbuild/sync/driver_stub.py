"""A stub of the NVIDIA driver's library, for modules that load it when they are imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envbuild.catalog.data import data_root
from envbuild.core.files import machine_errors
from envbuild.sync.install_target import RunCommand

SOURCE = "containers/native/libcuda_stub.c"
LIBRARY = "libcuda.so.1"


def make_stub(run: RunCommand, folder: Path, seen: str, log: Path) -> bool:
    """Compile the stub into ``folder``; False where there is no C compiler.

    Args:
        run: runs a program in the place where modules are imported.
        seen: the folder as it is seen from there.
    """
    with machine_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "libcuda.c").write_bytes((data_root() / SOURCE).read_bytes())
    words = ["-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", f"{seen}/{LIBRARY}", f"{seen}/libcuda.c"]
    # By a shell: where there is no gcc, that is an exit status and no error.
    finished = run(["sh", "-c", 'gcc "$@"', "sh", *words], what="compile a stub of the driver's library", log=log)
    return finished.status == 0


def variables_with_stub(variables: Mapping[str, str], seen: str) -> dict[str, str]:
    """The variables with which the loader finds the stub."""
    before = variables.get("LD_LIBRARY_PATH", "")
    return {**variables, "LD_LIBRARY_PATH": f"{seen}:{before}" if before else seen}
