"""Which packages a failed import is about: from texts as Python and uv print them."""

import pytest

from envbuild.sync.failure_packages import InstalledPackages, cause_of_installation, of_import, of_installation

FILES = {
    "torch-2.10.0": ["torch/__init__.py", "torch/onnx/__init__.py", "torch/_C.cpython-312-x86_64-linux-gnu.so"],
    "nvidia_modelopt-0.35.0": ["modelopt/__init__.py", "modelopt/torch/__init__.py", "modelopt/torch/_deploy.py"],
    "nemo_toolkit-2.5.0": ["nemo/__init__.py", "nemo/collections/llm/__init__.py"],
    "megatron_core-0.14.0": ["megatron/core/__init__.py", "megatron/core/export.py"],
    "megatron_bridge-0.4.0": ["megatron/bridge/__init__.py"],
    "leptonai-0.47.1": ["leptonai/__init__.py", "leptonai/api/__init__.py"],
    "nemo_run-0.6.0": ["nemo_run/__init__.py", "nemo_run/core/execution/lepton.py"],
    "transformers-4.57.6": ["transformers/__init__.py", "transformers/utils/versions.py", "transformers/utils/x.py"],
    "huggingface_hub-1.0.1": ["huggingface_hub/__init__.py"],
    "numpy-2.3.1": ["numpy/__init__.py", "numpy/_core/multiarray.py"],
    "numba-0.61.0": ["numba/__init__.py"],
    "pyarrow-26.0.0": ["pyarrow/__init__.py", "pyarrow/lib.cpython-312-x86_64-linux-gnu.so"],
    "nvidia_cudnn_cu12-9.10": ["nvidia/cudnn/__init__.py"],
    "nvidia_nccl_cu12-2.27": ["nvidia/nccl/__init__.py"],
    "protobuf-6.32": ["google/protobuf/__init__.py"],
    "googleapis_common_protos-1.7": ["google/api/annotations_pb2.py"],
}


@pytest.fixture
def installed(tmp_path):
    for name, files in FILES.items():
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        (folder / "RECORD").write_text("".join(f"{file},sha256=aa,1\n" for file in [*files, f"{folder.name}/METADATA"]))
    return InstalledPackages(tmp_path)


SITE = "/var/cache/envbuild/staging/verify-1-2/venv/lib/python3.12/site-packages"


def trace(*files, error):
    """A traceback through files of the environment, the innermost last."""
    lines = ["Traceback (most recent call last):", '  File "/x/import_module.py", line 78, in main']
    lines += ['  File "/usr/lib/python3.12/importlib/__init__.py", line 90, in import_module']
    lines += ['  File "<frozen importlib._bootstrap>", line 488, in _call_with_frames_removed']
    for file in files:
        lines += [f'  File "{SITE}/{file}", line 7, in <module>', "    from x import y", "    ^^^^^^^^^^^^^^^"]
    return "\n".join([*lines, error, ""])


TO_MODELOPT = ("nemo/collections/llm/__init__.py", "megatron/core/export.py", "modelopt/torch/_deploy.py")


NEMO, NUMBA = ["nemo/__init__.py"], ["numba/__init__.py"]


@pytest.mark.parametrize(
    ("files", "error", "packages", "missing"),
    [
        (TO_MODELOPT, "AttributeError: module 'torch.onnx' has no attribute '_globals'", "torch {modelopt}", ""),
        (TO_MODELOPT, "ModuleNotFoundError: No module named 'torch.onnx._globals'", "torch {modelopt}", ""),
        (
            ["nemo/__init__.py", "transformers/utils/x.py"],
            f"ImportError: cannot import name 'f' from 'leptonai.api' ({SITE}/leptonai/api/__init__.py)",
            "leptonai transformers nemo-toolkit",
            "",
        ),
        (
            ["torch/__init__.py"],
            "ImportError: cannot import name 'f' from partially initialized module 'numpy' (most likely ...)",
            "numpy torch",
            "",
        ),
        (
            ["nemo_run/core/execution/lepton.py"],
            "ModuleNotFoundError: No module named 'leptonai.api.v1'",
            "leptonai nemo-run",
            "",
        ),
        (NEMO, "ModuleNotFoundError: No module named 'pkg_resources'", "nemo-toolkit", "pkg_resources"),
        (NEMO, "ModuleNotFoundError: No module named 'apex.y'; 'apex' is not a package", "nemo-toolkit", "apex"),
        (NEMO, "ModuleNotFoundError: No module named 'nvidia.dali'", "nemo-toolkit", "nvidia.dali"),
        (NEMO, "ModuleNotFoundError: No module named 'megatron.training'", "nemo-toolkit", "megatron.training"),
        (
            NEMO,
            "importlib.metadata.PackageNotFoundError: No package metadata was found for tqdm",
            "nemo-toolkit",
            "tqdm",
        ),
        (
            [*NEMO, "transformers/utils/versions.py"],
            "ImportError: huggingface-hub>=0.34.0,<1.0 is required, but found huggingface-hub==1.0.1.\nTry: `pip`",
            "huggingface-hub transformers nemo-toolkit",
            "",
        ),
        (NUMBA, "ImportError: Numba needs NumPy 2.2 or less. Got NumPy 2.3.", "numpy numba", ""),
        (
            NEMO,
            f"ImportError: {SITE}/pyarrow/lib.cpython-312-x86_64-linux-gnu.so: undefined symbol: _Z",
            "pyarrow nemo-toolkit",
            "",
        ),
        (
            NUMBA,
            "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header",
            "numpy numba",
            "",
        ),
        # Nothing is named: the code that was running is all there is.
        ([*NEMO, "torch/__init__.py"], "IndexError: list index out of range", "torch nemo-toolkit", ""),
    ],
)
def test_packages_of_a_failed_import(installed, files, error, packages, missing):
    about = of_import(trace(*files, error=error), installed)
    wanted = packages.format(modelopt="nvidia-modelopt megatron-core").split()
    assert (list(about.packages), about.missing_module) == (wanted, missing)


@pytest.mark.parametrize("output", ["", "no traceback at all\n"])
def test_output_without_a_traceback_is_about_nothing(installed, output):
    assert of_import(output, installed).packages == ()


DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def test_an_error_is_about_what_it_was_raised_from(installed):
    cause = trace("numba/__init__.py", error="ImportError: cannot import name 'a' from 'numpy'")
    lazy = "RuntimeError: Failed to import transformers.x because of the following error (look up to see its traceback)"
    output = cause + DIRECT + trace("nemo/__init__.py", "transformers/__init__.py", error=lazy)
    assert of_import(output, installed).packages == ("numpy", "numba")


def test_an_error_during_the_handling_of_another_is_its_own(installed):
    handled = trace("transformers/__init__.py", error="ModuleNotFoundError: No module named 'apex'")
    output = handled + DURING + trace("torch/__init__.py", error="ModuleNotFoundError: No module named 'numpy.core'")
    found = of_import(output, installed)
    assert (found.packages, found.missing_module) == (("numpy", "torch"), "")


def test_an_import_error_in_the_place_of_a_missing_module_is_about_the_module(installed):
    """As megatron-core 0.12 says that it needs mamba-ssm, which NeMo 2.3 does not declare."""
    missing = trace("transformers/__init__.py", error="ModuleNotFoundError: No module named 'mamba_ssm'")
    said = trace("transformers/__init__.py", error="ImportError: mamba-ssm is required and cannot be imported")
    assert of_import(missing + DURING + said, installed).missing_module == "mamba_ssm"


def test_a_traceback_that_was_only_logged_counts_for_nothing(installed):
    logged = trace("transformers/__init__.py", error="ModuleNotFoundError: No module named 'apex'")
    output = logged + "W1122 continuing without\n" + trace("torch/__init__.py", error="ValueError: x")
    found = of_import(output, installed)
    assert (found.packages, found.missing_module) == (("torch",), "")


CALLS = "most recent call first"


@pytest.mark.parametrize(
    "head",
    [
        f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f ({CALLS}):\n",
        f'Timeout!\nThread 0x7e ({CALLS}):\n  File "/x.py", line 3 in w\n\nThread 0x7f ({CALLS}):\n',
    ],
)
def test_a_crash_is_about_the_code_that_was_running(installed, head):
    frames = [f"{SITE}/pyarrow/__init__.py", f"{SITE}/pyarrow/__init__.py", f"{SITE}/nemo/__init__.py", "/x/i.py"]
    stack = "".join(f'  File "{file}", line 3 in <module>\n' for file in frames)
    output = (
        trace("torch/__init__.py", error="ValueError: logged") + head + stack + "\nExtension modules: numpy._core\n"
    )
    assert of_import(output, installed).packages == ("pyarrow", "nemo-toolkit")


def test_a_file_that_no_record_lists_belongs_to_the_package_around_it(installed):
    assert installed.of_file(f"{SITE}/megatron/core/datasets/helpers_cpp.so") == "megatron-core"
    assert installed.of_file(f"{SITE}/nvidia/other/x.py") == ""
    assert installed.of_file("/usr/lib/python3.12/json/__init__.py") == ""


LOCKED = {"megatron-core", "torch", "setuptools", "nvidia-resiliency-ext", "pesq", "nemo-toolkit", "pybind11"}
BUILD = """\
Resolved 3 packages
   Building torch @ git+https://x
  \u00d7 Failed to build `megatron-core @ git+https://x/LM@4ab`
  ├─▶ The build backend returned an error
  ╰─▶ Call to `setuptools.build_meta.build_wheel` failed (exit status: 1)
      [stderr]
      error: command 'g++' failed: `torch`
      ModuleNotFoundError: No module named 'pybind11'
      hint: This error likely indicates that `megatron-core@0.14` depends on `pybind11`, but doesn't
"""
NO_WHEEL = """\
error: Failed to install
error: Distribution `nvidia-resiliency-ext==0.5.0 @ registry+https://x` can't be installed because it doesn't have a \
source distribution or wheel for the current platform

hint: You're on Linux (`manylinux_2_36_x86_64`), but `nvidia-resiliency-ext` (v0.5.0) only has wheels
"""
DOWNLOAD = """\
  \u00d7 Failed to download and build `pesq==0.0.4`
  ╰─▶ The build backend returned an error
      hint: `pesq` (v0.0.4) was included because `nemo-toolkit[asr]` depends on it
"""
# As poetry prints it, whose build script runs a compiler.
COMMAND = """\
  \u00d7 Failed to build `nvidia-resiliency-ext @ git+https://x/ext@4ab`
  ├─▶ The build backend returned an error
  ╰─▶ Call to `poetry.core.masonry.api.build_wheel` failed (exit status: 1)
      [stderr]
      Traceback (most recent call last):
        File "/run/envbuild/uv/builds-v0/.tmpLwc/src/build.py", line 76, in get_cuda_path
      FileNotFoundError: CUDA not found in $CUDA_PATH or /usr/local/cuda
      error: Command '['/run/envbuild/uv/builds-v0/.tmpLwc/bin/gcc', '-O3']' returned non-zero exit status 1.
      subprocess.CalledProcessError: Command '['/run/envbuild/uv/builds-v0/.tmpLwc/bin/python', 'build.py', '-i']' \
returned non-zero exit status 1.
"""
NO_ERROR = """\
  \u00d7 Failed to build `pesq==0.0.4`
      CalledProcessError: Command '['/run/envbuild/uv/bin/python', 'b.py']' failed
"""


@pytest.mark.parametrize(
    ("output", "packages", "cause"),
    [
        (
            COMMAND,
            ("nvidia-resiliency-ext",),
            f"{COMMAND.splitlines()[0][4:]}; FileNotFoundError: CUDA not found in $CUDA_PATH or /usr/local/cuda",
        ),
        (NO_ERROR, ("pesq",), "Failed to build `pesq==0.0.4`; CalledProcessError: Command '['python', 'b.py']' failed"),
        (
            BUILD,
            ("megatron-core", "torch"),
            "Failed to build `megatron-core @ git+https://x/LM@4ab`; ModuleNotFoundError: No module named 'pybind11'",
        ),
        (NO_WHEEL, ("nvidia-resiliency-ext",), NO_WHEEL.splitlines()[1].removeprefix("error: ")),
        (DOWNLOAD, ("pesq",), "Failed to download and build `pesq==0.0.4`; The build backend returned an error"),
        ("error: Hash mismatch for `torch==2.13.0`\n", ("torch",), "Hash mismatch for `torch==2.13.0`"),
        ("warning: x\n  something else\n", (), "something else"),
        ("", (), ""),
    ],
)
def test_packages_of_a_failed_installation(output, packages, cause):
    assert of_installation(output, LOCKED) == packages
    assert cause_of_installation(output) == cause
