"""The start check, with this very Python, the real smoke runner, and a torch and a driver of the test's own."""

import shutil
import sys

import pytest
from helpers.errors import error_of
from helpers.fake_torch import ASKS, TORCH
from helpers.import_probe import here

from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.core.errors import CheckRefusedError
from envbuild.sync.driver_start import DRIVER, MANAGEMENT, MARK, make_stub, start_driver, variables_with_stub
from envbuild.sync.zipapp import smoke_bytes


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """Both libraries of the driver, compiled once."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in (DRIVER, MANAGEMENT):
        assert make_stub(here, folder, str(folder), folder / "log", name)
    return str(folder)


@pytest.fixture
def start(tmp_path, stubs):
    """Starts a driver with this source; on CUDA, with the stubs."""

    def run_start(source: str, device: Device = Device.CUDA, torch: str = TORCH) -> str:
        smoke = shutil.copytree(data_root() / "smoke", tmp_path / "smoke")
        (smoke / "envbuild_smoke/drivers/mcore/__init__.py").write_text(source)
        runner = tmp_path / "smoke.pyz"
        runner.write_bytes(smoke_bytes(smoke))
        packages = tmp_path / "packages"
        (packages / "torch").mkdir(parents=True)
        (packages / "torch/__init__.py").write_text(torch)
        variables = {"PYTHONPATH": str(packages)}
        if device is Device.CUDA:
            variables = variables_with_stub(variables, stubs)

        def run(argv, **more):
            # Not isolated: the packages have to be found.
            words = [word for word in argv if word != "-I"]
            return here(["env", *(f"{name}={value}" for name, value in variables.items()), *words], **more)

        return start_driver(Driver.MCORE, device, sys.executable, run, tmp_path, str(runner))

    return run_start


@pytest.mark.parametrize("device", Device)
def test_a_driver_that_imports_can_be_started(start, device):
    assert start("import torch\n", device) == ""


def test_a_driver_is_imported_with_the_variables_of_ranks(start):
    source = "import os\nassert (os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS']) == ('', '1')\n"
    assert start(source, Device.CPU) == ""


@pytest.mark.parametrize(
    "source",
    [
        f"{ASKS}torch.cuda.get_device_capability()\n",
        # Who goes on without an answer has started CUDA all the same.
        f"{ASKS}try:\n        torch.cuda.get_device_capability()\n    except RuntimeError:\n        pass\n",
    ],
)
def test_a_driver_whose_imports_start_cuda_is_refused_with_the_line(start, source):
    error = error_of(CheckRefusedError, start, source)
    assert error.what == "importing driver mcore of the stack starts CUDA"
    assert "mcore/__init__.py:" in error.why
    assert "torch.cuda.get_device_capability()" in error.why
    assert "another version" in error.fix


@pytest.mark.parametrize("after", ["started = True", "cuda._is_in_bad_fork = lambda: os.kill(os.getpid(), 9)"])
def test_cuda_that_was_started_past_torchs_own_function_is_found(start, after):
    """Such as by counting GPUs without NVML; and where a process that is forked then does not live to say so."""
    error = error_of(CheckRefusedError, start, f"import os, torch\ntorch.{after}\n")
    assert error.what == "importing driver mcore of the stack starts CUDA"


def test_a_library_that_starts_the_driver_itself_is_found(start):
    """Torch does not know of it, and every rank would fail: nvidia-cutlass-dsl, imported by mamba-ssm, did it so."""
    error = error_of(CheckRefusedError, start, "import ctypes, torch\nctypes.CDLL('libcuda.so.1').cuInit(0)\n")
    assert error.what == "importing driver mcore of the stack starts CUDA"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise SystemExit(0)\n", "SystemExit: 0"),
        ("raise ImportError('/x/core.so: undefined symbol: ncclCommInit')\n", "ncclCommInit"),
        ("import os\nos.kill(os.getpid(), 11)\n", "Its process was ended by SIGSEGV:"),
        ("import os\nos._exit(0)\n", "exited with status 0"),
    ],
)
def test_a_driver_that_does_not_import_is_refused_with_the_cause(start, source, words):
    error = error_of(CheckRefusedError, start, source)
    assert error.what == "driver mcore of the stack does not start"
    assert words in error.why
    assert MARK not in error.why
    assert "[requirements]" in error.fix
    assert error.log.is_file()


def test_an_environment_whose_torch_does_not_import_is_refused(start):
    assert "no libtorch" in error_of(CheckRefusedError, start, "", torch="raise ImportError('no libtorch')").why


@pytest.mark.parametrize(
    "error",
    [
        "ImportError('/x/core.so: undefined symbol: cuMemCreate')",
        "RuntimeError('no kernels') from ImportError('/x/core.so: undefined symbol: nvmlDeviceGetName')",
    ],
)
def test_what_only_the_stubs_lack_is_not_checked(start, error):
    assert start(f"raise {error}\n").startswith("it asks for more of the GPU's driver than the stub here has: ")


def test_a_driver_that_finds_no_training_would_begin_is_refused(start):
    source = "def check_start():\n    raise RuntimeError('no make')\n"
    error = error_of(CheckRefusedError, start, source, Device.CPU)
    assert error.what == "driver mcore of the stack does not start"
    assert "RuntimeError: no make" in error.why
