"""The table of redirects lists all that is patched, and each patch changes a device's name and nothing else."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from envbuild_smoke import cpu_shim


class Generator:
    def __init__(self) -> None:
        self.state: object = "first state"

    def get_state(self) -> object:
        return self.state

    def set_state(self, state: object) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> None:
        self.state = f"state of seed {seed}"


class Tensor:
    def cuda(self, *_arguments: object, **_options: object) -> object:
        raise AssertionError("CUDA was called")

    def type(self, dtype: str | None = None) -> object:
        return ("converted to", dtype) if dtype else "torch.FloatTensor"

    def numpy(self) -> str:
        return "untouched"


def factory(name: str) -> Any:
    def make(*arguments: object, **options: object) -> tuple[object, ...]:
        return (name, arguments, options)

    return make


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules with torch's names and every symbol of the table, and some that are not in it."""

    def no_cuda(*_arguments: object, **_options: object) -> None:
        raise AssertionError("CUDA was called")

    names = ("torch", "torch.cuda", "torch.cuda.random", "torch.distributed", "megatron.core.tensor_parallel.random")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name in names:
        # A module of this name is found without its parents.
        monkeypatch.setitem(sys.modules, name, modules[name])
    fake = modules["torch"]
    fake.cuda = modules["torch.cuda"]
    fake.cuda.random = modules["torch.cuda.random"]
    fake.Tensor = type("Tensor", (Tensor,), dict(vars(Tensor)))
    fake.device = lambda name: f"device {name}"
    fake.default_generator = Generator()
    fake.compile = no_cuda
    fake.distributed = modules["torch.distributed"]
    fake.distributed.ReduceOp = Enum("ReduceOp", ["SUM", "AVG"])
    fake.distributed.get_world_size = lambda group: {"two": 2}[group]
    for name in ("all_reduce", "reduce_scatter_tensor"):
        setattr(fake.distributed, name, factory(name))
    for name in ("zeros", "ones", "tensor", "empty", "arange", "randn"):
        setattr(fake, name, factory(name))
    for name in (
        "current_device",
        "current_stream",
        "synchronize",
        "get_rng_state",
        "manual_seed",
        "is_available",
        "Stream",
    ):
        setattr(fake.cuda, name, no_cuda)
    modules["torch.cuda.random"].get_rng_state = no_cuda
    modules["megatron.core.tensor_parallel.random"]._set_cuda_rng_state = no_cuda
    fake.modules = modules
    return fake


def attributes(torch: Any) -> dict[str, object]:
    """Every attribute of every fake module and of Tensor, by its full name."""
    symbols = {f"torch.Tensor.{name}": value for name, value in vars(torch.Tensor).items()}
    for module_name, module in torch.modules.items():
        symbols.update({f"{module_name}.{name}": value for name, value in vars(module).items()})
    return symbols


def test_install_changes_the_symbols_of_the_table_and_no_other(torch: Any) -> None:
    before = attributes(torch)
    cpu_shim.install()
    after = attributes(torch)
    assert {name for name in after if after[name] is not before.get(name)} == {
        redirect.symbol for redirect in cpu_shim.PATCHED
    }


def test_install_twice_is_install_once(torch: Any) -> None:
    cpu_shim.install()
    once = attributes(torch)
    cpu_shim.install()
    assert attributes(torch) == once


@pytest.mark.parametrize(
    ("device", "given"),
    [("cuda", "cpu"), ("cuda:1", "cpu"), ("meta", "meta"), (None, None), ("cpu", "cpu")],
)
def test_factories_use_the_cpu_for_cuda_devices(torch: Any, device: str | None, given: str | None) -> None:
    cpu_shim.install()
    assert torch.zeros([3], dtype="int", device=device) == ("zeros", ([3],), {"dtype": "int", "device": given})
    assert torch.ones(2, 3) == ("ones", (2, 3), {})


class Divided:
    by = 1

    def div_(self, number: int) -> None:
        self.by = number


def test_averages_are_sums_of_what_is_divided_before(torch: Any) -> None:
    cpu_shim.install()
    own, whole, operations = Divided(), Divided(), torch.distributed.ReduceOp
    for operation, by in ((operations.SUM, 1), (operations.AVG, 2)):
        made = torch.distributed.reduce_scatter_tensor(own, whole, op=operation, group="two")
        assert made == ("reduce_scatter_tensor", (own, whole), {"op": operations.SUM, "group": "two"})
        assert (own.by, whole.by) == (1, by)
    torch.distributed.all_reduce(own, op=operations.AVG, group="two")
    assert own.by == 2


def test_functions_are_not_compiled(torch: Any) -> None:
    cpu_shim.install()
    assert torch.compile(no_factory) is no_factory
    assert torch.compile(dynamic=True)(no_factory) is no_factory


def no_factory() -> None:
    """A function to compile."""


def test_random_states_are_kept_and_put_back(torch: Any) -> None:
    """What the tracker of random states does with CUDA's it now does with the CPU's."""
    cpu_shim.install()
    states = torch.modules["megatron.core.tensor_parallel.random"]
    original = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(7)
    assert torch.cuda.random.get_rng_state(device="cuda") == "state of seed 7"
    states._set_cuda_rng_state(original, graph_safe=False)
    assert torch.default_generator.state == "first state"


def test_tensors_stay_on_the_cpu_and_report_a_cuda_type(torch: Any) -> None:
    cpu_shim.install()
    tensor = torch.Tensor()
    assert tensor.cuda(0, non_blocking=True) is tensor
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type("torch.DoubleTensor") == ("converted to", "torch.DoubleTensor")
    assert torch.cuda.current_device() == "device cpu"
    assert torch.cuda.synchronize() is None
