"""The start check: the driver of a stack is imported as the smoke runner does it, and that must not start CUDA.

A driver may check more of what its library does when a training begins.

It needs no GPU: stubs of the GPU's libraries say that there is one, and torch knows whether anything asked for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.core.errors import CheckRefusedError
from envbuild.core.exit_status import describe_status, innermost_calls
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished
from envbuild.sync.imports import last_report
from envbuild.sync.install_target import RunCommand, run_conclusively

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


# What the runner's last line begins with; libraries print too.
MARK = "envbuild-start: "
# What a stub does not have says nothing about the driver.
_STUB_LACKS = re.compile(r"undefined symbol: (cu|nvml)[A-Z]")


def start_driver(driver: Driver, device: Device, python: str, run: RunCommand, logs: Path, runner: str) -> str:
    """Import a driver and check its start; returns why that shows nothing, and nothing where the driver can be started.

    Args:
        python: the environment's interpreter.
        run: for a device with CUDA, with the stubs.
        runner: the smoke runner's file, as ``run`` sees it.

    Raises:
        CheckRefusedError: the driver does not import, or its imports start CUDA.
        InconclusiveError: its import did not end in time.
    """
    log, name = logs / "start.log", driver.value
    # -I as in the import check. faulthandler: of a library that crashes, the stack is all that is known.
    argv = [python, "-I", "-X", "faulthandler", runner, "start", "--driver", name, "--device", device.value]
    argv += ["--mark", MARK]
    finished = run_conclusively(run, argv, what=f"import driver {name}", log=log)
    result = last_report(finished.output, MARK)
    errors = result["errors"] if result else _of_a_death(finished)
    if result.get("cuda_started"):
        causes = [*dict.fromkeys(result["starters"])] or errors
        raise CheckRefusedError(
            f"importing driver {name} of the stack starts CUDA",
            why="\n".join(["Ranks are forked from the process that imports it: CUDA does not survive that.", *causes]),
            fix="Lock another version of the package that asks for the GPU, or leave it out of the stack.",
            log=log,
        )
    if any(_STUB_LACKS.search(line) for line in errors):
        return f"it asks for more of the GPU's driver than the stub here has: {errors[0]}"
    if errors:
        raise CheckRefusedError(
            f"driver {name} of the stack does not start",
            why="\n".join(["No case can be certified in such an image.", *errors]),
            fix="A package that the driver needs is missing, or two do not belong together. Lock other versions, or "
            "name the package under [requirements] of the stack with the reason, and lock again.",
            log=log,
        )
    return ""


def _of_a_death(finished: Finished) -> list[str]:
    """What is known of a process that a library ended while it was imported."""
    return [f"Its process {describe_status(finished.status)}:", innermost_calls(finished.output)]
