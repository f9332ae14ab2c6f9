"""The guard around imports: what starts CUDA is answered or hidden meanwhile, and everything is put back."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

GUARD = "envbuild_smoke.drivers.imports"


class FakeTorch:
    """Modules with torch's names, and what is to be called in them."""

    def __init__(self) -> None:
        self.modules = {name: ModuleType(name) for name in ("torch", "torch.cuda", "torch.utils")}
        self.cuda: Any = self.modules["torch.cuda"]
        self.extensions: Any = ModuleType("torch.utils.cpp_extension")
        self.cuda.get_device_capability = self.capability = self._starts_cuda
        self.extensions.load_inline = self.load_inline = self._compiles
        torch: Any = self.modules["torch"]
        torch.cuda, torch.utils = self.cuda, self.modules["torch.utils"]
        self.modules["torch.utils"].cpp_extension = self.extensions  # type: ignore[attr-defined]
        self.modules["torch.utils.cpp_extension"] = self.extensions

    @staticmethod
    def _starts_cuda(*_arguments: object) -> tuple[int, int]:
        raise AssertionError("CUDA was started")

    @staticmethod
    def _compiles(*_arguments: object, **_options: object) -> None:
        raise AssertionError("something was compiled")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.fixture
def guard(torch: FakeTorch) -> Iterator[Any]:
    """The guard's module, imported with this torch, and by nobody else."""
    before = sys.modules.pop(GUARD, None)
    yield importlib.import_module(GUARD)
    del sys.modules[GUARD]
    if before is not None:
        sys.modules[GUARD] = before


def assert_untouched(torch: FakeTorch) -> None:
    assert torch.cuda.get_device_capability is torch.capability
    assert torch.extensions.load_inline is torch.load_inline
    assert not {"fla", "flashinfer"} & sys.modules.keys()


def test_imports_start_no_cuda_and_compile_nothing(torch: FakeTorch, guard: Any) -> None:
    with guard.cuda_not_asked():
        assert torch.cuda.get_device_capability(0) == torch.cuda.get_device_capability() == (0, 0)
        # As torch raises it where there is no compiler: who compiles as it is imported goes on without.
        with pytest.raises(RuntimeError, match="nothing is compiled"):
            torch.extensions.load_inline(name="x", cpp_sources="")
    assert_untouched(torch)


@pytest.mark.parametrize("name", ["fla", "fla.ops", "flashinfer", "flashinfer.gdn_kernels"])
def test_what_starts_cuda_cannot_be_imported_meanwhile_and_can_be_afterwards(
    guard: Any, name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("fla", "flashinfer"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "fla/ops.py").write_text("")
    (tmp_path / "flashinfer/gdn_kernels.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with guard.cuda_not_asked():
        # What libraries take for "not installed": they ask for the error, or for the spec.
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
        assert importlib.util.find_spec(name.partition(".")[0]) is None
    try:
        assert importlib.import_module(name).__name__ == name
    finally:
        for loaded in [module for module in sys.modules if module.partition(".")[0] in ("fla", "flashinfer")]:
            del sys.modules[loaded]


def test_everything_is_put_back_after_an_error(torch: FakeTorch, guard: Any) -> None:
    with pytest.raises(ImportError, match="broken"), guard.cuda_not_asked():
        raise ImportError("broken")
    assert_untouched(torch)


def test_a_package_that_was_imported_before_stays(
    torch: FakeTorch, guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its users have it already; hidden, they would find it half there."""
    imported = ModuleType("fla")
    monkeypatch.setitem(sys.modules, "fla", imported)
    with guard.cuda_not_asked():
        assert importlib.import_module("fla") is imported
    assert sys.modules["fla"] is imported
    assert "flashinfer" not in sys.modules


def test_the_driver_itself_is_not_started(torch: FakeTorch, guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-cutlass-dsl calls cuInit through NVIDIA's bindings, of which torch knows nothing."""
    driver: Any = ModuleType("cuda.bindings.driver")
    driver.cuInit = start = FakeTorch._starts_cuda
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, driver.__name__, driver)
    with guard.cuda_not_asked(), pytest.raises(RuntimeError, match="no GPU is asked"):
        driver.cuInit(0)
    assert driver.cuInit is start
    assert_untouched(torch)
