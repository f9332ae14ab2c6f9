"""The CUDA toolkit of the package index: pinned for a lock, laid out as a CUDA_HOME, and compiled with."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.cuda import CUDA, bare_lock, make_kernels, sources
from helpers.lock_runs import ANY, OLD
from helpers.programs import path_without
from helpers.simple_index import SimpleIndex
from helpers.stack_files import GPU_BASE, write_base, write_stack, write_target
from helpers.wheels import make_wheel

from envbuild.core.errors import BuildError, EnvbuildError, MachineError, NetworkError
from envbuild.store.local import COMPLETE
from envbuild.wheels.audit.elf import read_binary
from envbuild.wheels.toolchain import toolchain as machine
from envbuild.wheels.toolchain.host_compiler import HostCompiler, refuse_too_new
from envbuild.wheels.toolchain.index_toolkit import COMPILER, KIND, RUNTIME
from envbuild.wheels.toolchain.toolchain import Toolchain
from envbuild.wheels.toolchain.toolkit import Toolkit, ToolkitRequest, choose_toolkit

SELECT = ("--stack", "k", "--target", "gpu")
LATE = "2026-08-01T00:00:00Z"


@pytest.fixture
def path_without_nvcc(tmp_path: Path) -> str:
    """PATH with the programs that are on it, but nvcc."""
    return path_without(tmp_path, "nvcc")


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, path_without_nvcc: str) -> None:
    """No toolkit to be found here."""
    monkeypatch.setattr(machine, "USUAL_HOME", Path("/nonexistent"))
    monkeypatch.setenv("PATH", path_without_nvcc)
    for name in machine.HOME_VARIABLES:
        monkeypatch.delenv(name, raising=False)


# The packages as they are on the index.


@pytest.fixture
def real(tmp_path: Path, bare_machine: None) -> Toolchain:
    chosen = choose_toolkit(ToolkitRequest.AUTO, bare_lock(tmp_path / "lock"), CUDA, sources(tmp_path / "store"))
    assert not (tmp_path / "store" / KIND).exists(), "it is installed only when something is built"
    return chosen.toolchain()


@pytest.mark.slow
def test_it_compiles_and_links_with_the_packages_alone(real: Toolchain, tmp_path: Path) -> None:
    """Device code, CCCL's and the runtime's headers, the runtime by its linker name, both backends of nvcc."""
    assert (real.source, real.cuda, set(real.packages)) == ("index", "13.0.88", {*COMPILER, *RUNTIME})
    source = tmp_path / "a.cu"
    source.write_text(
        "#include <cuda_runtime.h>\n#include <cuda_profiler_api.h>\n#include <nvtx3/nvToolsExt.h>\n"
        "#include <cub/thread/thread_reduce.cuh>\n#include <cuda/std/tuple>\n"
        "__global__ void twice(float *x) { x[threadIdx.x] *= 2.0f; }\n"
        "extern C int run(float *x) { twice<<<1, 32>>>(x); return cudaGetLastError(); }\n".replace("C int", '"C" int')
    )
    out = tmp_path / "a.so"
    pairs = [f"-gencode=arch=compute_90,code={code}" for code in ("sm_90", "compute_90")]
    command = [real.nvcc, *pairs, "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", "-o", out, source, "-lcudart"]
    subprocess.run(command, check=True, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    found = read_binary("a.so", out.read_bytes())
    assert (found.architectures.sass, found.architectures.ptx) == (("90",), ("90",))
    assert "libcudart.so.13" in found.libraries


@pytest.mark.slow
def test_host_compilers_are_refused_as_nvcc_itself_does(real: Toolchain, tmp_path: Path) -> None:
    """The header of the real packages, read, against the real nvcc with a compiler that says it is that version."""
    source = tmp_path / "a.cu"
    source.write_text("")
    takes = {}
    for version in (15, 16):
        cxx = tmp_path / f"g++-{version}"
        cxx.write_text(f'#!/bin/sh\ncase "$1" in -dM) echo "#define __GNUC__ {version}";; *) exec g++ "$@";; esac\n')
        cxx.chmod(0o755)
        macros = f"-U__GNUC__,-D__GNUC__={version}"
        done = subprocess.run([real.nvcc, "-E", "-Xcompiler", macros, source], capture_output=True, text=True)
        assert ("unsupported GNU version" in done.stderr) is bool(done.returncode)
        host = HostCompiler(cc_version="gcc 12.2.0", cc=real.cc, cxx=cxx, version=cxx.name)
        try:
            refuse_too_new(host, real.home, real.cuda)
        except MachineError:
            takes[version] = (False, done.returncode == 0)
        else:
            takes[version] = (True, done.returncode == 0)
    assert takes == {15: (True, True), 16: (False, False)}


@pytest.fixture
def own(tool: Any, tmp_path: Path, index: SimpleIndex, path_without_nvcc: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool on a machine without a toolkit, in a project whose stack compiles `kernels`."""
    project = tmp_path / "project"
    write_base(project, GPU_BASE, cuda=CUDA, glibc="2.35")
    write_target(project, "gpu", sm=("90",))
    runner = type(tool)(project, tmp_path / "cache")
    monkeypatch.setattr(machine, "USUAL_HOME", Path("/nonexistent"))
    runner.env = {"UV_INDEX": index.url, "PATH": path_without_nvcc, "CUDA_HOME": "", "CUDA_PATH": ""}
    runner.env |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "UV_FIND_LINKS": "", "PIP_FIND_LINKS": ""}
    return runner


def lock_kernels(own: Any, **more: dict[str, Any]) -> None:
    components = {
        "setuptools": {"version": ">=70,<81", "modules": ["setuptools"]},
        "kernels": {"version": "==1.0", "phase": "compile", "modules": ["kernels"]},
    }
    write_stack(own.project, "k", components | more, target="gpu", base=GPU_BASE, as_of="2026-05-15")
    own.run("lock", "--stack", "k")


@pytest.mark.slow
def test_a_wheel_is_built_where_there_is_no_toolkit(own: Any, tmp_path: Path, index: SimpleIndex) -> None:
    """From the command line: the toolkit comes by itself, of the lock's runtime; the second SM needs no network."""
    index.add(make_kernels(tmp_path), OLD)
    lock_kernels(own, **{"nvidia-cuda-runtime": {"version": "==13.0.48", "modules": ["nvidia"]}})

    refused = json.loads(own.run("wheels", *SELECT, "--json", "--toolkit", "system", status=11).stdout)["error"]
    assert "no toolkit at all" in refused["why"]
    assert "--toolkit index" in refused["fix"]

    done = own.run("wheels", *SELECT, "--json")
    assert "no CUDA toolkit 13.0 on this machine: taking nvidia-cuda-nvcc 13.0.88 of the index" in done.stderr
    (first,) = json.loads(done.stdout)["wheels"]
    record, parts = first["record"], first["record"]["parts"]
    assert (first["built"], record["sm"], record["imported"]) == (True, ["90"], ["kernels"])
    assert (parts["toolkit"], parts["cuda_toolkit"]) == ("index", "13.0.88")
    assert parts["toolkit_packages"]["nvidia-nvvm"] == "13.0.88"
    assert parts["toolkit_packages"]["nvidia-cuda-runtime"] == "13.0.48", "the lock's own"

    write_target(own.project, "gpu", sm=("80",))
    own.env["UV_OFFLINE"] = "1"
    (second,) = json.loads(own.run("wheels", *SELECT, "--toolkit", "index", "--json").stdout)["wheels"]
    assert (second["built"], second["record"]["sm"]) == (True, ["80"])
    assert second["record"]["parts"]["toolkit_packages"] == parts["toolkit_packages"]

    shutil.rmtree(own.cache / KIND)
    (again,) = json.loads(own.run("wheels", *SELECT, "--toolkit", "index", "--json").stdout)["wheels"]
    assert (again["built"], again["record"]) == (False, second["record"])
    assert not (own.cache / KIND).exists(), "a wheel that is there needs no compilers"


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["system", "index"])
def test_headers_come_from_the_locked_packages(
    own: Any,
    tmp_path: Path,
    index: SimpleIndex,
    wheel: Callable[..., Path],
    choice: str,
    cuda: Toolchain,
) -> None:
    """As Transformer Engine finds cuDNN's: a package of the tests' own in cuDNN's place."""
    wheel("nvidia_cudnn_cu13", "9.9.9", sources={"nvidia/cudnn/include/cudnn.h": "#define CUDNN_MAJOR 9\n"})
    before = "open('kernel.cu', 'a').write('#include <cudnn.h>\\nint cudnn() { return CUDNN_MAJOR; }')"
    index.add(make_kernels(tmp_path, before=before), OLD)
    own.env["CUDA_HOME"] = str(cuda.home)
    file = own.project / "envs/wheels/kernels.toml"
    file.parent.mkdir(parents=True)
    file.write_text('summary = "s"\nheaders = ["nvidia/cudnn/include"]\n')
    lock_kernels(own, **{"nvidia-cudnn-cu13": {"version": "==9.9.9", "modules": ["nvidia"]}})
    (made,) = json.loads(own.run("wheels", *SELECT, "--json", "--toolkit", choice).stdout)["wheels"]
    parts = made["record"]["parts"]
    assert (parts["toolkit"], parts["headers"]) == (choice, ["nvidia/cudnn/include"])
    assert parts["header_packages"] == {"nvidia-cudnn-cu13": "9.9.9"}


@pytest.mark.slow
def test_nvcc_calls_the_host_compiler_that_was_named(own: Any, tmp_path: Path, index: SimpleIndex) -> None:
    cxx = tmp_path / "own-g++"
    cxx.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nexec g++ "$@"\n')
    cxx.chmod(0o755)
    own.env["CXX"] = str(cxx)
    index.add(make_kernels(tmp_path), OLD)
    lock_kernels(own)
    (made,) = json.loads(own.run("wheels", *SELECT, "--json").stdout)["wheels"]
    assert made["record"]["parts"]["host_compiler"].startswith("own-g++ ")
    assert "kernel.cu" in (tmp_path / "calls").read_text()


# An index of the tests' own, whose packages have the names and places of the real ones.

NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.1"\n'


@pytest.fixture
def own_index(index: SimpleIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_machine: None) -> SimpleIndex:
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    for name in ("UV_INDEX", "UV_FIND_LINKS", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    for name in (*COMPILER, *RUNTIME):
        upload(index, tmp_path / "files", name, "13.0.1", OLD)
    return index


def upload(index: SimpleIndex, folder: Path, name: str, version: str, uploaded: str, nvcc: str = NVCC) -> Path:
    files = {
        "nvidia-cuda-nvcc": {"nvidia/cu13/bin/nvcc": nvcc, "nvidia/cu13/bin/nvcc.profile": ""},
        "nvidia-nvvm": {"nvidia/cu13/nvvm/bin/cicc": "#!/bin/sh\n"},
        "nvidia-cuda-runtime": {"nvidia/cu13/lib/libcudart.so.13": version},
        "nvidia-cublas": {"nvidia/cu13/include/cublas_v2.h": ""},
    }
    path = make_wheel(folder, name.replace("-", "_"), version, ANY, sources=files.get(name))
    index.add(path, uploaded)
    return path


@pytest.fixture
def choose(tmp_path: Path, own_index: SimpleIndex) -> Callable[..., Toolkit]:
    def chosen(asked: ToolkitRequest = ToolkitRequest.INDEX, main: str = "# nothing\n", **changes: str) -> Toolkit:
        lock = bare_lock(tmp_path / "lock", main, **changes)
        return choose_toolkit(asked, lock, changes.get("cuda", CUDA), sources(tmp_path / "store"))

    return chosen


def refused(kind: type[EnvbuildError], action: Callable[[], object]) -> EnvbuildError:
    with pytest.raises(kind) as info:
        action()
    assert info.value.fix
    return info.value


def toolkits(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "store" / KIND).glob(f"*/{COMPLETE}"))


def test_packages_become_a_cuda_home(choose: Callable[..., Toolkit]) -> None:
    found = choose().toolchain()
    assert found.packages == dict.fromkeys((*COMPILER, *RUNTIME), "13.0.1")
    assert os.access(found.nvcc, os.X_OK), "the wheel's file had no such bit"
    assert os.access(found.home / "nvvm/bin/cicc", os.X_OK)
    assert (found.home / "lib64/libcudart.so").read_text() == "13.0.1"


def test_the_same_lock_gives_the_same_toolkit(
    choose: Callable[..., Toolkit], own_index: SimpleIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(own_index, tmp_path / "files", "nvidia-cuda-nvcc", "13.0.3", LATE)
    upload(own_index, tmp_path / "files", "nvidia-cuda-nvcc", "13.1.0", OLD)
    first = choose()
    assert first.compilers.cuda == "13.0.1", "neither one that came after the lock, nor one of another CUDA"
    upload(own_index, tmp_path / "files", "nvidia-cuda-nvcc", "13.0.2", OLD)
    assert choose().compilers == first.compilers
    assert choose(as_of="2026-05-17T00:00:00Z").compilers.cuda == "13.0.2"
    home = first.toolchain().home

    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    shutil.rmtree(tmp_path / "uv")
    asked = len(own_index.requested)
    assert choose().toolchain().home == home
    assert len(own_index.requested) == asked


def test_what_the_lock_has_keeps_its_version(
    choose: Callable[..., Toolkit], own_index: SimpleIndex, tmp_path: Path
) -> None:
    lines = []
    # A numba of another CUDA brings its own nvvm; the compiler is still all of the lock's CUDA.
    for name, version in (("nvidia-cuda-runtime", "13.0.0"), ("nvidia-cublas", "13.9.0"), ("nvidia-nvvm", "13.4.0")):
        path = upload(own_index, tmp_path / "files", name, version, LATE)
        lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    found = choose(main="".join(lines)).toolchain()
    assert found.packages["nvidia-cuda-runtime"] == "13.0.0"
    assert found.packages["nvidia-cublas"] == "13.9.0"
    assert found.packages["nvidia-nvvm"] == "13.0.1"
    assert (found.home / "include/cublas_v2.h").is_file()
    assert (found.home / "lib64/libcudart.so").read_text() == "13.0.0"


def test_an_index_that_cannot_be_reached(
    choose: Callable[..., Toolkit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    error = refused(NetworkError, lambda: choose(ToolkitRequest.AUTO))
    assert f"CUDA_HOME: {tmp_path / 'cuda'}: no nvcc that runs" in error.why
    assert "nvidia-cuda-nvcc==13.0.*" in error.why
    assert "127.0.0.1:9" in error.why
    assert "point CUDA_HOME at it" in error.fix


def test_files_that_cannot_be_downloaded(
    choose: Callable[..., Toolkit], own_index: SimpleIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose()
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    shutil.rmtree(tmp_path / "uv")
    assert "nvidia-cuda-nvcc==13.0.*" in refused(NetworkError, chosen.toolchain).why
    assert not toolkits(tmp_path)
    monkeypatch.setenv("UV_DEFAULT_INDEX", own_index.url)
    assert choose().toolchain().cuda == "13.0.1"


def test_an_index_that_did_not_have_it_yet(choose: Callable[..., Toolkit]) -> None:
    error = refused(MachineError, lambda: choose(as_of="2024-01-01T00:00:00Z"))
    assert error.what == "the package index has no CUDA toolkit 13.0"
    assert "as of 2024-01-01" in error.why
    assert "--as-of" in error.fix


def test_another_file_than_the_one_that_was_pinned(
    choose: Callable[..., Toolkit], own_index: SimpleIndex, tmp_path: Path
) -> None:
    chosen = choose()
    upload(own_index, tmp_path / "other", "nvidia-cuda-nvcc", "13.0.1", OLD, nvcc="#!/bin/sh\n")
    shutil.rmtree(tmp_path / "uv")
    error = refused(BuildError, chosen.toolchain)
    assert "nvidia-cuda-nvcc" in error.why
    assert "hash" in error.why.lower()
    assert not toolkits(tmp_path)


@pytest.mark.slow
def test_an_nvcc_that_does_not_run(choose: Callable[..., Toolkit], own_index: SimpleIndex, tmp_path: Path) -> None:
    upload(own_index, tmp_path / "other", "nvidia-cuda-nvcc", "13.0.1", OLD, nvcc="#!/bin/sh\nexit 1\n")
    assert "does not run" in refused(MachineError, choose().toolchain).why
    assert not toolkits(tmp_path)


@pytest.mark.slow
def test_a_toolkit_that_is_half_there_is_made_anew(choose: Callable[..., Toolkit], tmp_path: Path) -> None:
    home = choose().toolchain().home
    (mark,) = toolkits(tmp_path)
    mark.unlink()
    (home / "lib/libcudart.so.13").unlink()
    assert choose().toolchain().home == home
    assert (home / "lib64/libcudart.so").read_text() == "13.0.1"
    assert toolkits(tmp_path) == [mark]
