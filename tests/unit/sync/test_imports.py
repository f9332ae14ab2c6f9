"""The import check, with this very Python."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.import_probe import here, probe_of

from envbuild.core import process
from envbuild.core.errors import CheckRefusedError
from envbuild.core.process import Finished
from envbuild.core.progress import SilentReporter
from envbuild.lock.inputs.request import is_curable
from envbuild.sync import install_target
from envbuild.sync.driver_start import make_stub
from envbuild.sync.imports import MARK, Absent, NotImported, try_imports
from envbuild.sync.install_target import InconclusiveError


def check(modules, tmp_path, python=sys.executable, run=here, **more):
    probe = replace(probe_of(tmp_path, python), run=run)
    return try_imports(modules, probe, SilentReporter(), **more).refuse_failed()


def test_every_failed_module_is_reported_with_its_component_and_cause(tmp_path):
    with pytest.raises(CheckRefusedError) as caught:
        check({"good": ("json",), "bad": ("no_such_module_1", "json.no_such_part")}, tmp_path)
    assert caught.value.what == "2 of 3 modules of the stack do not import"
    assert "no_such_module_1 (bad)" in caught.value.why
    assert "ModuleNotFoundError: No module named 'json.no_such_part'" in caught.value.why
    assert "json (good)" not in caught.value.why


def test_import_that_ends_the_process_is_reported(tmp_path, python_with):
    with pytest.raises(CheckRefusedError, match="do not import") as caught:
        check({"broken": ("crash",)}, tmp_path, python_with(crash="import os; os.kill(os.getpid(), 11)"))
    assert "was ended by SIGSEGV" in caught.value.why


def test_an_import_does_not_help_another_one(tmp_path, python_with):
    python = python_with(first="import sys, types; sys.modules['second'] = types.ModuleType('second')")
    with pytest.raises(CheckRefusedError) as caught:
        check({"a": ("first", "second")}, tmp_path, python)
    assert caught.value.what == "1 of 2 modules of the stack do not import"
    assert "No module named 'second'" in caught.value.why


def test_a_module_that_another_is_below_is_imported_by_it(tmp_path):
    logs = []

    def counted(argv, *, log, **more):
        logs.append(log.name)
        return here(argv, log=log, **more)

    found = check({"a": ("json", "json.decoder", "xml"), "b": ("xml.dom", "xmlrpc")}, tmp_path, run=counted)
    assert found.imported == ("json", "json.decoder", "xml", "xml.dom", "xmlrpc")
    assert sorted(logs) == ["import-json.decoder.log", "import-xml.dom.log", "import-xmlrpc.log"]
    with pytest.raises(CheckRefusedError) as caught:
        check({"a": ("json", "json.no_such_part", "nope", "nope.part")}, tmp_path)
    assert caught.value.what == "3 of 4 modules of the stack do not import"
    assert "json (a)" not in caught.value.why


def test_neither_the_current_directory_nor_the_environment_helps(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CheckRefusedError):
        check({"a": ("only_here",)}, tmp_path)


@pytest.fixture
def python_with(tmp_path):
    """A Python that finds these modules, although it runs isolated."""

    def make(**sources):
        folder = tmp_path / "modules"
        folder.mkdir()
        for name, text in sources.items():
            path = folder / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
        program.chmod(0o755)
        return str(program)

    return make


def reasons(found):
    return {item.module: item.reason for item in found.not_checked}


def refusal(modules, tmp_path, python, **more):
    with pytest.raises(CheckRefusedError) as caught:
        check({"a": modules}, tmp_path, python, **more)
    return caught.value.why


# ---- imports without a verdict


def imported(argv, **more):
    return Finished(status=0, output=f'{MARK}{{"imported": true}}\n', seconds=0.1)


def without_a_verdict(module, times, log_names, otherwise=here, **end):
    """Runs things, and does so many times as if the module ran past its time, or was killed."""

    def run(argv, *, what, log, timeout_seconds):
        log_names.append((log.name, timeout_seconds))
        if module in argv and sum(name == log.name for name, _ in log_names) <= times:
            log.parent.mkdir(exist_ok=True)
            log.write_text(STACK)
            if end:
                return Finished(**{"output": "", "seconds": 1.0, **end})
            raise InconclusiveError(f"cannot {what}: python ran longer than {timeout_seconds:.0f} s")
        return otherwise(argv, what=what, log=log, timeout_seconds=timeout_seconds)

    return run


STACK = """Timeout (0:09:00)!
Thread 0x00007f (most recent call first):
  File "/venv/lib/python3.12/site-packages/slow/__init__.py", line 2 in forever
"""


SHORT = {"status": 1, "output": "Traceback (most recent call last):\nMemoryError\n\nenvbuild-import: {}\n"}


# What a machine prints that has too little of something, or that waits for another one.
SHORTAGES = (
    "OSError: [Errno 122] Disk quota exceeded: '/home/u/.cache/x'",
    "OSError: [Errno 116] Stale file handle: '/nfs/x'",
    "OSError: [Errno 5] Input/output error",
    "urllib.error.URLError: <urlopen error timed out>",
    "ImportError: libtorch_cuda.so: failed to map segment from shared object",
    "libgomp: Thread creation failed: Resource temporarily unavailable",
    "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 64: Resource temporarily unavailable",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "  what():  Resource temporarily unavailable",
)


@pytest.mark.parametrize(
    "end",
    [
        {},
        *({"status": status} for status in (-9, 137, -15, 143, -1, -7, -24)),
        SHORT,
        *({"status": -6, "output": f"{line}\nFatal Python error: Aborted\n"} for line in SHORTAGES),
    ],
    ids=lambda end: next(iter(str(end.get("output", end.get("status", "slow"))).splitlines())),
)
def test_an_import_without_a_verdict_is_repeated_alone_and_for_longer(tmp_path, end):
    runs = []
    run = without_a_verdict("json", 1, runs, imported, **end)
    found = check({"a": ("json", "xml", "html")}, tmp_path, run=run)
    assert (found.imported, found.failed) == (("json", "xml", "html"), ())
    assert runs[-1] == ("import-json.log", 1800), "after all others"
    assert sorted(runs[:-1]) == [(f"import-{name}.log", 600) for name in ("html", "json", "xml")]


@pytest.mark.parametrize(
    ("end", "cause"),
    [({}, "did not end within 1800 s"), ({"status": -9}, "was ended by SIGKILL"), (SHORT, "MemoryError")],
    ids=["slow", "killed", "short-of-memory"],
)
def test_an_import_that_never_gets_a_verdict_is_no_failed_one(tmp_path, end, cause):
    with pytest.raises(InconclusiveError) as caught:
        check({"a": ("json", "no_such_module")}, tmp_path, run=without_a_verdict("json", 2, [], **end))
    error = caught.value
    assert (error.exit_code, is_curable(error)) == (11, False)
    assert error.what.startswith("cannot import json of a: ")
    assert cause in error.what
    assert end or "line 2 in forever" in error.why
    assert "nothing was decided" in error.fix


def test_hanging_import_is_ended_with_its_calls(tmp_path, python_with, monkeypatch):
    log = tmp_path / "logs" / "import-waits.log"

    def hanging():
        """Its time is over each time it has written down where it is, however long that takes."""
        return 3600.0 * (log.read_text().count("in forever") if log.exists() else 0)

    monkeypatch.setattr(install_target, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=hanging))
    python = python_with(waits="import time\ndef forever():\n    time.sleep(3600)\nforever()\n", fine="")
    with pytest.raises(InconclusiveError, match=r"did not end within 0\.6 s") as caught:
        check({"a": ("waits", "fine")}, tmp_path, python)
    assert "in forever" in caught.value.why


def test_of_a_crash_the_cause_is_how_it_ended():
    failure = f"was ended by SIGSEGV:\n{STACK}"
    crash = NotImported(module="a", component="a", failure=failure, log=Path("x"), raised=False)
    assert crash.cause == "was ended by SIGSEGV"


# ---- machines without a GPU


WITHOUT_A_GPU = (
    "RuntimeError('Found no NVIDIA driver on your system. Please check')",
    "RuntimeError('No CUDA GPUs are available')",
    "ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')",
    "OSError('libcuda.so.1: cannot open shared object file')",
    "RuntimeError('0 active drivers ([]). There should only be one.')",
)


def test_a_module_that_needs_a_gpu_is_not_checked_where_there_is_none(tmp_path, python_with):
    raised = {f"gpu{number}": f"raise {error}" for number, error in enumerate(WITHOUT_A_GPU)}
    wrap = "try:\n    raise {}\nexcept Exception as e:\n    raise ImportError('no kernels') from e\n"
    wrapped = {f"wrapped{number}": wrap.format(error) for number, error in enumerate(WITHOUT_A_GPU)}
    found = check({"a": (*raised, *wrapped, "json")}, tmp_path, python_with(**raised, **wrapped))
    assert found.imported == ("json",)
    assert set(reasons(found)) == {*raised, *wrapped}
    for number, error in enumerate(WITHOUT_A_GPU):
        for name in (f"gpu{number}", f"wrapped{number}"):
            reason = reasons(found)[name]
            assert reason.startswith("it needs a GPU, and there is none here: "), error
            assert error.partition("'")[2].rstrip("')") in reason
    assert {item.component for item in found.not_checked} == {"a"}


def test_a_real_failure_is_never_taken_for_a_missing_gpu(tmp_path, python_with):
    sources = (
        # An error of its own while another is handled is its own.
        "try:\n    raise RuntimeError('Found no NVIDIA driver')\nexcept RuntimeError:\n    import no_such_module\n",
        "try:\n    raise RuntimeError('No CUDA GPUs are available')\nexcept RuntimeError:\n    {}['x']\n",
        "raise ModuleNotFoundError(\"No module named 'libcuda.so'\")",
        "raise ImportError(\"cannot import name 'f' from 'm' (libcuda.so.1)\")",
        "raise ImportError('libcudart.so.13: cannot open shared object file: No such file or directory')",
        "raise AssertionError('Torch not compiled with CUDA enabled')",
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
    )
    modules = {f"bad{number}": source for number, source in enumerate(sources)}
    why = refusal(tuple(modules), tmp_path, python_with(**modules))
    assert [f"{name} (a)" for name in modules if f"{name} (a)" not in why] == []


STUBBED = "OSError('libcuda.so.1: cannot open shared object file: No such file or directory')"


def test_a_module_that_loads_the_driver_is_imported_with_a_stub_of_it(tmp_path, python_with):
    with_stub = {
        "core": "",
        # What the stub does not have says nothing of the module.
        "asks": "raise ImportError('/x/core.so: undefined symbol: cuMemCreate')",
        "lacks": "raise ImportError('/x/core.so: undefined symbol: ncclCommInit')",
    }
    first = f"import os\nif 'STUB' not in os.environ:\n    raise {STUBBED}\n"
    probe = probe_of(tmp_path, python_with(**{name: f"{first}{more}\n" for name, more in with_stub.items()}))

    def run_with_stub(argv, **more):
        return here(["env", "STUB=1", *argv], **more)

    found = try_imports({"a": tuple(with_stub)}, replace(probe, run_with_stub=run_with_stub), SilentReporter())
    assert found.imported == ("core",)
    assert list(reasons(found)) == ["asks"]
    (failed,) = found.failed
    assert failed.module == "lacks"
    assert "ncclCommInit" in failed.output


TRITON = """
class Driver:
    def __init__(self): self.active = None
    def set_active(self, driver): self.active = driver
driver = Driver()
"""
KERNEL = """
import triton.runtime
active = triton.runtime.driver.active
if active is None:
    raise RuntimeError('0 active drivers ([]). There should only be one.')
measure = active.get_benchmarker()
"""


def test_a_kernel_is_defined_with_a_stub_of_the_driver(tmp_path, python_with):
    more = {"kernel": "", "asks": "active.get_current_target()"}
    python = python_with(triton__runtime=TRITON, **{name: f"{KERNEL}{last}\n" for name, last in more.items()})
    make_stub(here, tmp_path / "driver", str(tmp_path / "driver"), tmp_path / "log")

    def run_with_stub(argv, **more):
        return here(["env", f"LD_LIBRARY_PATH={tmp_path}/driver", *argv], **more)

    probe = replace(probe_of(tmp_path, python), run_with_stub=run_with_stub)
    found = try_imports({"a": tuple(more)}, probe, SilentReporter())
    assert (found.imported, found.failed) == (("kernel",), ())
    assert list(reasons(found)) == ["asks"]


def test_without_a_compiler_there_is_no_stub(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sh").symlink_to("/bin/sh")
    assert not make_stub(here, tmp_path / "driver", str(tmp_path / "driver"), tmp_path / "log")


# ---- what was left out, and what is not what it seems


def test_a_module_that_needs_a_phase_that_was_left_out_is_not_checked(tmp_path, python_with):
    python = python_with(bridge="import engine.torch", kernels="import tile_lang")
    absent = Absent(phases=("compile",), packages=frozenset({"tile-lang"}), modules=frozenset({"engine.torch"}))
    found = check({"a": ("bridge", "kernels")}, tmp_path, python, absent=absent)
    assert reasons(found) == {
        "bridge": "it needs engine, of phase compile, which is not installed",
        "kernels": "it needs tile_lang, of phase compile, which is not installed",
    }
    assert "No module named 'engine'" in refusal(("bridge",), tmp_path, python)
    other = Absent(phases=("compile",), packages=frozenset({"engine-room"}), modules=frozenset({"engines"}))
    assert "No module named 'engine'" in refusal(("bridge",), tmp_path, python, absent=other)


def test_placeholders_are_not_checked(tmp_path, python_with):
    python = python_with(
        mocked="import sys\nfrom unittest.mock import MagicMock\nsys.modules['mocked'] = MagicMock()\n",
        made="import sys, types\nsys.modules['made'] = types.ModuleType('made')\n",
        classy="import sys\nclass Unavailable: pass\nsys.modules['classy'] = Unavailable\n",
    )
    (tmp_path / "modules/leftover/data").mkdir(parents=True)
    (tmp_path / "modules/leftover/data/readme.txt").write_text("")
    (tmp_path / "modules/shared/part").mkdir(parents=True)
    (tmp_path / "modules/shared/part/__init__.py").write_text("")
    found = check({"a": ("mocked", "made", "classy", "leftover", "shared", "shared.part", "sys")}, tmp_path, python)
    assert found.imported == ("shared", "shared.part", "sys")
    assert reasons(found) == {
        "mocked": "a placeholder: an object of class MagicMock stands in its place",
        "made": "a placeholder: something else made it up when it was imported",
        "classy": "a placeholder: an object of class type stands in its place",
        "leftover": "a placeholder: a folder without any Python file",
    }
