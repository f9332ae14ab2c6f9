"""Verification: the choice of a place, what is installed, and which results are kept."""

import contextlib
import sys
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.locks import DIGEST, make_lock
from helpers.simple_index import make_sdist

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.context import Context
from envbuild.catalog.models import Target
from envbuild.catalog.recipe import WheelRecipe
from envbuild.catalog.site import load_site
from envbuild.core.errors import BuildError, MachineError, NetworkError, ResolutionError
from envbuild.core.process import Finished, run
from envbuild.core.progress import SilentReporter
from envbuild.lock.components.downloads import FILE
from envbuild.lock.lockfile import LockDirectory, LockedComponent, read_lock
from envbuild.store.local import LocalStore
from envbuild.sync import failure_packages
from envbuild.sync.imports import MARK, ImportProbe
from envbuild.sync.places import Filled
from envbuild.sync.verify import Verifier, _first_line

FAILED = """\
Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/torch/__init__.py", line 3, in <module>
    import numpy
ModuleNotFoundError: No module named 'numpy'
"""


class FakePlace:
    """A place in which an import ends as the test says."""

    def __init__(self, where, *, problem="", prepare=None, fill=None, output="", status=0):
        self.where = self.key = where
        self._problem, self._prepare, self._fill = problem, prepare, fill
        self._finished = Finished(status=status, output=output, seconds=0.1)
        self.trials = []
        self.prepared = 0

    def problem(self):
        return self._problem

    def prepare(self):
        self.prepared += 1
        if self._prepare:
            raise self._prepare

    @contextlib.contextmanager
    def fill(self, trial, logs):
        self.trials.append(trial)
        logs.mkdir(parents=True)
        if self._fill:
            raise self._fill
        site_packages = logs / "site-packages"
        (site_packages / "torch-2.13.0.dist-info").mkdir(parents=True)
        (site_packages / "torch-2.13.0.dist-info/RECORD").write_text("torch/__init__.py,,\n")
        probe = ImportProbe(python="python", program="probe", run=lambda *_, **__: self._finished, logs=logs)
        yield Filled(venv="/venv", where=f"{self.where} (filled)", site_packages=site_packages, probe=probe)
        self.installed = {str(path.relative_to(site_packages)) for path in site_packages.rglob("*")}


def imported(where, **more):
    return FakePlace(where, output=f'{MARK}{{"imported": true, "placeholder": ""}}\n', **more)


def broken(where, status=1):
    return FakePlace(where, output=f'{FAILED}{MARK}{{"imported": false}}\n', status=status)


class Selected:
    """As much of a selection, and of its catalog, as is read."""

    base = Catalog.open(Path("/nonexistent")).base("debian12")
    target = Target(summary="x", device="cuda", sm=("90",), platform="linux/amd64")

    def __init__(self, folders=(), **extension_modules):
        self.folders, self.extension_modules, self.catalog = folders, extension_modules, self

    def wheel_recipe(self, package):
        module = self.extension_modules.get(package)
        return WheelRecipe(summary="x", extension_module=module, python_folders=self.folders if module else ())


@pytest.fixture
def lock(tmp_path):
    make_lock(tmp_path / "lock")
    return read_lock(tmp_path / "lock")


@pytest.fixture
def verifier(tmp_path):
    reporter = SilentReporter()

    def make(*places):
        context = Context(store=LocalStore(tmp_path / "store", reporter), site=load_site(), reporter=reporter)
        return Verifier(context, places_for=lambda *_: places, without="envbuild lock --no-verify")

    return make


def test_the_first_place_that_can_be_had_is_taken(verifier, lock):
    no_tool = imported("no tool", problem="mmdebstrap is missing")
    no_archive = imported("no archive", prepare=NetworkError("it cannot be reached", why="DNS"))
    good, later = imported("good"), imported("later")
    verify = verifier(no_tool, no_archive, good, later)
    found = verify(Selected(), lock)
    assert (found.where, found.imported, found.findings) == ("good (filled)", ("torch",), ())
    assert [len(place.trials) for place in (no_tool, no_archive, good, later)] == [0, 0, 1, 0]


def test_a_result_is_kept_by_lock_and_place(verifier, lock, tmp_path):
    place = imported("good")
    first = verifier(place)(Selected(), lock)
    assert verifier(place)(Selected(), lock) == first
    assert (len(place.trials), place.prepared) == (1, 1), "the second time nothing is made and nothing is installed"
    assert list((tmp_path / "store/logs").glob("verify-*")) == []
    gone = imported("gone", prepare=MachineError("no"))
    assert verifier(gone, place)(Selected(), lock) == first
    assert gone.prepared == 0, "a result that is there is taken before a place is made"
    other = imported("other")
    verifier(other)(Selected(), lock)
    assert len(other.trials) == 1
    make_lock(tmp_path / "another", main="torch==2.13.0+cpu\n")
    verifier(place)(Selected(), read_lock(tmp_path / "another"))
    assert len(place.trials) == 2


def test_an_import_that_fails_is_a_finding_with_its_packages_and_is_kept(verifier, lock, tmp_path, monkeypatch):
    place = broken("here")
    (finding,) = verifier(place)(Selected(), lock).findings
    assert finding.code == "import"
    assert finding.what == "torch of torch does not import: ModuleNotFoundError: No module named 'numpy'"
    assert (finding.packages, finding.missing_module) == (("torch",), "numpy")
    assert verifier(place)(Selected(), lock).findings == (finding,)
    assert len(place.trials) == 1
    # What a failure is about, other code may see otherwise; what passed, passed.
    good = imported("good")
    verifier(good)(Selected(), lock)
    code = tmp_path / "code.py"
    code.write_text("other")
    monkeypatch.setattr(failure_packages, "__file__", str(code))
    verifier(place)(Selected(), lock)
    verifier(good)(Selected(), lock)
    assert [len(item.trials) for item in (place, good)] == [2, 1]


def test_what_may_end_otherwise_another_time_is_not_kept(verifier, lock):
    """A crash, and a build: this machine may have had no compiler."""
    crashed = broken("crashed", status=-11)
    unbuilt = FakePlace("unbuilt", fill=BuildError("x", why="error: Failed to build `torch==2.13.0+cpu`"))
    for place in (crashed, unbuilt):
        for _ in range(2):
            (finding,) = verifier(place)(Selected(), lock).findings
        assert len(place.trials) == 2
    assert (finding.code, finding.packages) == ("install", ("torch",))
    assert finding.what == "torch does not install: Failed to build `torch==2.13.0+cpu`"


def test_an_import_without_a_verdict_is_no_finding_and_is_not_kept(verifier, lock):
    """This machine may have had no memory."""
    killed = broken("killed", status=-9)
    for _ in range(2):
        with pytest.raises(MachineError, match="cannot import torch of torch: its process was ended by SIGKILL"):
            verifier(killed)(Selected(), lock)
    assert len(killed.trials) == 2
    assert verifier(imported("killed"))(Selected(), lock).findings == ()


def test_without_a_place_nothing_is_verified(verifier, lock):
    verify = verifier(imported("a", problem="no bwrap"), imported("b", prepare=MachineError("no mmdebstrap", why="y")))
    with pytest.raises(MachineError, match="cannot be verified on this machine") as caught:
        verify(Selected(), lock)
    assert caught.value.why == "a: no bwrap\nb: no mmdebstrap: y"
    assert caught.value.fix.endswith("\nenvbuild lock --no-verify")


def test_a_place_is_made_while_a_lock_is(verifier, lock):
    """And what prevents it is known then; the cure of what failed inside is shown."""
    good = imported("good")
    verify = verifier(imported("no archive", prepare=NetworkError("no archive", why="DNS")), good)
    with verify.preparing(Selected()):
        wait([verify._preparing])
        assert (good.prepared, good.trials) == (1, [])
        assert verify(Selected(), lock).where == "good (filled)"
    assert good.prepared == 1
    gone = NetworkError("uv does not install Python 3.12", why="404", fix="Name a mirror: UV_PYTHON_INSTALL_MIRROR.")
    verify = verifier(imported("base x", prepare=gone), imported("machine", problem="old glibc"))
    with verify.preparing(Selected()) as refuse_without_place:
        wait([verify._preparing])
        with pytest.raises(MachineError) as caught:
            refuse_without_place()
    assert caught.value.why.splitlines() == [
        "base x: uv does not install Python 3.12: 404", gone.fix, "machine: old glibc",
    ]  # fmt: skip
    with pytest.raises(MachineError, match="cannot be verified"):
        verifier(imported("a", problem="no bwrap")).preparing(Selected()).__enter__()


def test_a_place_that_is_not_needed_any_more_is_given_up(verifier, tmp_path):
    def forever():
        run([sys.executable, "-c", "import time; time.sleep(3600)"], what="make a base")

    class Slow(FakePlace):
        def prepare(self):
            forever()

    verify = verifier(Slow("slow"))
    with contextlib.suppress(ResolutionError), verify.preparing(Selected()):
        work = verify._preparing
        raise ResolutionError("no solution")
    assert work.done()


class Wheel:
    """As much of a built wheel as is read."""

    wheel = "kernels.whl"
    record = SimpleNamespace(digest="sha256:ab")


def test_what_is_not_built_is_stubbed_or_left_out(verifier, tmp_path):
    sdists = {name: LockedComponent(asked="x", version="1", phase="compile", sdist=DIGEST) for name in ("te", "ssm")}
    torch = LockedComponent(asked="x", version="2.13.0+cpu", phase="main", modules=("torch",))
    plain = make_lock(tmp_path / "lock", main="torch==2.13.0+cpu\nte==1\nssm==1\n")
    compiled = plain.model_copy(update={"components": {"torch": torch, **sdists}})
    lock = LockDirectory(tmp_path / "lock", compiled)
    place, stubbing = imported("good"), Selected(te="te_torch")

    def verify(selected, **built):
        verify = verifier(place)
        verify.wheels_for = lambda *_: built
        return verify(selected, lock)

    assert verify(stubbing).stubbed == ("te",)
    (stubbed,) = place.trials
    assert (stubbed.phases, stubbed.stubs) == (("main", "compile", "git"), {"te": "te_torch"})
    assert (stubbed.scope.leave_out, stubbed.import_scope.leave_out) == ({"te", "ssm"}, {"ssm"})
    assert verify(Selected()).stubbed == ()
    assert (place.trials[1].phases, place.trials[1].stubs) == (("main", "git"), {})
    # A result with the wheel is another one; that with the stub is kept all the same.
    assert verify(stubbing, te=Wheel, ssm=Wheel).stubbed == ()
    assert (place.trials[2].stubs, place.trials[2].scope.leave_out) == ({}, set())
    assert verify(stubbing).stubbed == ("te",)
    assert len(place.trials) == 3


def test_a_stub_has_the_python_code_of_its_sources(verifier, tmp_path):
    component = LockedComponent(asked="x", version="1", phase="compile", sdist=DIGEST)
    torch = LockedComponent(asked="x", version="2.13.0+cpu", phase="main", modules=("torch",))
    plain = make_lock(tmp_path / "lock", main="torch==2.13.0+cpu\nssm==1\n")
    lock = LockDirectory(tmp_path / "lock", plain.model_copy(update={"components": {"torch": torch, "ssm": component}}))
    place = imported("good")
    verify = verifier(place)
    sdist = make_sdist(tmp_path, "ssm", "1", files={"ssm/ops/scan.py": "import ssm_cuda\n"}).read_bytes()
    verify.context.store.get_or_build("files", DIGEST, lambda folder: (folder / FILE).write_bytes(sdist))
    assert verify(Selected(folders=("ssm", "not_in_this_release"), ssm="ssm_cuda"), lock).stubbed == ("ssm",)
    assert {"ssm/ops/scan.py", "ssm_cuda.abi3.so", "ssm-1.dist-info/RECORD"} <= place.installed
    assert not [*(tmp_path / "store/staging").iterdir()]


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (
            "cannot make base b: mmdebstrap exited with status 25: W: unsandboxed\nE: no such suite\nE: apt failed",
            "cannot make base b: mmdebstrap exited with status 25: E: no such suite",
        ),
        ("the base's archive is missing\nE: more", "the base's archive is missing"),
    ],
)
def test_a_place_that_cannot_be_had_is_named_with_the_error_and_not_a_warning(problem: str, line: str) -> None:
    assert _first_line(problem) == line
