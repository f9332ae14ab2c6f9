"""Locks against a package index of the test's own: as-of moments, sdists of the compile phase, and the checks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.lock_runs import ANY, OLD, check_stack, error, files_of, lock_of, result
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import GPU_BASE, write_base, write_stack, write_target

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
    # Newer releases come, and older ones late; and the one that was locked is yanked.
    wheel("lib", "2.0", NEW, requires=("dep",))
    wheel("lib", "1.2", "2025-04-02T00:00:00Z", requires=("dep",))
    wheel("dep", "2.0", NEW)
    own.run(*arguments, "--name", "other")
    assert files_of(own, "other") == before
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
    refused = error(own.run("lock", "--stack", "s", "--pin", "lib=1.0", "--json", status=3))
    assert "does not say when lib 1.0 was uploaded" in refused["what"]


def test_a_component_with_a_date_of_its_own_may_be_newer(own: Any, wheel: Callable[..., None]) -> None:
    write_stack(own.project, "s", {"lib": {"as_of": "2025-06-02"}, "dep": {}}, as_of="2025-02-01")
    for name in ("lib", "dep"):
        wheel(name, "1.0")
        wheel(name, "2.0", NEW)
        wheel(name, "3.0", "2025-07-01T00:00:00Z")
    own.run("lock", "--stack", "s")
    components = lock_of(own, "s").components
    assert (components["lib"].version, components["dep"].version) == ("2.0", "1.0")


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


def test_relock_resolves_once_while_the_sdist_is_read(
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


def test_an_sdist_that_was_replaced_is_read_anew(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path
) -> None:
    write_stack(own.project, "s", {"kernels": {"phase": "compile"}}, target="gpu", base=GPU_BASE, as_of="2025-04-01")
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


def test_a_component_of_the_compile_phase_stays_there_when_phase_main_depends_on_it(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path
) -> None:
    components = {"lib": {}, "kernels": {"phase": "compile"}, "native": {"phase": "compile"}}
    write_stack(own.project, "s", components, target="gpu", base=GPU_BASE)
    wheel("lib", "1.0", requires=("kernels",))
    # A component of that phase may have a wheel, too.
    wheel("native", "1.0", requires=("dep-of-native",))
    wheel("dep_of_native", "1.0")
    for name in ("dep", "builder"):
        wheel(name, "1.0")
    index.add(make_sdist(tmp_path, "kernels", "1.0", requires=("dep",), pyproject=PYPROJECT), OLD)
    own.run("lock", "--stack", "s")
    files = files_of(own, "s", GPU_BASE)
    for name in ("kernels", "native", "dep-of-native"):
        assert f"\n{name}==1.0" in files["compile.txt"]
    assert "\nkernels==" not in files["main.txt"]
    assert "\ndep==1.0" in files["main.txt"]
    assert lock_of(own, "s", GPU_BASE).phases["main"].packages == 3


# ---- variables of the environment


def test_a_stacks_variables_and_files_are_in_its_lock_and_part_of_it(own: Any, wheel: Callable[..., None]) -> None:
    wheel("lib", "1.0")
    write_stack(own.project, "s", {"lib": {}}, as_of="2025-02-01")
    own.run("lock", "--stack", "s")
    without = lock_of(own, "s")
    variable = {"value": "{site_packages}/lib", "reason": "a test's"}
    more = {
        "environment": {"LIB_HOME": variable},
        "files": {"lib/Makefile": {"text": "all: ;\n", "reason": "a test's"}},
    }
    write_stack(own.project, "s", {"lib": {}}, as_of="2025-02-01", **more)
    assert result(own.run("lock", "--stack", "s", "--json"))["built"] is True
    lock = lock_of(own, "s")
    assert (without.environment, lock.environment) == ({}, {"LIB_HOME": "{site_packages}/lib"})
    assert (without.files, lock.files) == ({}, {"lib/Makefile": "all: ;\n"})
    assert lock.digest != without.digest
    done = result(own.run("sync", "--stack", "s", "--into", "venv", "--json"))
    assert (own.project / "venv/lib/python3.11/site-packages/lib/Makefile").read_text() == "all: ;\n"
    assert done["environment"] == {"LIB_HOME": str(own.project / "venv/lib/python3.11/site-packages/lib")}
    assert (
        f"export LIB_HOME={done['environment']['LIB_HOME']}" in own.run("sync", "--stack", "s", "--into", "venv").stdout
    )


# ---- checks: each is a table in tests/unit/lock/test_rules.py


def test_each_check_refuses_what_uv_resolves_and_its_code_allows_it(own: Any, wheel: Callable[..., None]) -> None:
    write_target(own.project, "gpu", sm=("90", "100"), driver="520.61.05")
    write_base(own.project, GPU_BASE, cuda="12.6", glibc="2.35")
    conflict = 'summary = "they hang"\npackages = { lib = "<2", dep = ">=1" }\nevidence = "seen"\nfix = "Take dep<1."\n'
    (own.project / "envs/conflicts").mkdir(parents=True)
    (own.project / "envs/conflicts/lib-dep.toml").write_text(conflict)
    for name in ("lib", "dep", "core_cu12", "core_cu13"):
        wheel(name, "1.0")
    wheel("cuda_toolkit", "12.6.3")
    # uv looks at platforms, and not at the ABI: a wheel for Python without its global lock is enough for it.
    wheel("native", "1.0", tags="cp311-cp311t-manylinux_2_28_x86_64")
    command = check_stack(own, dep="", core_cu12="", core_cu13="", cuda_toolkit="", native="")
    refused = error(own.run(*command, status=5))
    refusal = dict(re.findall(r"^\[(.+?):[0-9a-f]{8}\] (.*)", refused["why"], re.MULTILINE))
    expected = {
        "cuda-mixed": "CUDA 12: core-cu12, cuda-toolkit; CUDA 13: core-cu13",
        "sm-floor": "SM 100",
        "driver": "the fleet of target gpu has 520.61.05",
        "lib-dep": "lib 1.0 with dep 1.0: they hang (evidence: seen)",
        "glibc": "native 1.0 cannot be installed on the base (glibc 2.35, Python 3.11)",
    }
    assert refusal.keys() == expected.keys()
    assert [code for code, text in expected.items() if text not in refusal[code]] == []
    assert "SM 90" not in refusal["sm-floor"]
    assert not (own.project / "lockfiles/s").exists()
    # Each has to be allowed.
    allow = [word for code in refusal for word in ("--allow", code)]
    still = error(own.run(*command, *allow[2:], status=5))["why"]
    assert re.findall(r"^\[(.+?):", still, re.MULTILINE) == [allow[1]]
    own.run(*command, *allow)
    assert {line.split(":")[0] for line in lock_of(own, "s", GPU_BASE).allowed} == set(refusal)
    # A target whose fleet changed makes its locks old.
    own.run("lock", "--check")
    write_target(own.project, "gpu", sm=("90", "100"), driver="515.43.04")
    own.run("lock", "--check", status=5)


def test_wheels_for_a_newer_glibc_do_not_get_into_a_lock(own: Any, wheel: Callable[..., None]) -> None:
    wheel("lib", "1.0")
    wheel("native", "1.0", tags="cp311-cp311-manylinux_2_28_x86_64")
    wheel("native", "2.0", tags="cp311-cp311-manylinux_2_39_x86_64")
    own.run(*check_stack(own, native=""))
    assert "native==1.0" in files_of(own, "s", GPU_BASE)["main.txt"]
    refused = error(own.run(*check_stack(own, native=">=2"), status=4))
    assert "glibc" in refused["why"] or "platform" in refused["why"]


def test_the_package_indexs_torch_on_a_base_without_cuda_is_the_users_choice(
    own: Any, wheel: Callable[..., None]
) -> None:
    write_stack(own.project, "s", {"torch": {"version": "==2.13.0"}})
    wheel("torch", "2.13.0", requires=("cuda-toolkit==13.0.2", "cudnn-cu13"))
    wheel("cuda_toolkit", "13.0.2")
    wheel("cudnn_cu13", "9.0")
    own.run("lock", "--stack", "s", "--torch-build", "index")
    assert lock_of(own, "s").torch.build == "index"
