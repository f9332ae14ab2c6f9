"""The workspace of a build: headers, sdists that are none, compilers that were killed."""

import dataclasses
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.simple_index import make_sdist
from unit.wheels.plans import plan
from unit.wheels.test_compiler_wrappers import toolchain

from envbuild.core.errors import BuildError, CheckRefusedError
from envbuild.lock.uv.program import uv_program
from envbuild.wheels.build import fixed_paths
from envbuild.wheels.build.compiler_wrappers import Tokens
from envbuild.wheels.build.fixed_paths import BuildPaths
from envbuild.wheels.build.limits import Limits
from envbuild.wheels.build.wheel import WheelWorkspace, build_wheel
from envbuild.wheels.sources import SourceOrigin


def workspace(tmp_path: Path) -> WheelWorkspace:
    (tmp_path / "scratch").mkdir()
    return WheelWorkspace(
        environment=tmp_path / "venv",
        toolchain=toolchain(tmp_path / "cuda"),
        folder=tmp_path / "scratch",
        log=tmp_path / "log",
        tokens=Tokens(folder=tmp_path / "tokens", limits=Limits(jobs=4, memory_gib=16), job_memory_gib=4),
    )


def ignore(text: str) -> None:
    """Progress is not looked at."""


def test_ended_build_goes_on_from_its_sources_alone(tmp_path):
    space = workspace(tmp_path)
    for name in ("source/k/build/temp/k.o", "out/old.whl"):
        (space.folder / name).parent.mkdir(parents=True)
        (space.folder / name).touch()
    with pytest.raises(CheckRefusedError, match="cannot be unpacked"):
        build_wheel(plan(), b"nothing", space, ignore)
    assert [path.relative_to(space.folder).as_posix() for path in space.folder.rglob("*.*")] == [
        "source/k/build/temp/k.o"
    ]


# A build backend in the sources themselves (PEP 517), which writes a wheel with one file.
BACKEND = """\
import os, zipfile
def build_wheel(folder, settings=None, metadata=None):
    name = "causal_conv1d-1.7.0-py3-none-any.whl"
    info = "causal_conv1d-1.7.0.dist-info/"
    texts = {"place.txt": os.path.basename(os.getcwd()), "home.txt": os.environ["HOME"]}
    texts[info + "METADATA"] = "Metadata-Version: 2.1\\nName: causal-conv1d\\nVersion: 1.7.0\\n"
    texts[info + "WHEEL"] = "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as archive:
        for file, text in {**texts, info + "RECORD": ""}.items():
            archive.writestr(file, text)
    return name
"""


def test_a_folder_of_a_repository_is_built_alone(tmp_path):
    own = '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
    files = {"python/pyproject.toml": own, "python/own.py": BACKEND}
    archive = make_sdist(tmp_path, "causal-conv1d", "1.7.0", files=files).read_bytes()
    subprocess.run([uv_program(), "venv", "-q", "--python", sys.executable, tmp_path / "venv"], check=True)
    commit = SourceOrigin(
        package="causal-conv1d", version="1.7.0", git="https://x/y", commit="1" * 40, subdirectory="python"
    )
    wanted = dataclasses.replace(plan(python=f"cp3{sys.version_info.minor}"), origin=commit)
    wheel = build_wheel(wanted, archive, workspace(tmp_path), ignore)
    with zipfile.ZipFile(wheel) as made:
        assert made.read("place.txt") == b"python"
        assert made.read("home.txt") == b"/run/wheel/build/home"


def test_without_a_namespace_folders_are_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(fixed_paths, "find_tool", lambda *_names: Path("/bin/false"))
    are_possible = fixed_paths.are_possible.__wrapped__
    assert not are_possible()
    paths = BuildPaths(build=tmp_path / "b", environment=tmp_path / "e", cuda=tmp_path / "c", stage=None)
    assert paths.seen(tmp_path / "b/x") == tmp_path / "b/x"
    assert paths.command(["uv", "build"]) == ["uv", "build"]


def test_missing_headers_are_named(tmp_path):
    sdist = make_sdist(tmp_path, "causal-conv1d", "1.7.0").read_bytes()
    with pytest.raises(CheckRefusedError, match="headers are missing") as refused:
        build_wheel(plan(headers=("nvidia/cudnn/include",)), sdist, workspace(tmp_path), ignore)
    assert "lib/python3.10/site-packages/nvidia/cudnn/include" in refused.value.why


def test_a_compiler_that_was_killed_is_explained(tmp_path):
    from envbuild.wheels.build.wheel import _failed

    error = _failed(plan(), workspace(tmp_path), 2, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)")
    assert isinstance(error, BuildError)
    assert "memory ran out" in error.why
    assert "--jobs 2" in error.fix
