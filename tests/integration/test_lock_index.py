"""Locks against a package index of the test's own: as-of moments, sdists of the compile phase, and the checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import ANY, OLD, check_stack, error, files_of, lock_of, refused, result
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import GPU_BASE, write_base, write_stack, write_target

from envbuild.core import tomlread

NEW = "2025-06-01T00:00:00Z"


# ---- as-of


def test_as_of_a_day_gives_the_same_files_on_an_index_that_changed(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path
) -> None:
    write_stack(own.project, "s", {"lib": {"version": ">=1"}})
    wheel("lib", "1.0", requires=("dep",))
    wheel("lib", "1.1", "2025-03-01T00:00:00Z", requires=("dep",))
    wheel("dep", "1.0")
    arguments = ("lock", "--stack", "s", "--as-of", "2025-04-01")
    own.run(*arguments, "--name", "dated")
    before = files_of(own, "dated")
    assert lock_of(own, "dated").components["lib"].version == "1.1"
    # Newer releases come, and the one that was locked is yanked.
    wheel("lib", "2.0", NEW, requires=("dep",))
    wheel("dep", "2.0", NEW)
    index.yank(f"lib-1.1-{ANY}.whl")
    own.env["UV_CACHE_DIR"] = str(tmp_path / "another-uv")
    own.run(*arguments, "--name", "dated", "--upgrade")
    assert files_of(own, "dated") == before
    assert result(own.run(*arguments, "--name", "dated", "--diff", "--json"))["changes"] == []
    assert 'exclude-newer = "2025-04-02T00:00:00Z"' in before["pyproject.toml"]
    assert index.address not in "".join(before.values())
    own.run("lock", "--stack", "s", "--name", "dated")
    lock = lock_of(own, "dated")
    assert (lock.components["lib"].version, lock.inputs.as_of_asked) == ("2.0", "now")


def test_as_of_a_day_gives_the_same_files_in_another_project(
    own: Any, index: SimpleIndex, wheel: Callable[..., None]
) -> None:
    write_stack(own.project, "s", {"lib": {"version": ">=1"}})
    wheel("lib", "1.0")
    own.run("lock", "--stack", "s", "--as-of", "2025-04-01", "--name", "first")
    wheel("lib", "1.1", "2025-04-02T00:00:00Z")
    wheel("lib", "0.9", NEW)
    index.yank(f"lib-1.1-{ANY}.whl")
    own.run("lock", "--stack", "s", "--as-of", "2025-04-01", "--name", "second")
    assert files_of(own, "first") == files_of(own, "second")


def test_a_dated_lock_whose_release_is_gone_is_resolved_anew(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path
) -> None:
    write_stack(own.project, "s", {"lib": {"version": ">=1"}}, as_of="2025-04-01")
    wheel("lib", "1.0")
    wheel("lib", "1.1")
    own.run("lock", "--stack", "s")
    index.remove(f"lib-1.1-{ANY}.whl")
    own.env["UV_CACHE_DIR"] = str(tmp_path / "another-uv")
    done = own.run("lock", "--stack", "s", "--upgrade")
    assert "do not resolve any more" in done.stderr
    assert lock_of(own, "s").components["lib"].version == "1.0"


def test_as_of_release_of_a_version_counts_from_its_upload(
    own: Any, index: SimpleIndex, wheel: Callable[..., None]
) -> None:
    write_stack(own.project, "s", {"lib": {"version": ">=1"}, "dep": {}}, anchor="lib", margin_days=10)
    wheel("lib", "1.0", "2025-01-01T10:00:00.5Z")
    wheel("lib", "2.0", NEW)
    for version, day in (("1.0", "2024-12-01"), ("1.1", "2025-01-11"), ("1.2", "2025-01-12")):
        wheel("dep", version, f"{day}T09:00:00Z")
    own.run("lock", "--stack", "s", "--pin", "lib=1.0")
    lock = lock_of(own, "s-1.0")
    assert lock.inputs.as_of == "2025-01-11T10:00:00Z"
    assert lock.inputs.as_of_asked == "release"
    assert lock.components["dep"].version == "1.1"
    assert result(own.run("lock", "--stack", "s", "--pin", "lib=1.0", "--json"))["built"] is False
    own.run("lock", "--check")


def test_as_of_release_needs_an_index_that_knows_dates(own: Any, wheel: Callable[..., None]) -> None:
    write_stack(own.project, "s", {"lib": {"version": ">=1"}}, anchor="lib")
    wheel("lib", "1.0", None)
    told = error(own.run("lock", "--stack", "s", "--pin", "lib=1.0", "--json", status=3))
    assert "does not say when lib 1.0 was uploaded" in told["what"]
    told = error(own.run("lock", "--stack", "s", "--as-of", "soon", "--json", status=2))
    assert "--as-of soon" in told["what"]
    write_stack(own.project, "anchorless", {"lib": {"version": ">=1"}})
    told = error(own.run("lock", "--stack", "anchorless", "--as-of", "release", "--json", status=2))
    assert "has no anchor" in told["what"]


def test_a_component_with_a_date_of_its_own_may_be_newer(own: Any, wheel: Callable[..., None]) -> None:
    write_stack(own.project, "s", {"lib": {"as_of": "2025-06-02"}, "dep": {}}, as_of="2025-02-01")
    for name in ("lib", "dep"):
        wheel(name, "1.0")
        wheel(name, "2.0", NEW)
        wheel(name, "3.0", "2025-07-01T00:00:00Z")
    own.run("lock", "--stack", "s")
    components = lock_of(own, "s").components
    assert (components["lib"].version, components["dep"].version) == ("2.0", "1.0")


def test_a_pin_that_says_what_the_stack_says_is_none(own: Any, wheel: Callable[..., None]) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, anchor="lib", as_of="2025-02-01")
    wheel("lib", "1.0")
    own.run("lock", "--stack", "s")
    before = files_of(own, "s")
    assert result(own.run("lock", "--stack", "s", "--pin", "Lib=1.0", "--json"))["built"] is False
    assert files_of(own, "s") == before


# ---- the compile phase


PYPROJECT = '[build-system]\nrequires = ["builder>=1", "torch"]\nbuild-backend = "no_such_backend"\n'


def compile_stack(own: Any, **component: Any) -> None:
    components = {"kernels": {"phase": "compile", "version": ">=1,<3", **component}}
    write_stack(own.project, "s", components, target="gpu", base=GPU_BASE)


def test_compile_phase_is_read_from_the_sdist_and_never_built(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path
) -> None:
    compile_stack(own)
    requires = ("core-cu12==1.0", "dep>=1 ; python_version > '3'", "extra-thing ; extra == 'more'")
    sdist = make_sdist(tmp_path, "kernels", "1.0", requires=requires, extras=("more",), pyproject=PYPROJECT)
    index.add(sdist, OLD)
    for name in ("core_cu12", "core_cu13", "dep", "builder"):
        wheel(name, "1.0")
    own.run("lock", "--stack", "s")
    lock, files = lock_of(own, "s", GPU_BASE), files_of(own, "s", GPU_BASE)
    assert lock.rewritten == ("core-cu12==1.0 -> core-cu13==1.0",)
    assert lock.components["kernels"].version == "1.0"
    assert lock.components["kernels"].sdist is not None
    assert lock.components["kernels"].sdist.removeprefix("sha256:") in files["compile.txt"]
    assert "\nbuilder==1.0" in files["main.txt"]
    assert "\nkernels==1.0" in files["compile.txt"]
    assert "\ncore-cu13==1.0" in files["compile.txt"]
    assert "cu12" not in files["main.txt"] + files["compile.txt"]
    assert "torch" not in files["main.txt"]
    assert 'provides-extra = ["more"]' in files["pyproject.toml"]
    # Again, with the sdist from the store: the index is not asked for it twice.
    count = index.requested.count(f"/files/{sdist.name}")
    own.run("lock", "--stack", "s", "--upgrade")
    assert index.requested.count(f"/files/{sdist.name}") == count == 1


def test_a_lock_made_again_resolves_once_beside_reading_the_sdist(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path
) -> None:
    write_stack(own.project, "s", {"kernels": {"phase": "compile"}}, target="gpu", base=GPU_BASE, as_of="2025-04-01")
    index.add(make_sdist(tmp_path, "kernels", "1.0", requires=("dep",), pyproject=PYPROJECT), OLD)
    for name in ("dep", "builder"):
        wheel(name, "1.0")
    own.run("lock", "--stack", "s")
    before = files_of(own, "s", GPU_BASE)
    for folder in ("another-uv", "another-store"):
        own.env["UV_CACHE_DIR" if folder == "another-uv" else "ENVBUILD_CACHE_DIR"] = str(tmp_path / folder)
    index.requested.clear()
    # What only the compile phase needs is asked for before its sdist is there.
    index.after["/files/kernels-1.0.tar.gz"] = "/simple/dep/"
    own.run("lock", "--stack", "s", "--upgrade")
    assert files_of(own, "s", GPU_BASE) == before
    pages = [path for path in index.requested if path.startswith("/simple/")]
    assert sorted(pages) == ["/simple/builder/", "/simple/dep/", "/simple/kernels/"]
    assert index.requested.count("/files/kernels-1.0.tar.gz") == 1


@pytest.mark.parametrize("as_of", ["2025-04-01", "now"])
def test_an_sdist_that_was_replaced_is_read_anew(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path, as_of: str
) -> None:
    write_stack(own.project, "s", {"kernels": {"phase": "compile"}}, target="gpu", base=GPU_BASE, as_of=as_of)
    for name in ("dep", "other", "builder", "cleaner"):
        wheel(name, "1.0")
    index.add(make_sdist(tmp_path / "old", "kernels", "1.0", requires=("dep",), pyproject=PYPROJECT), OLD)
    own.run("lock", "--stack", "s")
    pyproject = PYPROJECT.replace("builder", "cleaner")
    index.add(make_sdist(tmp_path / "new", "kernels", "1.0", requires=("other",), pyproject=pyproject), OLD)
    own.run("lock", "--stack", "s", "--upgrade")
    files = files_of(own, "s", GPU_BASE)
    assert "\nother==1.0" in files["compile.txt"]
    assert "\ndep==" not in files["compile.txt"]
    assert "\ncleaner==1.0" in files["main.txt"]
    assert "builder" not in files["main.txt"]
    sdist = lock_of(own, "s", GPU_BASE).components["kernels"].sdist
    assert sdist is not None
    assert sdist in files["compile.txt"]


def test_a_release_with_several_wheels_is_resolved_from_the_index_once(
    own: Any, index: SimpleIndex, wheel: Callable[..., None]
) -> None:
    index.caching = "no-cache"  # it may be kept, and is to be asked for again
    write_stack(own.project, "s", {"lib": {}}, target="gpu", base=GPU_BASE)
    for machine in ("aarch64", "x86_64"):
        wheel("lib", "1.0", tags=f"py3-none-manylinux_2_28_{machine}")
    own.run("lock", "--stack", "s")
    assert index.requested.count("/simple/lib/") == 1


@pytest.mark.parametrize("stated", [("kernels", "1.1"), ("other", "1.0")])
def test_an_sdist_that_states_another_name_or_version_is_refused(
    own: Any, index: SimpleIndex, tmp_path: Path, stated: tuple[str, str]
) -> None:
    compile_stack(own)
    index.add(make_sdist(tmp_path, "kernels", "1.0", stated=stated), OLD)
    told = error(own.run("lock", "--stack", "s", "--json", status=5))
    assert f"Its PKG-INFO is of {' '.join(stated)}." in told["why"]


def test_an_sdist_of_setup_py_requires_what_its_egg_info_says(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path
) -> None:
    compile_stack(own)
    files = {"setup.py": "raise SystemExit('never run')\n", "kernels.egg-info/requires.txt": "dep<2\n\n[more]\nother\n"}
    index.add(make_sdist(tmp_path, "kernels", "1.0", metadata="2.1", files=files, pyproject=PYPROJECT), OLD)
    for name, version in (("dep", "1.0"), ("dep", "2.0"), ("builder", "1.0")):
        wheel(name, version)
    own.run("lock", "--stack", "s")
    locked = files_of(own, "s", GPU_BASE)
    assert "\ndep==1.0" in locked["compile.txt"]
    project = tomlread.loads(locked["pyproject.toml"])
    assert project["tool"]["uv"]["dependency-metadata"] == [
        {
            "name": "kernels",
            "version": "1.0",
            "requires-dist": ["dep<2", "other ; extra == 'more'"],
            "provides-extra": ["more"],
        }
    ]
    # What contradicts it is a contradiction now, and no lock.
    needs = {"dep": {"version": ">=2", "reason": "a test's"}}
    write_stack(own.project, "s", {"kernels": {"phase": "compile"}}, target="gpu", base=GPU_BASE, requirements=needs)
    assert "dep<2" in error(own.run("lock", "--stack", "s", "--json", status=4))["why"]


def test_an_sdist_that_does_not_say_what_it_requires_is_refused(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    compile_stack(own)
    index.add(make_sdist(tmp_path, "kernels", "1.0", metadata="2.1", files={"setup.py": ""}), OLD)
    told = error(own.run("lock", "--stack", "s", "--json", status=5))
    assert "What it requires is not known" in told["why"]


def test_a_wheel_may_belong_to_the_compile_phase(own: Any, wheel: Callable[..., None]) -> None:
    compile_stack(own)
    wheel("kernels", "1.0", requires=("dep",))
    wheel("dep", "1.0")
    own.run("lock", "--stack", "s")
    text = files_of(own, "s", GPU_BASE)["compile.txt"]
    assert "\nkernels==1.0" in text
    assert "\ndep==1.0" in text


def test_a_component_of_the_compile_phase_stays_there_when_phase_main_depends_on_it(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path
) -> None:
    components = {"lib": {}, "kernels": {"phase": "compile"}}
    write_stack(own.project, "s", components, target="gpu", base=GPU_BASE)
    wheel("lib", "1.0", requires=("kernels",))
    for name in ("dep", "builder"):
        wheel(name, "1.0")
    index.add(make_sdist(tmp_path, "kernels", "1.0", requires=("dep",), pyproject=PYPROJECT), OLD)
    own.run("lock", "--stack", "s")
    files = files_of(own, "s", GPU_BASE)
    assert "\nkernels==1.0" in files["compile.txt"]
    assert "\nkernels==" not in files["main.txt"]
    assert "\ndep==1.0" in files["main.txt"]
    assert lock_of(own, "s", GPU_BASE).phases["main"].packages == 3


# ---- variables of the environment


def test_a_stacks_variables_are_in_its_lock_and_part_of_it(own: Any, wheel: Callable[..., None]) -> None:
    wheel("lib", "1.0")
    write_stack(own.project, "s", {"lib": {}}, as_of="2025-02-01")
    own.run("lock", "--stack", "s")
    without = lock_of(own, "s")
    variable = {"value": "{site_packages}/lib", "reason": "a test's"}
    write_stack(own.project, "s", {"lib": {}}, as_of="2025-02-01", environment={"LIB_HOME": variable})
    assert result(own.run("lock", "--stack", "s", "--json"))["built"] is True
    lock = lock_of(own, "s")
    assert (without.environment, lock.environment) == ({}, {"LIB_HOME": "{site_packages}/lib"})
    assert lock.digest != without.digest
    done = result(own.run("sync", "--stack", "s", "--into", "venv", "--json"))
    assert done["environment"] == {"LIB_HOME": str(own.project / "venv/lib/python3.11/site-packages/lib")}
    assert (
        f"export LIB_HOME={done['environment']['LIB_HOME']}" in own.run("sync", "--stack", "s", "--into", "venv").stdout
    )


# ---- checks


def test_packages_of_two_cuda_versions_are_refused(own: Any, wheel: Callable[..., None]) -> None:
    for name in ("lib", "core_cu12", "core_cu13"):
        wheel(name, "1.0")
    why = refused(own, check_stack(own, core_cu12="", core_cu13=""), "cuda-mixed")
    assert "CUDA 12: core-cu12; CUDA 13: core-cu13" in why


def test_a_cuda_that_does_not_know_the_targets_sm_is_refused(own: Any, wheel: Callable[..., None]) -> None:
    write_target(own.project, "gpu", sm=("90", "100"))
    write_base(own.project, GPU_BASE, cuda="12.6", glibc="2.35")
    wheel("lib", "1.0")
    wheel("cuda_toolkit", "12.6.3")
    why = refused(own, check_stack(own, cuda_toolkit=""), "sm-floor")
    assert "SM 100" in why
    assert "takes 12.8 or newer" in why
    assert "SM 90" not in why


def test_a_cuda_above_the_fleets_driver_is_refused(own: Any, wheel: Callable[..., None]) -> None:
    write_target(own.project, "gpu", sm=("90",), driver="550.54.15")
    wheel("lib", "1.0")
    why = refused(own, check_stack(own), "driver")
    assert "CUDA 13.0 takes driver 580 or newer; the fleet of target gpu has 550.54.15" in why


def test_a_known_conflict_is_refused(own: Any, wheel: Callable[..., None]) -> None:
    conflicts = own.project / "envs/conflicts/lib-dep.toml"
    conflicts.parent.mkdir(parents=True)
    conflicts.write_text(
        'summary = "they hang"\npackages = { lib = "<2", dep = ">=1" }\nevidence = "seen"\nfix = "Take dep<1."\n'
    )
    wheel("lib", "1.0")
    wheel("dep", "1.0")
    why = refused(own, check_stack(own, dep=""), "lib-dep")
    assert "lib 1.0 with dep 1.0: they hang (evidence: seen)" in why
    wheel("dep", "0.9")
    own.run(*check_stack(own, dep="<1"), "--upgrade")
    assert lock_of(own, "s", GPU_BASE).allowed == ()


def test_wheels_for_a_newer_glibc_do_not_get_into_a_lock(own: Any, wheel: Callable[..., None]) -> None:
    wheel("lib", "1.0")
    wheel("native", "1.0", tags="cp311-cp311-manylinux_2_28_x86_64")
    wheel("native", "2.0", tags="cp311-cp311-manylinux_2_39_x86_64")
    own.run(*check_stack(own, native=""))
    assert "native==1.0" in files_of(own, "s", GPU_BASE)["main.txt"]
    told = error(own.run(*check_stack(own, native=">=2"), status=4))
    assert "glibc" in told["why"] or "platform" in told["why"]


def test_the_package_indexs_torch_on_a_base_without_cuda_is_the_users_choice(
    own: Any, wheel: Callable[..., None]
) -> None:
    write_stack(own.project, "s", {"torch": {"version": "==2.13.0"}})
    wheel("torch", "2.13.0", requires=("cuda-toolkit==13.0.2", "cudnn-cu13"))
    wheel("cuda_toolkit", "13.0.2")
    wheel("cudnn_cu13", "9.0")
    own.run("lock", "--stack", "s", "--torch-build", "index")
    assert lock_of(own, "s").torch.build == "index"
