"""What is built holds what is in the tree, and works without the tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from envbuild.catalog.data import data_root
from envbuild.core.digests import sha256_bytes
from envbuild.lock.uv.program import uv_program
from envbuild.sync.zipapp import smoke_bytes

DATA = ("envs", "lockfiles", "containers")


def uv(*arguments: str | Path, **options: object) -> None:
    done = subprocess.run([uv_program(), *arguments], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr


def files_of(folder: Path) -> set[str]:
    """Everything but what Python leaves behind."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != "uv.lock"
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as git would give it to someone else, after it was used a little."""
    folder = tmp_path_factory.mktemp("tree") / "envbuild"
    names = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(names, cwd=data_root(), capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (data_root() / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(data_root() / name, folder / name)
    locked = folder / "lockfiles" / "mcore" / "debian12"
    locked.mkdir(parents=True, exist_ok=True)
    (locked / "uv.lock").write_text("made by locking\n")
    for used in (folder / "smoke" / "envbuild_smoke", folder / "build" / "envbuild" / "core", folder / "containers"):
        (used / "__pycache__").mkdir()
        (used / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, the wheel made from the tree and, in `again/`, the wheel made from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--wheel", "--out-dir", out, tree)
    uv("build", "--quiet", "--sdist", "--out-dir", out, tree)
    (sdist,) = out.glob("*.tar.gz")
    uv("build", "--quiet", "--wheel", "--out-dir", out / "again", sdist)
    return out


def wheel_content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_exactly_the_package_and_its_data(tree: Path, built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    content = wheel_content(wheel)
    expected = {f"envbuild/{name}" for name in files_of(tree / "build" / "envbuild")}
    expected |= {f"envbuild/_data/{kind}/{name}" for kind in DATA for name in files_of(tree / kind)}
    expected |= {f"envbuild_smoke/{name}" for name in files_of(tree / "smoke" / "envbuild_smoke")}
    expected |= {"envbuild/_data/smoke/__main__.py"}
    assert {name for name in content if ".dist-info/" not in name} == expected
    for name in ("envbuild/cli/main.py", "envbuild/_data/smoke/__main__.py", "envbuild/diagnose/signatures.json"):
        assert content[name]
    assert any(name.endswith("licenses/LICENSE") for name in content)
    entry_points = next(text for name, text in content.items() if name.endswith("entry_points.txt"))
    assert b"envbuild = envbuild.cli.main:main" in entry_points


def test_wheel_from_the_sdist_is_the_wheel_from_the_tree(built: Path) -> None:
    (wheel,), (again,) = built.glob("*.whl"), (built / "again").glob("*.whl")
    assert wheel_content(again) == wheel_content(wheel)


def test_sdist_holds_tests_docs_and_the_dev_script(tree: Path, built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for folder in ("tests", "docs"):
        assert {f"{folder}/{name}" for name in files_of(tree / folder)} <= names
    assert {"dev", "README.md", "CHANGELOG.md", "LICENSE"} <= names


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("venv") / "venv"
    uv("venv", "--quiet", "--python", sys.executable, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_installed_tool_finds_its_data(tree: Path, built: Path, venv: Path, tmp_path: Path, how: str) -> None:
    what = ["--editable", tree] if how == "editable" else [next(built.glob("*.whl"))]
    uv("pip", "install", "--quiet", "--reinstall-package", "envbuild", "--python", venv, *what)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    code = "from envbuild.catalog.data import data_root; from envbuild.sync.zipapp import smoke_bytes\n"
    code += "from envbuild.core.digests import sha256_bytes; print(data_root()); print(sha256_bytes(smoke_bytes()))"
    asked = subprocess.run([venv / "bin" / "python", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    root, smoke = asked.stdout.split()
    if how == "editable":
        assert Path(root) == tree
    else:
        assert Path(root).is_relative_to(venv)
    # The certificate names this digest, so it may not depend on how the tool was installed.
    assert smoke == sha256_bytes(smoke_bytes(tree / "smoke"))
    listed = subprocess.run(
        [venv / "bin" / "envbuild", "list", "stacks", "--json"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    assert "mcore" in [row["name"] for row in json.loads(listed.stdout)["stacks"]]
