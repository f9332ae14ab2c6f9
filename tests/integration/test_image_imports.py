"""What is imported before an image counts as built: modules that load the GPU's driver, and the stack's driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.fake_torch import ASKS, TORCH
from helpers.kept_entries import keep_base
from helpers.layer_tars import read_members
from helpers.simple_index import SimpleIndex
from helpers.stack_files import write_stack
from integration.conftest import index_settings

from envbuild.catalog.catalog import Catalog, HostDistribution, select
from envbuild.catalog.data import data_root

REFUSED = 5
# With a C compiler, as bases for GPUs have it.
BASE, TARGET = "debian12-cu130", "h200"
ARGUMENTS = ("--stack", "s", "--target", TARGET)
# Linked to the driver's library, as Transformer Engine's core is.
LOADS_THE_DRIVER = "import ctypes\nassert ctypes.CDLL('libcuda.so.1').cuInit(0) != 0\n"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("store")
    keep_base(select(Catalog.open(data_root()), "mcore", TARGET, BASE, HostDistribution.here()), cache)
    return cache / "bases"


@pytest.fixture
def gpu_image(bases: Path, index: SimpleIndex, uv_cache: str, tmp_path: Path) -> Callable[..., Any]:
    """Builds the image of packages of a test's own, each with a module of its name."""

    def build(components: Mapping[str, Any], status: int = 0) -> dict[str, Any]:
        store = tmp_path / "store"
        store.mkdir()
        (store / "bases").symlink_to(bases)
        tool = Tool(tmp_path / "p", store, index_settings(index, uv_cache))
        write_stack(tool.project, "s", components, target=TARGET, base=BASE)
        tool.run("lock", *ARGUMENTS)
        done = tool.run("image", *ARGUMENTS, "--format", "oci", "--json", status=status)
        output: dict[str, Any] = json.loads(done.stdout)
        return output

    return build


def test_a_module_that_loads_the_gpus_driver_is_imported_with_a_stub_that_is_in_no_layer(
    gpu_image: Callable[..., Any], wheel: Callable[..., Path]
) -> None:
    wheel("engine", "1.0", module=LOADS_THE_DRIVER)
    wheel("kernels", "1.0", module="raise ImportError('/k.so: undefined symbol: cuMemCreate (libcuda.so.1)')\n")
    done = gpu_image({"engine": {"modules": ["engine"]}, "kernels": {"modules": ["kernels"]}})
    # What a stub does not have, it needs of a real driver.
    reason = "it needs a GPU, and there is none here: ImportError: /k.so: undefined symbol: cuMemCreate (libcuda.so.1)"
    assert done["record"]["not_checked"] == {"kernels": reason}
    for layer in done["record"]["layers"][1:]:
        blob = Path(done["path"]) / "oci/blobs/sha256" / layer["digest"].removeprefix("sha256:")
        names = [member.name for member, _ in read_members(blob)]
        assert not [name for name in names if "libcuda" in name or "libnvidia-ml" in name or "smoke" in name]


def test_an_image_whose_driver_does_not_start_is_refused(
    gpu_image: Callable[..., Any], wheel: Callable[..., Path]
) -> None:
    """Where there is a GPU, `megatron` asks it something as it is imported; NVML's stub says that there is one."""
    wheel("torch", "2.13.0", module=TORCH)
    wheel("megatron", "1.0", module=f"{ASKS}torch.cuda._lazy_init()\n")
    components = {"torch": {"modules": ["torch"]}, "megatron": {"modules": []}}
    error = gpu_image(components, status=REFUSED)["error"]
    assert error["what"] == "importing driver mcore of the stack starts CUDA"
    assert "site-packages/megatron/__init__.py:3: torch.cuda._lazy_init()" in error["why"]
