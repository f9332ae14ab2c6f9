"""GPU code of what is installed, compiled here by the real nvcc: what runs on a target, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.compiled import KERNEL, NO_KERNEL, gpu_library
from helpers.cuda import make_kernels
from helpers.lock_runs import OLD
from helpers.notes import Notes
from helpers.simple_index import SimpleIndex
from helpers.stack_files import GPU_BASE, write_stack, write_target

from envbuild.core.errors import CheckRefusedError
from envbuild.store.local import LocalStore
from envbuild.wheels.audit.fatbin import PTX_KIND, SASS_KIND, SECTIONS, entries
from envbuild.wheels.audit.prebuilt import check_prebuilt

TORCH = "torch/lib/libtorch_cuda.so"
NCCL = "nvidia/nccl/lib/libnccl.so.2"
SYNC = ("sync", "--stack", "p", "--target", "gpu", "--into", "venv", "--json")
READ = "read the GPU code of what is installed"


@pytest.fixture
def compiled(tmp_path: Path, nvcc: Path) -> Callable[..., bytes]:
    """Compiles a library with code for these SMs, and PTX for those."""

    def compile_for(*sm: str, ptx: tuple[str, ...] = (), source: str = KERNEL) -> bytes:
        return gpu_library(tmp_path / "compiled/library.so", nvcc, sm, ptx, source=source).read_bytes()

    return compile_for


class Place:
    """A folder of packages as uv leaves it, and what is found there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "site-packages"
        self.notes = Notes()
        self.store = LocalStore(folder / "store", self.notes)

    def install(self, package: str, version: str, files: dict[str, bytes]) -> None:
        info = self.folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        for name, content in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in files) + f"{info.name}/RECORD,,\n")

    def check(self, *sm: str) -> dict[str, Any]:
        self.notes.lines.clear()
        found = check_prebuilt(self.folder, sm, self.store, self.notes)
        return {item.package: item.as_json(sm) for item in found}

    def refused(self, *sm: str) -> str:
        with pytest.raises(CheckRefusedError) as error:
            self.check(*sm)
        assert error.value.exit_code == 5
        return error.value.why


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_what_runs_on_the_target_passes_and_what_does_not_is_refused(
    place: Place, compiled: Callable[..., bytes]
) -> None:
    place.install("torch", "2.11.0", {TORCH: compiled("80", "90a", "100f")})
    place.install("nvidia-nccl-cu13", "2.28.9", {NCCL: compiled("80", ptx=("80",))})
    assert place.check("90")["torch"] == {
        "package": "torch",
        "version": "2.11.0",
        "sm": ["80", "90a", "100f"],
        "ptx": [],
        "files_lacking": [],
    }
    assert place.check("80", "90")["nvidia-nccl-cu13"]["ptx"] == ["80"]
    assert place.check("86", "103").keys() == {"torch", "nvidia-nccl-cu13"}
    assert place.check() == {}, "a target without GPUs"
    why = place.refused("90", "120")
    assert why == "torch 2.11.0: nothing for sm_120; torch/lib/libtorch_cuda.so has sm_80, sm_90a, sm_100f."
    assert place.refused("75").splitlines() == [
        "nvidia-nccl-cu13 2.28.9: nothing for sm_75; nvidia/nccl/lib/libnccl.so.2 has sm_80, PTX 80.",
        "torch 2.11.0: nothing for sm_75; torch/lib/libtorch_cuda.so has sm_80, sm_90a, sm_100f.",
    ]


@pytest.mark.parametrize("package", ["torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformer-engine-cu13"])
def test_without_any_gpu_code_nothing_runs(place: Place, compiled: Callable[..., bytes], package: str) -> None:
    place.install(package, "1.0", {"x/lib.so": compiled("75", source=NO_KERNEL), "x/__init__.py": b""})
    assert place.refused("90") == f"{package} 1.0: nothing for sm_90; no file of it has GPU code."


@pytest.mark.slow
def test_the_main_file_counts(place: Place, compiled: Callable[..., bytes]) -> None:
    more = KERNEL.replace("twice", "thrice") + KERNEL
    place.install(
        "torch", "2.11.0", {TORCH: compiled("80", source=more), "torch/lib/libtorch_linalg.so": compiled("90")}
    )
    assert "libtorch_cuda.so has sm_80" in place.refused("90")
    assert place.check("80")["torch"]["files_lacking"] == ["torch/lib/libtorch_linalg.so"]
    assert place.notes.lines == [
        "GPU code of torch 2.11.0: not for every SM of the target: torch/lib/libtorch_linalg.so"
    ]


@pytest.mark.slow
def test_other_packages_are_told_and_not_refused(place: Place, compiled: Callable[..., bytes]) -> None:
    """As torch 2.7.0, which has code for sm_75 and requires a cuSPARSELt that has none."""
    place.install("torch", "2.7.0", {TORCH: compiled("75", "80")})
    place.install("nvidia-cusparselt-cu12", "0.6.3", {"cusparselt/lib/libcusparseLt.so.0": compiled("80")})
    assert place.check("75")["nvidia-cusparselt-cu12"]["files_lacking"] == ["cusparselt/lib/libcusparseLt.so.0"]
    (note,) = place.notes.lines
    assert "nvidia-cusparselt-cu12 0.6.3: nothing for sm_75" in note


def test_a_file_that_is_not_understood_is_told(place: Place, compiled: Callable[..., bytes]) -> None:
    content = compiled("80")
    broken = content.replace(bytes.fromhex("50ed55ba"), bytes.fromhex("51ed55ba"))
    assert broken != content
    place.install("torch", "2.11.0", {TORCH: broken})
    place.install("other", "1.0", {"other/cut.so": b"\x7fELF" + bytes(20), "other/text.so": b"INPUT(x)"})
    found = place.check("90")
    assert "of an unknown form at byte 0" in found["torch"]["unknown"]
    assert "not a readable ELF file" in found["other"]["unknown"]
    assert len(place.notes.lines) == 2


@pytest.mark.slow
def test_entries_without_kernels_are_told_by_their_size(tmp_path: Path, nvcc: Path) -> None:
    """Every file that nvcc links has some; the smallest kernel is larger."""
    sm = ("75", "80", "90", "90a", "100f", "110", "120")
    for source, wanted in ((NO_KERNEL, False), ('extern "C" __global__ void smallest() {}\n', True)):
        (tmp_path / "one.cu").write_text(source)
        for more in ([], ["-rdc=true"], ["-Xfatbin=-compress-all"]):
            pairs = [f"-gencode=arch=compute_{one},code=[sm_{one},compute_{one}]" for one in sm]
            command = [nvcc, "-c", *pairs, *more, "-o", tmp_path / "one.o", tmp_path / "one.cu"]
            subprocess.run(command, check=True)
            found = read_entries(tmp_path / "one.o")
            assert {entry.kind for entry in found} >= {SASS_KIND}
            assert {entry.has_kernels for entry in found if entry.kind in (SASS_KIND, PTX_KIND)} == {wanted}


def read_entries(file: Path) -> list[Any]:
    from elftools.elf.elffile import ELFFile

    with file.open("rb") as stream:
        sections = [ELFFile(stream).get_section_by_name(name) for name in SECTIONS]
        return [entry for section in sections if section for entry in entries(section.data(), file.name)]


@pytest.fixture
def project(own: Any, wheel: Callable[..., Path], compiled: Callable[..., bytes]) -> Any:
    """The tool with a lock of a torch whose GPU code is for sm_80 and sm_90a."""
    wheel("torch", "2.11.0", sources={TORCH: compiled("80", "90a")})
    write_stack(own.project, "p", {"torch": {"version": "==2.11.0", "modules": ["torch"]}}, target="gpu", base=GPU_BASE)
    own.run("lock", "--stack", "p")
    return own


def test_sync_checks_the_target_and_reads_once(project: Any) -> None:
    done = project.run(*SYNC)
    (torch,) = json.loads(done.stdout)["gpu_code"]
    assert (torch["package"], torch["sm"], torch["files_lacking"]) == ("torch", ["80", "90a"], [])
    assert READ in done.stderr
    again = project.run(*SYNC)
    assert json.loads(again.stdout)["gpu_code"] == [torch]
    assert READ not in again.stderr

    write_target(project.project, "gpu", sm=("100",))
    refused = project.run(*SYNC, status=5)
    error = json.loads(refused.stdout)["error"]
    assert error["what"] == "what is installed does not run on the target's GPUs (sm_100)"
    assert "torch 2.11.0: nothing for sm_100" in error["why"]
    assert READ not in refused.stderr, "what was read serves every target"


@pytest.mark.slow
def test_nothing_is_compiled_for_a_target_that_torch_does_not_run_on(
    own: Any, wheel: Callable[..., Path], compiled: Callable[..., bytes], index: SimpleIndex, nvcc: Path, tmp_path: Path
) -> None:
    wheel("torch", "2.11.0", sources={TORCH: compiled("80")})
    wheel("setuptools", "80.1")
    marker = tmp_path / "marker"
    index.add(make_kernels(tmp_path / "sdist", before=f"open({str(marker)!r}, 'w')"), OLD)
    components = {
        "torch": {"version": "==2.11.0"},
        "setuptools": {},
        "kernels": {"version": "==1.0", "phase": "compile"},
    }
    write_stack(own.project, "p", components, target="gpu", base=GPU_BASE)
    own.env["CUDA_HOME"] = str(nvcc.parent.parent)
    own.run("lock", "--stack", "p")
    error = json.loads(own.run("wheels", "--stack", "p", "--target", "gpu", "--json", status=5).stdout)["error"]
    assert "torch 2.11.0: nothing for sm_90" in error["why"]
    assert not marker.exists()
    assert not [*(own.cache / "wheels").glob("*")]
