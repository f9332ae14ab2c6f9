"""`envbuild lock --verify`: a lock is installed and imported before it is published, with the real uv."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import OLD
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import BASE, write_base, write_stack

from envbuild.lock.lockfile import read_lock

LIB_IMPORTED = {"imported": ["lib"], "not_checked": [], "stubbed": [], "failed": []}
BROKEN = "raise ImportError(f'no symbol in {__file__}')\n"


@pytest.fixture
def own(own: Any) -> Any:
    """With a base that this machine can stand in for, and a stack of `lib`."""
    write_base(own.project, glibc="2.17")
    write_stack(own.project, "s", {"lib": {"modules": ["lib"]}}, as_of="2025-02-01")
    return own


def verify(tool: Any, *arguments: str, status: int = 0) -> dict[str, Any]:
    done = tool.run("lock", "--stack", "s", "--verify", "--json", *arguments, status=status)
    assert "Traceback" not in done.stderr
    output: dict[str, Any] = json.loads(done.stdout)
    assert list((tool.cache / "staging").iterdir()) == [], "the environment is gone"
    return output


def place(tool: Any) -> Path:
    return Path(tool.project / "lockfiles/s" / BASE)


def state(tool: Any) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in place(tool).iterdir()}


def test_a_lock_that_imports_is_published_and_stays_when_a_new_one_does_not(
    own: Any, wheel: Callable[..., None]
) -> None:
    wheel("lib", "1.0")
    done = verify(own)
    where = done["verified"].pop("where")
    assert (done["built"], done["verified"]) == (True, LIB_IMPORTED)
    assert re.fullmatch(r"this machine \(glibc [\d.]+, Python 3\.11\.\d+\)", where)
    assert read_lock(place(own)).lock.allowed == ()
    before = state(own)
    again = verify(own)
    assert (again["built"], again["verified"]["imported"]) == (False, ["lib"])
    assert state(own) == before
    wheel("lib", "1.1", module="import undeclared\n")
    own.env["UV_CACHE_DIR"] += "-new"
    write_stack(own.project, "s", {"lib": {"modules": ["lib"], "version": ">=1.1"}}, as_of="2025-02-01")
    error = verify(own, status=5)["error"]
    assert "] lib of lib does not import: ModuleNotFoundError: No module named 'undeclared'" in error["why"]
    assert "--allow import" in error["fix"]
    assert state(own) == before


def test_a_lock_that_does_not_import_is_published_only_where_that_is_allowed(
    own: Any, wheel: Callable[..., None]
) -> None:
    wheel("lib", "1.0", module=BROKEN)
    verify(own, status=5)
    assert not (own.project / "lockfiles").exists() or not place(own).exists()
    done = verify(own, "--allow", "import")
    assert [(entry["code"], entry["packages"]) for entry in done["verified"]["failed"]] == [("import", ["lib"])]
    (allowed,) = read_lock(place(own)).lock.allowed
    assert re.match(r"import:[0-9a-f]{8}: ", allowed)
    assert allowed.partition(": ")[2].startswith(
        "lib of lib does not import: ImportError: no symbol in {venv}/lib/python3.11/"
    )
    assert str(own.cache) not in (place(own) / "stack.lock.toml").read_text()
    own.run("lock", "--check")


def test_an_existing_lock_that_does_not_import_is_found(own: Any, wheel: Callable[..., None]) -> None:
    wheel("lib", "1.0", module=BROKEN)
    own.run("lock", "--stack", "s")
    before = state(own)
    assert "no symbol" in verify(own, status=5)["error"]["why"]
    assert state(own) == before


def test_modules_of_the_compile_phase_are_not_checked(
    own: Any, wheel: Callable[..., None], index: SimpleIndex, tmp_path: Path
) -> None:
    wheel("lib", "1.0", module="import kernels\n")
    pyproject = '[build-system]\nrequires = []\nbuild-backend = "no_such_backend"\n'
    index.add(make_sdist(tmp_path, "kernels", "1.0", pyproject=pyproject), OLD)
    components = {"lib": {"modules": ["lib"]}, "kernels": {"phase": "compile", "modules": ["kernels"]}}
    write_stack(own.project, "s", components, as_of="2025-02-01")
    output = verify(own)["verified"]
    assert output["imported"] == []
    assert output["not_checked"] == [
        "lib (lib): it needs kernels, of phase compile, which is not installed",
        "kernels (kernels): phase compile is not installed",
    ]


def test_code_around_a_compiled_module_is_imported_with_a_stub_of_it(
    own: Any, wheel: Callable[..., None], index: SimpleIndex, tmp_path: Path
) -> None:
    """`lib` imports with a stub of what `kernels` compiles; what is wrong with `lib` is found all the same."""
    wheel("lib", "1.0", module="import kernels_ext\nNAMES = {kernels_ext.DType.kByte: 'byte'}\n")
    pyproject = '[build-system]\nrequires = []\nbuild-backend = "no_such_backend"\n'
    index.add(make_sdist(tmp_path, "kernels", "1.0", pyproject=pyproject), OLD)
    (own.project / "envs/wheels").mkdir()
    (own.project / "envs/wheels/kernels.toml").write_text('summary = "x"\nextension_module = "kernels_ext"\n')
    components = {"lib": {"modules": ["lib"]}, "kernels": {"phase": "compile", "modules": ["kernels_ext"]}}
    write_stack(own.project, "s", components, as_of="2025-02-01")
    output = verify(own)["verified"]
    assert (output["imported"], output["stubbed"]) == (["lib"], ["kernels"])
    assert output["not_checked"] == ["kernels_ext (kernels): a placeholder: a stub of a compiled module"]
    assert read_lock(place(own)).lock.stubbed == ("kernels",)
    assert "stubs: kernels" in own.run("lock", "--stack", "s", "--verify").stdout
    wheel("lib", "1.1", module="import kernels_ext\nimport undeclared\n")
    own.env["UV_CACHE_DIR"] += "-new"
    write_stack(own.project, "s", components | {"lib": {"modules": ["lib"], "version": ">=1.1"}}, as_of="2025-02-01")
    assert "No module named 'undeclared'" in verify(own, status=5)["error"]["why"]


def test_a_package_that_does_not_build_is_a_finding(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    pyproject = '[build-system]\nrequires = []\nbuild-backend = "no_such_backend"\n'
    index.add(make_sdist(tmp_path, "lib", "1.0", pyproject=pyproject), OLD)
    error = json.loads(own.run("lock", "--stack", "s", "--verify", "--json", status=5).stdout)["error"]
    assert re.match(r"\[install:[0-9a-f]{8}\] lib does not install: Failed to ", error["why"])
    assert "No module named 'no_such_backend'" in error["why"].splitlines()[0]
    assert "--allow install" in error["fix"]


def test_a_python_that_cannot_be_had_is_known_before_anything_is_resolved(
    own: Any, wheel: Callable[..., None], index: SimpleIndex
) -> None:
    write_base(own.project, glibc="2.17", python="3.14")
    wheel("lib", "1.0")
    done = own.run("lock", "--stack", "s", "--verify", "--json", status=11)
    error = json.loads(done.stdout)["error"]
    assert "Python 3.14): Python 3.14 is missing, and uv may not download it" in error["why"]
    assert "UV_PYTHON_DOWNLOADS=manual uv python install 3.14" in error["why"]
    assert (index.requested, "resolve" in done.stderr) == ([], False)


def test_a_result_is_kept_by_the_locks_digest(own: Any, wheel: Callable[..., None]) -> None:
    wheel("lib", "1.0", module=BROKEN)
    first = verify(own, status=5)["error"]
    # The second time nothing is installed: without uv's cache and the index it could not be.
    own.env["UV_CACHE_DIR"] += "-new"
    own.run("lock", "--stack", "s")
    (result,) = (own.cache / "verifications").iterdir()
    before = result.stat().st_ctime_ns
    assert verify(own, status=5)["error"]["why"] == first["why"]
    assert result.stat().st_ctime_ns == before


@pytest.fixture
def with_rootfs(own: Any, mini_cache: Path) -> Any:
    """The tool on a machine that has the root file system of Debian 12."""
    (own.cache / "bases").mkdir(parents=True)
    for entry in (mini_cache / "bases").iterdir():
        (own.cache / "bases" / entry.name).symlink_to(entry.resolve())
    own.env["PATH"] = os.environ["PATH"]
    return own


IN_THE_BASE = "import sys\nassert sys.prefix == '/opt/envbuild/venv'\n"


def test_lock_is_verified_in_the_root_file_system_of_its_base(
    with_rootfs: Any, wheel: Callable[..., None], index: SimpleIndex, tmp_path: Path
) -> None:
    wheel("lib", "1.0", module=f"{IN_THE_BASE}import added\n")
    more = {"base": "debian12", "files": {"added.py": {"text": "a = 1\n", "reason": "a test's"}}}
    write_stack(with_rootfs.project, "s", {"lib": {"modules": ["lib"]}}, as_of="2025-02-01", **more)
    done = verify(with_rootfs, "--base", "debian12")["verified"]
    assert (done["where"], done["imported"]) == ("base debian12", ["lib"])
    assert read_lock(with_rootfs.project / "lockfiles/s/debian12").lock.verified_in == "base debian12"


@pytest.mark.slow
def test_another_base_stands_in_for_one_that_cannot_be_had(with_rootfs: Any, wheel: Callable[..., None]) -> None:
    """The stack's base is older than Debian 12 and is made here by nothing: its suite is none."""
    path = with_rootfs.project / "envs/bases/small.toml"
    path.write_text(path.read_text().replace('suite = "bookworm"', 'suite = "no-such-suite"'))
    wheel("lib", "1.0", module=IN_THE_BASE)
    assert verify(with_rootfs)["verified"]["where"] == "base debian12"
    wheel("lib", "1.1", module="import numpy.gone\n")
    with_rootfs.env["UV_CACHE_DIR"] += "-new"
    write_stack(with_rootfs.project, "s", {"lib": {"modules": ["lib"], "version": ">=1.1"}}, as_of="2025-02-01")
    error = verify(with_rootfs, status=5)["error"]
    assert "lib of lib does not import: ModuleNotFoundError: No module named 'numpy'" in error["why"]


def test_module_that_loads_the_driver_is_imported_with_a_stub(own: Any, wheel: Callable[..., None]) -> None:
    wheel("lib", "1.0", module="import ctypes\nassert ctypes.CDLL('libcuda.so.1').cuInit(0)\n")
    assert verify(own)["verified"]["imported"] == ["lib"]
