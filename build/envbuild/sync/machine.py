"""Whether a lock for a base can be installed on this machine: its platform, its glibc, and what the base brings."""

from __future__ import annotations

import platform

from envbuild.catalog.fields import MACHINES
from envbuild.core.errors import MachineError
from envbuild.lock.models import Lock
from envbuild.wheels.audit.binary import version_key


def other_machine(base_platform: str, base_glibc: str) -> str:
    """Why a base's packages do not run here: another architecture, or an older glibc; empty where they do.

    Python is not looked at: uv looks for it.

    Args:
        base_platform: the base's, such as ``linux/amd64``.
    """
    machine, glibc = platform.machine(), platform.libc_ver()[1]  # no glibc where there is another C library
    wanted = MACHINES[base_platform]
    if machine != wanted:
        return f"The base is for {wanted}; this machine is {machine}."
    # By numbers: as texts, 2.100 would be older than 2.36.
    if not glibc or version_key(glibc) < version_key(base_glibc):
        here = glibc or "none"
        return f"The base has glibc {base_glibc}; this machine has {here}, and wheels may need the newer one."
    return ""


def refuse_without_base(lock: Lock) -> None:
    """A lock that counts on packages of its base cannot be installed on a machine.

    Raises:
        MachineError: the base brings packages; names them.
    """
    provides = lock.base.provides
    if not provides:
        return
    brought = ", ".join(f"{name} {version}" for name, version in sorted(provides.items()))
    raise MachineError(
        f"the lock of stack {lock.stack} cannot be installed without its base {lock.base.name}",
        why=f"The base brings {brought}; the lock leaves them out, and this machine does not have them.",
        fix="Lock the stack on a base that brings nothing, and install that: envbuild lock --base NAME. Inside the "
        "base's container, the lock's own files install into an environment made with --system-site-packages.",
    )
