"""Imports the module named first, and prints the result on its last line, after the mark named second.

A process that is still at it after the seconds named third writes its stack to stderr.

Runs in the environment under test (Python 3.10 and later), so it imports nothing that is not Python's own.
"""

import ctypes
import faulthandler
import importlib
import importlib.machinery
import json
import pathlib
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


def gpu_is_here():
    """Whether the driver is there and shows a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except OSError:
        return False


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


def placeholder(name):
    """Why the imported module is a placeholder without code; empty for a real one."""
    module = sys.modules.get(name)
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


def main():
    name, mark = sys.argv[1], sys.argv[2]
    result = {"imported": False}
    # A crash in native code leaves no traceback.
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(sys.argv[3]))
    try:
        importlib.import_module(name)
        result = {"imported": True, "placeholder": placeholder(name)}
    except Exception as error:  # noqa: BLE001 - whatever a module raises is a result
        traceback.print_exc()
        result["needs_gpu"] = needs_gpu(error)
        result["missing"] = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    print(f"\n{mark}{json.dumps(result)}", flush=True)
    sys.exit(0 if result["imported"] else 1)


main()
