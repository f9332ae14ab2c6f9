"""A lock that is there and up to date is found without the right to write anything."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.locks import DIGEST, make_lock
from helpers.processes import unprivileged
from helpers.stack_files import BASE, write_base, write_stack

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.errors import CheckRefusedError, MachineError, NetworkError, ResolutionError
from envbuild.core.progress import SilentReporter
from envbuild.lock import existing
from envbuild.lock import lock as locking
from envbuild.lock.inputs.request import LockRequest, inputs_digest
from envbuild.lock.lock import LockOptions, LockResult, LockRun, lock_stack
from envbuild.lock.models import Inputs
from envbuild.lock.outcome import Failure
from envbuild.lock.verification import VerifiedLock
from envbuild.store.local import LocalStore


@pytest.fixture
def project(open_dir):
    """A project with an up-to-date lock, and a store, both without the right to write."""
    write_base(open_dir)
    write_stack(open_dir, "s", {"torch": {"version": "==2.13.0"}})
    selection = Selection(Catalog.open(open_dir), "s", BASE, "cpu")
    inputs = Inputs(
        digest=inputs_digest(selection, LockRequest()), stack_digest=DIGEST, base_digest=DIGEST, torch_build="cpu",
        uv="0", as_of="2026-01-02T03:04:05Z",
    )  # fmt: skip
    path = open_dir / "lockfiles" / "s" / BASE
    make_lock(path, stack="s", inputs=inputs)
    closed = [open_dir / "store", *path.parents[:2], path]
    closed[0].mkdir()
    for folder in closed:
        folder.chmod(0o555)
    yield open_dir
    for folder in closed:
        folder.chmod(0o755)


def lock(project: Path, verifier: Any = None, **options: Any) -> LockResult:
    selection = Selection(Catalog.open(project), "s", BASE, "cpu")
    reporter = SilentReporter()
    store = LocalStore(project / "store", reporter)
    path = project / "lockfiles" / "s" / BASE
    return lock_stack(
        selection,
        LockRequest(),
        LockOptions(path=path, **options),
        Context(store=store, site=load_site({"HOME": str(project)}), reporter=reporter),
        verifier,
    )


def test_up_to_date_lock_needs_no_right_to_write(project):
    def look() -> None:
        assert lock(project).built is False

    assert unprivileged(look) == 0
    assert list((project / "store").iterdir()) == []


def test_upgrade_makes_an_up_to_date_lock_anew(project, monkeypatch):
    def new_lock(*arguments):
        raise NetworkError("made anew")

    monkeypatch.setattr(LockRun, "new_lock", new_lock)
    monkeypatch.setattr(locking, "only_writer", lambda *_: contextlib.nullcontext())
    assert lock(project).built is False
    with pytest.raises(NetworkError, match="made anew"):
        lock(project, upgrade=True)


def test_a_machine_that_cannot_verify_is_looked_at_only_where_a_lock_is_made(project, monkeypatch):
    class NoPlace:
        def preparing(self, _: Selection) -> None:
            raise MachineError("no place to verify in")

        def __call__(self, *_: object) -> VerifiedLock:
            return VerifiedLock(where="nowhere")

    monkeypatch.setattr(locking, "only_writer", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(locking, "note_verified", lambda *_: None)
    assert lock(project, NoPlace()).built is False
    with pytest.raises(MachineError, match="no place to verify in"):
        lock(project, NoPlace(), upgrade=True)


def test_no_attempt_is_made_once_no_lock_can_be_verified(project, monkeypatch):
    attempts = []

    class NoPlaceLater:
        @contextlib.contextmanager
        def preparing(self, _: Selection) -> Iterator[Callable[[], None]]:
            def refuse() -> None:
                if attempts:
                    raise MachineError("no place was made")

            yield refuse

    def attempt(inputs, *_):
        attempts.append(inputs)
        return Failure(inputs=inputs, error=ResolutionError("try another"))

    monkeypatch.setattr("envbuild.lock.attempt.attempt", attempt)
    monkeypatch.setattr("envbuild.lock.search.search.Search.after", lambda _, failure: failure.inputs)
    monkeypatch.setattr(locking, "only_writer", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(locking, "refuse_unwritable", lambda *_: None)
    monkeypatch.setattr(locking, "tidy", lambda *_: None)
    (project / "store").chmod(0o755)
    with pytest.raises(MachineError, match="no place was made"):
        lock(project, NoPlaceLater(), upgrade=True)
    assert len(attempts) == 1


def test_nothing_to_do_imports_nothing_that_only_a_new_lock_needs():
    slow = {
        "tomlkit",
        "elftools",
        "obstore",
        "docker",
        "urllib.request",
        "envbuild.lock.attempt",
        "envbuild.lock.search.search",
    }
    code = "import sys, envbuild.cli.main, envbuild.cli.lock; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert slow & set(loaded) == set()


@pytest.mark.parametrize("change", ["upgrade", "definition"])
def test_lock_that_is_to_be_made_needs_it(project, change):
    if change == "definition":
        write_stack(project, "s", {"torch": {"version": ">=2.13.0"}})

    def make() -> None:
        with pytest.raises(MachineError, match="no permission to write") as caught:
            lock(project, upgrade=change == "upgrade")
        assert str(project / "store") in caught.value.what

    assert unprivileged(make) == 0


def test_damaged_lock_is_refused_all_the_same(project):
    (project / "lockfiles" / "s" / BASE / "main.txt").write_text("evil==1\n")

    def look() -> None:
        with pytest.raises(CheckRefusedError):
            lock(project)

    assert unprivileged(look) == 0


def test_branch_that_moved_is_asked_for(project, monkeypatch):
    asked = []
    monkeypatch.setattr(existing, "moved_branches", lambda *_: asked.append("asked") or ["lib: branch main moved"])

    def look() -> None:
        with pytest.raises(MachineError):
            lock(project)
        assert asked == ["asked"]

    assert unprivileged(look) == 0


@pytest.mark.parametrize(
    "request_",
    [
        LockRequest(torch_build="cu130"),
        LockRequest(torch_build="index"),
        LockRequest(pins={"torch": "2.12.0"}),
        LockRequest(pins={"torch": "2.12.1"}),
        LockRequest(as_of="2026-01-02"),
        LockRequest(as_of="now"),
        LockRequest(allow=("glibc",)),
        LockRequest(allow=("driver", "glibc")),
    ],
)
def test_everything_that_the_command_line_adds_is_an_input(tmp_path, request_):
    write_base(tmp_path)
    write_stack(tmp_path, "s", {"torch": {"version": "==2.13.0"}})
    selection = Selection(Catalog.open(tmp_path), "s", BASE, "cpu")
    plain = inputs_digest(selection, LockRequest())
    assert inputs_digest(selection, request_) not in (plain, inputs_digest(selection, LockRequest(allow=("sm-floor",))))
    # The base's own build, asked for by name, is the same build; the order of codes decides nothing.
    assert inputs_digest(selection, LockRequest(torch_build="cpu")) == plain
    other = LockRequest(allow=tuple(reversed(request_.allow)) * 2)
    assert inputs_digest(selection, other) == inputs_digest(selection, LockRequest(allow=request_.allow))


def test_a_verified_lock_names_the_image_of_its_base(project):
    verified = VerifiedLock(
        where=f"base {BASE}", imported=("torch",), base_image=DIGEST, base_made_at="2026-01-02T03:04:05Z"
    )
    for folder in (project / "store", project / "lockfiles/s", project / "lockfiles/s" / BASE):
        folder.chmod(0o755)
    actual = lock(project, lambda *_: verified)
    assert actual.built is False
    assert actual.directory.lock.base_image == DIGEST
    assert actual.directory.lock.base_made_at == "2026-01-02T03:04:05Z"
    assert f'base_image = "{DIGEST}"' in (actual.directory.path / "stack.lock.toml").read_text()


def test_a_place_that_takes_no_lock_is_refused_before_it_is_made(project, monkeypatch):
    monkeypatch.setattr(locking, "only_writer", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(LockRun, "new_lock", lambda *_: pytest.fail("it was made"))
    selection = Selection(Catalog.open(project), "s", BASE, "cpu")
    context = Context(
        store=LocalStore(project / "store", SilentReporter()), site=load_site({}), reporter=SilentReporter()
    )
    with pytest.raises(MachineError) as caught:
        lock_stack(selection, LockRequest(), LockOptions(path=Path("/proc/x")), context)
    assert caught.value.what == "cannot write /proc/x"
