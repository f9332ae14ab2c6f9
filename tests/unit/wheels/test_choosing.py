"""Whose toolkit is taken, as far as no index has to be asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cuda import bare_lock, sources
from unit.wheels.test_toolchain import program, toolkit

from envbuild.core.errors import MachineError
from envbuild.wheels.toolchain import toolchain
from envbuild.wheels.toolchain.toolkit import Toolkit, ToolkitRequest, choose_toolkit


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """A choice on a machine with a host compiler and these variables; its index is nowhere."""
    monkeypatch.setattr(toolchain, "USUAL_HOME", tmp_path / "usual")
    monkeypatch.setenv("UV_OFFLINE", "1")
    for name in ("gcc", "g++"):
        program(tmp_path / "bin" / name, "echo 12.2.0")

    def chosen(asked: ToolkitRequest, cuda: str = "13.0", path: Path = tmp_path / "bin", **environ: str) -> Toolkit:
        lock = bare_lock(tmp_path / "lock", cuda=cuda)
        return choose_toolkit(asked, lock, cuda, sources(tmp_path / "store"), {"PATH": str(path), **environ})

    return chosen


@pytest.mark.parametrize("asked", [ToolkitRequest.AUTO, ToolkitRequest.SYSTEM])
def test_fitting_toolkit_of_the_machine_is_chosen(choose, tmp_path, asked):
    home = toolkit(tmp_path / "cuda", "13.0.88")
    found = choose(asked, CUDA_HOME=str(home))
    assert (found.compilers.source, found.compilers.cuda) == ("system", "13.0.88")
    assert found.toolchain().home == home
    assert not (tmp_path / "store").exists(), "nothing was asked or installed"


def test_system_choice_refuses_another_toolkit(choose, tmp_path):
    old = toolkit(tmp_path / "cuda", "12.8.93")
    with pytest.raises(MachineError, match=r"no CUDA toolkit 13\.0 on this machine") as refused:
        choose(ToolkitRequest.SYSTEM, CUDA_HOME=str(old))
    assert f"CUDA_HOME: {old}: CUDA 12.8.93" in refused.value.why
    assert "--toolkit index" in refused.value.fix
    assert not (tmp_path / "store").exists()


def test_index_is_not_asked_for_cuda_before_13(choose, tmp_path):
    old = toolkit(tmp_path / "cuda", "13.0.88")
    with pytest.raises(MachineError) as auto:
        choose(ToolkitRequest.AUTO, cuda="12.8", CUDA_HOME=str(old))
    assert f"CUDA_HOME: {old}: CUDA 13.0.88" in auto.value.why
    with pytest.raises(MachineError, match=r"the package index has no CUDA toolkit 12\.8") as index:
        choose(ToolkitRequest.INDEX, cuda="12.8")
    assert "have no nvcc" in index.value.why
    assert "point CUDA_HOME at it" in index.value.fix


@pytest.mark.parametrize("asked", [ToolkitRequest.AUTO, ToolkitRequest.INDEX])
def test_without_a_host_compiler_nothing_is_looked_up(choose, tmp_path, asked):
    with pytest.raises(MachineError, match=r"the compiler gcc is not on this machine"):
        choose(asked, path=tmp_path / "empty")
    assert not (tmp_path / "store").exists()
