"""The start check: the driver of a stack is imported as the smoke runner does it, and that must not start CUDA.

A driver may check more of what its library does when a training begins.

It needs no GPU: stubs of the GPU's libraries say that there is one, and torch knows whether anything asked for it.
"""

from __future__ import annotations

import re
from pathlib import Path

from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.core.errors import CheckRefusedError
from envbuild.core.exit_status import describe_status, innermost_calls
from envbuild.core.process import Finished
from envbuild.sync.conclusive import run_conclusively
from envbuild.sync.imports import last_report
from envbuild.sync.install_target import RunCommand

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
