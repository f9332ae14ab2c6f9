"""A torch that knows as much of CUDA as the check whether imports start it asks; no package, and no GPU."""

# As torch does it: a process that was forked after CUDA was started knows that.
TORCH = """
import ctypes, os, types

started, bad_fork = False, False

def in_child():
    global bad_fork
    bad_fork = started

os.register_at_fork(after_in_child=in_child)

def device_count():
    global started
    try:
        library, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_int(0)
        library.nvmlInit(), library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return count.value
    except OSError:
        started = True
        return 0

def _lazy_init():
    global started
    started = True
    raise RuntimeError("No CUDA GPUs are available")

def get_device_capability():
    cuda._lazy_init()

cuda = types.SimpleNamespace(
    _lazy_init=_lazy_init,
    _is_in_bad_fork=lambda: bad_fork,
    device_count=device_count,
    get_device_capability=get_device_capability,
)
version = types.SimpleNamespace(cuda="13.0")
"""
ASKS = "import torch\nif torch.cuda.device_count():\n    "
