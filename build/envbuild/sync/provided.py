"""Bases that bring packages of their own: a lock for one leaves them out, so it is installed inside the base only."""

from __future__ import annotations

from envbuild.core.errors import MachineError
from envbuild.lock.lockfile import Lock


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
