"""Imports the module named first, and prints the result on its last line, after the mark named second.

A process that is still at it after the seconds named third writes its stack to stderr.

Runs in the environment under test (Python 3.10 and later), so it imports nothing that is not Python's own.
"""

import ctypes
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import traceback

# What libraries say when they find no NVIDIA driver, or no GPU under it.
NO_GPU = (
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "no CUDA-capable device is detected",
    "libcuda.so",
    "libnvidia-ml.so",
    "NVML Shared Library Not Found",
    "0 active drivers",
    "CUDA driver library cannot be found",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA driver version is insufficient",
)


# Loaded by a .pth file where compiled modules are stubs.
STUBS = "envbuild_extension_stubs"


def gpu_is_here():
    """Whether the driver is there and shows a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except OSError:
        return False


class NoGpu:
    """In the place of Triton's driver where there is none: 3.2 asks it how to measure where a kernel is defined."""

    def get_benchmarker(self):
        return lambda *_, **__: self.measure

    def __getattr__(self, name):
        raise RuntimeError(f"0 active drivers, of which {name} is asked")


def stand_in_for_triton():
    """Have Triton take :class:`NoGpu` where the driver's library is there, or a stub of it, and shows no GPU."""
    try:
        if ctypes.CDLL("libcuda.so.1").cuInit(0) != 0:
            importlib.import_module("triton.runtime").driver.set_active(NoGpu())
    except (ImportError, OSError, AttributeError):
        return


def needs_gpu(error):
    """Why the error is only that of a machine without a GPU; empty when it is not.

    A module that was not found is never that, and neither is an error during the handling of another: only what was
    raised, or what it was raised from.
    """
    while error is not None:
        if isinstance(error, ModuleNotFoundError) or "cannot import name" in str(error):
            return ""
        if any(words in str(error) for words in NO_GPU):
            return "" if gpu_is_here() else f"{type(error).__name__}: {error}".splitlines()[0]
        error = error.__cause__
    return ""


def needs_code(error):
    """Why the error is only that of a stub, which has no code; empty when it is not, and without stubs."""
    stubs = sys.modules.get(STUBS)
    return stubs.needs_code(error) if stubs else ""


def placeholder(name):
    """Why the imported module is a placeholder without code; empty for a real one."""
    module = sys.modules.get(name)
    stubs = sys.modules.get(STUBS)
    if stubs and isinstance(module, stubs.StubModule):
        return "a stub of a compiled module"
    if not isinstance(module, type(sys)):
        return f"an object of class {type(module).__name__} stands in its place"
    spec = module.__spec__
    if spec is None:
        return "something else made it up when it was imported"
    if spec.origin is None and spec.submodule_search_locations is not None:
        endings = tuple(importlib.machinery.all_suffixes())
        for place in spec.submodule_search_locations:
            if any(path.name.endswith(endings) for path in pathlib.Path(place).rglob("*")):
                return ""
        return "a folder without any Python file"
    return ""


def hidden_cause(error, mark, seconds):
    """What the import of a submodule really fails with, and its result, where only a later error of it was raised.

    A package that failed to import the submodule once, and whose user caught that, is there without it: the next one to
    import the name gets "cannot import name 'torch' from 'modelopt'" (nvidia-modelopt 0.35 with torch 2.10).
    """
    found = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    if not isinstance(error, ImportError) or found is None or found[2] not in sys.modules:
        return "", {}
    module = f"{found[2]}.{found[1]}"
    try:
        if importlib.util.find_spec(module) is None:
            return "", {}
    except (ImportError, ValueError):
        return "", {}
    argv = [sys.executable, *(["-I"] if sys.flags.isolated else []), sys.argv[0], module, mark, seconds]
    done = subprocess.run(
        argv, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    output, _, result = done.stdout.rpartition(mark)
    return (output, json.loads(result)) if done.returncode != 0 and output else ("", {})


def main():
    name, mark = sys.argv[1], sys.argv[2]
    result = {"imported": False}
    # A crash in native code leaves no traceback.
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(sys.argv[3]))
    stand_in_for_triton()
    try:
        importlib.import_module(name)
        result = {"imported": True, "placeholder": placeholder(name)}
    except Exception as error:  # noqa: BLE001 - whatever a module raises is a result
        traceback.print_exc()
        result["needs_gpu"] = needs_gpu(error)
        result["needs_code"] = needs_code(error)
        result["missing"] = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        output, cause = hidden_cause(error, mark, sys.argv[3])
        if output:
            print(output, file=sys.stderr, flush=True)
            result |= cause
    print(f"\n{mark}{json.dumps(result)}", flush=True)
    sys.exit(0 if result["imported"] else 1)


main()
