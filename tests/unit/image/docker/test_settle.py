"""settle.py, run as steps run it: with a Python of its own, beside the files that the native builder uses too."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.catalog.data import data_root
from envbuild.image.docker.dockerfile import tools

EPOCH = 946684800
PYTHON = f"3.{sys.version_info.minor}"


@pytest.fixture
def settle(tmp_path):
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, content in tools(Path(sys.executable)).items():
        if name.endswith(".py"):
            (folder / Path(name).name).write_bytes(content)

    def run(*words, status=0):
        command = [sys.executable, "-S", "-s", folder / "settle.py", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done

    return run


@pytest.fixture
def venv(tmp_path):
    site_packages = tmp_path / "opt/venv/lib" / f"python{PYTHON}" / "site-packages"
    site_packages.mkdir(parents=True)
    return tmp_path / "opt/venv"


def install(venv, name, files, commit=False):
    """Put a distribution there as uv does: now, and with whatever modes."""
    site_packages = venv / f"lib/python{PYTHON}/site-packages"
    info = site_packages / f"{name}-1.0.dist-info"
    info.mkdir()
    rows = []
    for file, text in {
        **files,
        f"{info.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
    }.items():
        (site_packages / file).parent.mkdir(parents=True, exist_ok=True)
        (site_packages / file).write_text(text)
        rows.append(f"{file},sha256={abs(hash(text))},{len(text)}")
    if commit:
        (info / "direct_url.json").write_text("{}")
        rows.append(f"{info.name}/direct_url.json,x,2")
    (info / "uv_cache.json").write_text("{}")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/uv_cache.json,x,2", ""]))
    return site_packages


def step(tmp_path, **values):
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"packages": [], "commits": {}, "overlaps": [], "later": [], **values}))
    return file


def looks(folder):
    return {
        path: (path.lstat().st_mtime_ns, path.lstat().st_ino, path.lstat().st_ctime_ns) for path in folder.rglob("*")
    }


def test_environment_has_plain_modes_one_time_and_bytecode(settle, venv, tmp_path):
    site_packages = install(venv, "one", {"one/__init__.py": "x = 1\n", "one/bad.py": "def\n", "one/run": "#!"})
    (site_packages / "one/run").chmod(0o700)
    (site_packages / "one").chmod(0o775)
    (venv / ".lock").touch()
    settle("environment", venv, PYTHON, EPOCH, step(tmp_path))
    assert not (venv / ".lock").exists()
    assert not list(site_packages.rglob("uv_cache.json"))
    assert "uv_cache" not in (site_packages / "one-1.0.dist-info/RECORD").read_text()
    assert [path.name for path in site_packages.rglob("*.pyc")] == [f"__init__.cpython-3{sys.version_info.minor}.pyc"]
    everything = [venv.parent, *venv.parent.rglob("*")]
    assert {path.stat().st_mtime for path in everything} == {EPOCH}
    assert {path.stat().st_mode & 0o7777 for path in everything if path.is_dir()} == {0o755}
    assert (site_packages / "one/run").stat().st_mode & 0o7777 == 0o755
    assert (site_packages / "one/bad.py").stat().st_mode & 0o7777 == 0o644


def test_later_steps_touch_nothing_of_earlier_ones(settle, venv, tmp_path):
    site_packages = install(venv, "one", {"one/__init__.py": "x = 1\n", "shared/a.py": "a = 1\n"})
    settle("environment", venv, PYTHON, EPOCH, step(tmp_path))
    before = {path: value for path, value in looks(site_packages).items() if path.is_file()}
    install(venv, "two", {"two/__init__.py": "y = 1\n", "shared/b.py": "b = 1\n"})
    settle("environment", venv, PYTHON, EPOCH, step(tmp_path))
    after = looks(site_packages)
    assert {path: after[path] for path in before} == before
    assert len(list((site_packages / "shared").rglob("*.pyc"))) == 2


def test_bytecode_is_that_of_the_source_that_is_there(settle, venv, tmp_path):
    site_packages = install(venv, "one", {"shared.py": "value = 'old'\n"})
    settle("environment", venv, PYTHON, EPOCH, step(tmp_path))
    install(venv, "two", {"shared.py": "value = 'new'\n"})
    settle("environment", venv, PYTHON, EPOCH, step(tmp_path))
    said = subprocess.run(
        [sys.executable, "-c", "import shared; print(shared.value)"],
        env={**os.environ, "PYTHONPATH": str(site_packages)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout == "new\n"


def test_commits_are_written_down(settle, venv, tmp_path):
    site_packages = install(venv, "one", {"one.py": ""}, commit=True)
    settle("environment", venv, PYTHON, EPOCH, step(tmp_path, commits={"one": ["https://h/one", "abc", None]}))
    told = json.loads((site_packages / "one-1.0.dist-info/direct_url.json").read_text())
    assert told == {"url": "https://h/one", "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "abc"}}


def test_winner_of_a_file_is_the_last_name_and_other_conflicts_are_refused(settle, venv, tmp_path):
    site_packages = install(venv, "bee", {"tests/x.py": "1\n"})
    install(venv, "ant", {"tests/x.py": "2\n"})
    file = step(tmp_path, packages=["ant", "bee"], overlaps=["tests/*"])
    assert settle("winners", site_packages, file).stdout.split() == ["bee"]
    done = settle("winners", site_packages, step(tmp_path, packages=["ant", "bee"]), status=1)
    assert "ant and bee bring different files of one name: tests/x.py" in done.stderr
    later = step(tmp_path, packages=["ant", "bee"], later=["bee"])
    assert settle("winners", site_packages, later).stdout.split() == []


def test_check_compares_with_the_lock(settle, venv, tmp_path):
    site_packages = install(venv, "Some_Name", {"x.py": ""})
    locked = tmp_path / "packages.json"
    locked.write_text('{"some-name": "1.0"}')
    settle("check", site_packages, locked)
    locked.write_text('{"some-name": "2.0", "other": "1"}')
    done = settle("check", site_packages, locked, status=1)
    assert "the environment is not what was locked" in done.stderr
    assert "some-name: locked 2.0, installed 1.0" in done.stderr
    assert "other: locked 1, installed not" in done.stderr


def test_the_scripts_of_steps_are_there():
    assert shutil.which("sh")
    for name in ("steps.sh", "toolkit.sh"):
        subprocess.run(["sh", "-n", data_root() / "containers/docker" / name], check=True)
