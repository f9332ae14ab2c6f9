"""Changes to an installed environment that no RECORD knows of; each takes the environment, and returns variables."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from faults.environments import Environment, new_file

Variables = dict[str, str]

# With the header of bytecode that belongs to the source as it is (PEP 552).
OTHER_BYTECODE = """
import importlib.util, marshal, pathlib, struct, sys
source = pathlib.Path(sys.argv[1])
text, status = source.read_text(), source.stat()
changed = text.replace("self.softmax_scale = 1.0 /", "self.softmax_scale = 2.0 /")
assert changed != text
header = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(status.st_mtime), status.st_size)
cache = pathlib.Path(importlib.util.cache_from_source(source))
cache.parent.mkdir(exist_ok=True)
cache.unlink(missing_ok=True)
cache.write_bytes(header + marshal.dumps(compile(changed, str(source), "exec", dont_inherit=True)))
"""

STUB_OPTIMIZER = """
import torch
class FusedAdam(torch.optim.AdamW):
    def __init__(self, params, adam_w_mode=True, **settings):
        super().__init__(params, **settings)
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.neg_()
        return super().step(closure)
class FusedSGD(torch.optim.SGD):
    pass
"""
STUB_NORM = """
import torch
class FusedLayerNormAffineFunction:
    @staticmethod
    def apply(tensor, weight, bias, shape, eps, **_):
        return torch.nn.functional.layer_norm(tensor, shape, weight, bias, eps)
"""


def extension_removed(environment: Environment) -> Variables:
    """markupsafe has its C extension no more and takes the one in Python, without a word."""
    _extension(environment).unlink()
    return {}


def extension_changed(environment: Environment) -> Variables:
    """The last byte of an extension, which nothing reads, is another."""
    path = _extension(environment)
    content = path.read_bytes()
    new_file(path, content[:-1] + bytes([content[-1] ^ 1]))
    return {}


def bytecode_changed(environment: Environment) -> Variables:
    """Attention is scaled otherwise in the bytecode that Python takes, and the source is the one of the wheel."""
    source = environment.site_packages / "megatron/core/transformer/dot_product_attention.py"
    subprocess.run([environment.python, "-c", OTHER_BYTECODE, source], check=True)
    return {}


def code_at_start(environment: Environment) -> Variables:
    """Somebody left a .pth file with code in the environment."""
    new_file(environment.site_packages / "left_behind.pth", b"import os; os.environ['LEFT_BEHIND'] = '1'\n")
    return {}


def torch_shadowed(environment: Environment) -> Variables:
    """Another torch stands before the environment's: the same files in another folder."""
    elsewhere = environment.folder.with_name(f"{environment.folder.name}-elsewhere")
    elsewhere.mkdir()
    shutil.copytree(environment.site_packages / "torch", elsewhere / "torch", copy_function=shutil.os.link)
    return {"PYTHONPATH": str(elsewhere)}


def megatron_on_the_path(environment: Environment) -> Variables:
    """PYTHONPATH names a checkout of Megatron-LM, as everybody's does: its megatron.core is another."""
    elsewhere = environment.folder.with_name(f"{environment.folder.name}-checkout")
    shutil.copytree(environment.site_packages / "megatron", elsewhere / "megatron", copy_function=shutil.copy)
    return {"PYTHONPATH": str(elsewhere)}


def stub_optimizer(environment: Environment) -> Variables:
    """Somebody tried out an apex that no lock has: megatron-core takes its Adam, which steps the wrong way."""
    apex = environment.site_packages / "apex"
    for module, text in (
        ("__init__", ""),
        ("optimizers", STUB_OPTIMIZER),
        ("normalization/fused_layer_norm", STUB_NORM),
    ):
        new_file(apex / f"{module}.py", text.encode())
    return {}


def second_nccl(environment: Environment) -> Variables:
    """A machine's own NCCL is loaded in the place of that of the environment's wheel."""
    maps = Path("/proc/self/maps").read_text()
    some_library = next(line.split()[-1] for line in maps.splitlines() if line.endswith("/libm.so.6"))
    metadata = environment.site_packages / "nvidia_nccl_cu13-2.29.7.dist-info"
    own = environment.site_packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    machines = environment.folder.with_name(f"{environment.folder.name}-lib") / "libnccl.so.2"
    for library in (own, machines):
        library.parent.mkdir(parents=True)
        shutil.copy(some_library, library)
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.29.7\n")
    files = [own, metadata / "METADATA", metadata / "RECORD"]
    (metadata / "RECORD").write_text("".join(f"{file.relative_to(environment.site_packages)},,\n" for file in files))
    return {"LD_PRELOAD": str(machines)}


def other_version(environment: Environment) -> Variables:
    """packaging is of another version than the lock's."""
    (old,) = environment.site_packages.glob("packaging-*.dist-info")
    metadata = old / "METADATA"
    lines = metadata.read_text().splitlines(keepends=True)
    changed = ["Version: 20.0\n" if line.startswith("Version: ") else line for line in lines]
    new_file(metadata, "".join(changed).encode())
    record = old / "RECORD"
    new_file(record, record.read_text().replace(old.name, "packaging-20.0.dist-info").encode())
    old.rename(old.with_name("packaging-20.0.dist-info"))
    environment.record("packaging-20.0.dist-info/METADATA")
    return {}


def package_removed(environment: Environment) -> Variables:
    """jinja2 is not installed."""
    shutil.rmtree(environment.site_packages / "jinja2")
    (metadata,) = environment.site_packages.glob("jinja2-*.dist-info")
    shutil.rmtree(metadata)
    return {}


def _extension(environment: Environment) -> Path:
    (library,) = (environment.site_packages / "markupsafe").glob("_speedups*.so")
    return library
