"""One night of a stack at a time on this machine: a file lock."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.core import locks
from envbuild.core.errors import MachineError
from envbuild.core.files import write_atomic
from envbuild.core.process_identity import ProcessIdentity
from envbuild.core.text import shown


@contextlib.contextmanager
def only_night(stack: str, folder: Path, context: Context) -> Iterator[None]:
    """Be the only night of a stack on this machine.

    Raises:
        MachineError: there is another one.
    """
    # The first is locked, the second says by whom: a process that was killed leaves the text, and not the lock.
    file, holder = folder / f"nightly-{stack}.lock", folder / f"nightly-{stack}.json"
    with locks.exclusive_if_free(file, create=True) as free:
        if not free:
            raise _held(stack, file, holder)
        write_atomic(holder, json.dumps({**ProcessIdentity.own().as_json(), "since": context.moment()}))
        yield


def _held(stack: str, file: Path, holder: Path) -> MachineError:
    try:
        record = json.loads(holder.read_bytes())
        process = ProcessIdentity.read(record)
    except (OSError, ValueError, AttributeError):
        record, process = {}, None
    if process is None or process.has_ended:
        noted = f"; {process}, which {holder.name} names, has ended" if process else ""
        why = f"Another process holds {shown(file)}{noted}."
    else:
        why = f"It is {process}, since {record.get('since')}."
    return running(
        stack,
        why,
        f"`fuser -v {shlex.quote(shown(file))}` names the process. If it is no nightly and no gc, end it, or remove "
        "the file",
    )


def running(stack: str, why: str, way_out: str) -> MachineError:
    """The error for a night that another one keeps out."""
    return MachineError(
        f"a nightly of stack {stack} is running already",
        why=why,
        fix=f"Wait for its end. {way_out}. Nights of other stacks may run at the same time.",
        reason="nightly-running",
    )
