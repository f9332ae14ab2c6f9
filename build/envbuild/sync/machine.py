"""Whether what is locked for a base runs on this machine."""

from __future__ import annotations

import platform

from envbuild.catalog.fields import MACHINES
from envbuild.core.errors import MachineError
from envbuild.wheels.audit.binary import version_key


def refuse_other_machine(base_platform: str, base_glibc: str, *, what: str, fix: str) -> None:
    """Refuse a machine of another architecture, or with an older glibc; its Python is looked for by uv.

    Args:
        base_platform: the base's, such as ``linux/amd64``.
        what: what the error says that failed.
        fix: what the error says to do.

    Raises:
        MachineError: this machine is refused.
    """
    machine, glibc = platform.machine(), platform.libc_ver()[1]  # no glibc where there is another C library
    wanted = MACHINES[base_platform]
    if machine != wanted:
        problem = f"The base is for {wanted}; this machine is {machine}."
    elif not glibc or version_key(glibc) < version_key(base_glibc):
        problem = (
            f"The base has glibc {base_glibc}; this machine has {glibc or 'none'}, and wheels may need the newer one."
        )
    else:
        return
    raise MachineError(what, why=problem, fix=fix)
