"""Imported modules that no package of the lock lists: real modules, imported by an interpreter of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unit.smoke.test_installed import install

from envbuild_smoke.environment import debian, foreign_modules

SMOKE = Path(__file__).resolve().parents[3] / "smoke"
# What the fork server and the runner do, in an interpreter of its own.
FIND = """
import importlib, json, sys
from envbuild_smoke.environment import foreign_modules
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
listed = foreign_modules.ListedFiles(json.loads(sys.argv[2]), json.loads(sys.argv[3]))
first, again = foreign_modules.new_files(), foreign_modules.new_files()
print(json.dumps([[item.code, item.package, item.found] for item in listed.findings(first)] + sorted(again)))
"""


def findings(
    modules: list[str],
    *path: Path,
    locked: tuple[str, ...] = ("torch",),
    provided: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
) -> list[list[str]]:
    """The findings about what a Python with these folders on its path imports; each is reported once."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, SMOKE))), **(variables or {})}
    arguments = [json.dumps(value) for value in (modules, locked, provided)]
    done = subprocess.run([sys.executable, "-S", "-c", FIND, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: list[list[str]] = json.loads(done.stdout)
    return result


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a package of the lock, and one that is not in the lock."""
    folder = tmp_path / "site-packages"
    install(folder, "torch", {"torch/__init__.py": b"", "torch/nn.py": b""})
    install(folder, "apex", {"apex/__init__.py": b"", "apex/optimizers.py": b""})
    return folder


def test_imported_package_that_is_not_in_the_lock_is_found(packages: Path) -> None:
    assert findings(["torch.nn", "json", "decimal", "ssl", "multiprocessing.shared_memory"], packages) == []
    expected = [["imported-unlisted", "apex", str(packages / f"apex/{name}.py")] for name in ("__init__", "optimizers")]
    assert findings(["torch", "apex.optimizers"], packages) == expected
    assert findings(["torch", "apex.optimizers"], packages, locked=("torch", "apex")) == []
    # A plan without expected packages has no findings.
    assert findings(["apex"], packages, locked=()) == []


def test_module_that_a_package_of_the_lock_does_not_list_is_found(packages: Path) -> None:
    (packages / "torch" / "extra.py").write_text("")
    assert findings(["torch.extra"], packages) == [["imported-unlisted", "torch", str(packages / "torch/extra.py")]]


def test_module_of_the_path_and_extension_are_found(packages: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "space").mkdir(parents=True)
    (elsewhere / "space" / "inner.py").write_text("")
    assert findings(["space.inner"], packages, elsewhere) == [
        ["imported-unlisted", "space", str(elsewhere / "space/inner.py")]
    ]
    (tmp_path / "library.pth").write_text("")
    import _ctypes

    extension = elsewhere / Path(_ctypes.__file__).name
    extension.write_bytes(Path(_ctypes.__file__).read_bytes())
    # An extension is found, even one by the name of the Python's own.
    assert [row[2] for row in findings(["_ctypes"], elsewhere, packages)] == [str(extension)]


def test_files_that_an_installer_linked_and_folders_by_another_name_are_the_packages(
    packages: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache.py"
    (packages / "torch/nn.py").rename(cache)
    (packages / "torch/nn.py").symlink_to(cache)
    (tmp_path / "other").symlink_to(packages)
    assert findings(["torch.nn"], packages) == []
    assert findings(["torch.nn"], tmp_path / "other") == []


def test_editable_component_of_the_lock_is_not_foreign(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "source" / "megatron").mkdir(parents=True)
    (tmp_path / "source" / "megatron" / "core.py").write_text("")
    origin = {"url": f"file://{tmp_path}/source", "dir_info": {"editable": True}}
    install(packages, "megatron_core", {"megatron_core-1.0.dist-info/direct_url.json": json.dumps(origin).encode()})
    path = (packages, tmp_path / "source")
    assert findings(["megatron.core"], *path, locked=("megatron-core",)) == []
    assert [row[1] for row in findings(["megatron.core"], *path)] == ["megatron"]


def test_base_that_brings_a_package_brings_its_whole_folder(packages: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    install(own, "stranger", {"stranger.py": b""})
    (packages / "legacy-1.egg-info").mkdir()
    (packages / "legacy-1.egg-info" / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: legacy\nVersion: 1\n")
    (packages / "legacy.py").write_text("")
    (packages / "loose.py").write_text("")
    modules = ["torch", "apex", "legacy", "loose", "stranger"]
    result = findings(modules, packages, own, locked=("megatron-core",), provided=("torch",))
    assert [row[1] for row in result] == ["loose", "stranger"]


def test_what_a_library_wrote_into_its_cache_is_no_finding_unless_the_cache_is_on_the_path(
    packages: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "triton"
    (cache / "ab").mkdir(parents=True)
    (cache / "ab" / "kernel.py").write_text("")
    loads = tmp_path / "loads"
    install(loads, "torch", {"loads.py": LOADS.replace("FILE", str(cache / "ab" / "kernel.py")).encode()})
    assert findings(["loads"], loads, variables={"TRITON_CACHE_DIR": str(cache)}) == []
    assert [row[1] for row in findings(["loads"], loads)] == ["kernel"]
    on_path = {"TRITON_CACHE_DIR": str(cache)}
    assert [row[1] for row in findings(["kernel"], loads, cache / "ab", variables=on_path)] == ["kernel"]


LOADS = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kernel", "FILE")
sys.modules["kernel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["kernel"])
"""


def test_modules_without_a_file_are_skipped_and_lazy_ones_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    class Lazy:
        __slots__ = ()

        def __getattr__(self, name: str) -> object:
            requested.append(name)
            raise ImportError(name)

    foreign_modules.new_files()
    for name, value in {"no_vars": Lazy(), "none": None, "relative": type(sys)("relative")}.items():
        monkeypatch.setitem(sys.modules, name, value)
    sys.modules["relative"].__file__ = "_ops.py"
    assert foreign_modules.new_files() == {}
    assert set(requested) <= {"__dict__"}


def test_modules_of_the_distributions_python_are_those_that_dpkg_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "dist-packages"
    modules.mkdir()
    (tmp_path / "dpkg" / "info").mkdir(parents=True)
    (tmp_path / "dpkg" / "info" / "python3-yaml.list").write_text(f"/.\n{modules}/yaml.py\n")
    monkeypatch.setattr(debian, "MODULES", f"{modules}/")
    monkeypatch.setattr(debian, "_ROOT", tmp_path / "dpkg")
    debian._modules.cache_clear()
    try:
        assert [debian.lists(str(modules / name)) for name in ("yaml.py", "apex.py")] == [True, False]
    finally:
        debian._modules.cache_clear()
