"""One night of a stack at a time on a machine: the lock file, and what its message says of who has it."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.errors import MachineError
from envbuild.core.process_identity import ProcessIdentity
from envbuild.core.progress import SilentReporter
from envbuild.nightly.alone import only_night
from envbuild.store.local import LocalStore


@pytest.fixture
def context(tmp_path: Path) -> Context:
    store = LocalStore(tmp_path / "store", SilentReporter())
    return Context(store=store, site=load_site(), reporter=SilentReporter())


def locked_out(folder: Path, context: Context) -> MachineError:
    with (folder / "nightly-mcore.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MachineError, match="running already") as caught, only_night("mcore", folder, context):
            pytest.fail("two nights run")
    return caught.value


@pytest.mark.parametrize("older", [False, True])
def test_another_account_cannot_open_the_lock_and_so_not_hold_it(tmp_path: Path, context: Context, older: bool) -> None:
    file = tmp_path / "nightly-mcore.lock"
    if older:
        file.touch(0o666)
        file.chmod(0o664)
    with only_night("mcore", tmp_path, context):
        pass
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_message_names_the_process_that_has_it(tmp_path: Path, context: Context) -> None:
    with (
        only_night("mcore", tmp_path, context),
        pytest.raises(MachineError) as caught,
        only_night("mcore", tmp_path, context),
    ):
        pytest.fail("two nights run")
    assert f"It is process {os.getpid()} of " in caught.value.why
    assert ", since 20" in caught.value.why


def test_the_message_does_not_name_a_process_that_has_ended(tmp_path: Path, context: Context) -> None:
    with only_night("mcore", tmp_path, context):
        pass
    child = subprocess.Popen(["true"])
    identity = {**ProcessIdentity.own().as_json(), "pid": child.pid}
    child.wait()
    holder = tmp_path / "nightly-mcore.json"
    holder.write_text(json.dumps({**identity, "since": "2026-01-01T00:00:00Z"}))
    error = locked_out(tmp_path, context)
    assert f"Another process holds {tmp_path}/nightly-mcore.lock" in error.why
    assert f"process {child.pid} of {identity['host']}, which nightly-mcore.json names, has ended" in error.why
    assert f"fuser -v {tmp_path}/nightly-mcore.lock" in error.fix
    # A process that got its number later is another one.
    holder.write_text(json.dumps({**ProcessIdentity.own().as_json(), "started": "1", "since": "2026-01-01T00:00:00Z"}))
    assert "has ended" in locked_out(tmp_path, context).why
    # Of another machine nothing is known here.
    elsewhere = {"pid": child.pid, "host": "node7", "started": "1", "numbered_in": "x", "since": "2026-01-01T00:00:00Z"}
    holder.write_text(json.dumps(elsewhere))
    assert f"It is process {child.pid} of node7, since 2026" in locked_out(tmp_path, context).why
    for content in ("", "[]", '{"pid": 7}'):
        holder.write_text(content)
        assert "Another process holds" in locked_out(tmp_path, context).why
