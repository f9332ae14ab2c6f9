"""Whether a lock for a base can be installed on this machine: its platform, its glibc, and what the base brings."""

from __future__ import annotations

import platform

from envbuild.catalog.fields import MACHINES
from envbuild.core.errors import MachineError
from envbuild.lock.models import Lock
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
    # By numbers: as texts, 2.100 would be older than 2.36.
    elif not glibc or version_key(glibc) < version_key(base_glibc):
        problem = (
            f"The base has glibc {base_glibc}; this machine has {glibc or 'none'}, and wheels may need the newer one."
        )
    else:
        return
    raise MachineError(what, why=problem, fix=fix)


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
