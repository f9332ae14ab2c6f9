"""Bases that bring torch, and Pythons that are not the distribution's: locked for real, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import OLD, error, files_of, lock_of, result
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import BASE, GPU_BASE, write_base, write_stack, write_vendor_base

from envbuild.catalog.base import PythonSource

VENDOR = "vendor-2509"
PROVIDES = {"torch": "2.9.0a0+50eac81.nv25.9", "torchvision": "0.24.0a0", "triton": "3.4.0"}
LOCK = ("lock", "--stack", "s", "--json")


@pytest.fixture
def vendor(own: Any, wheel: Callable[..., None]) -> Any:
    """Stack `s` of torch and of `lib`, which needs `dep` and three packages that the base brings."""
    write_vendor_base(own.project, VENDOR, provides=PROVIDES)
    components = {"torch": {"version": ">=2.9", "modules": ["torch"]}, "lib": {"modules": ["lib"]}}
    write_stack(own.project, "s", components, target="gpu", base=VENDOR)
    wheel("lib", "1.0", requires=("torch>=2.1", "torchvision", "triton>=3", "dep"))
    wheel("dep", "1.0", requires=("triton",))
    for name in PROVIDES:
        wheel(name, "99.0")
    return own


def test_what_the_base_brings_is_left_out_and_recorded(vendor: Any) -> None:
    locked = result(vendor.run(*LOCK))
    assert locked["packages"] == {"main": 2, "compile": 0, "git": 0}
    lock, files = lock_of(vendor, "s", VENDOR), files_of(vendor, "s", VENDOR)
    assert not any(f"\n{name}==" in text for name in PROVIDES for text in files.values())
    assert lock.base.provides == PROVIDES
    assert (lock.base.python_source, lock.base.cuda) == (PythonSource.PREFIX, "13.0")
    assert lock.components["torch"].version == lock.torch.version == PROVIDES["torch"]
    assert result(vendor.run(*LOCK))["built"] is False
    vendor.run("lock", "--check")
    # It cannot be installed elsewhere, and an image needs the base's digest, which is part of the base.
    refused = error(vendor.run("sync", "--stack", "s", "--into", "venv", "--json", status=11))
    assert f"cannot be installed without its base {VENDOR}" in refused["what"]
    assert "The base brings torch 2.9.0a0+50eac81.nv25.9, torchvision 0.24.0a0, triton 3.4.0" in refused["why"]
    assert not (vendor.project / "venv").exists()
    image = ("image", "--stack", "s", "--target", "gpu", "--json")
    refused = error(vendor.run(*image, status=5))
    assert f"the digest of base {VENDOR} was not resolved" in refused["what"]
    assert "registry.example.invalid/vendor/pytorch:25.09-py3" in refused["why"]
    assert f"envbuild image resolve --base {VENDOR}" in refused["fix"]
    write_vendor_base(vendor.project, VENDOR, provides=PROVIDES, digest=f"sha256:{'0' * 64}")
    assert f"was not made for base {VENDOR} as it is now" in error(vendor.run(*image, status=3))["what"]
    # Another version of what it brings is another base.
    write_vendor_base(vendor.project, VENDOR, provides={**PROVIDES, "triton": "3.5.0"})
    assert "the base" in error(vendor.run("lock", "--check", "--json", status=5))["why"]


def test_what_the_base_brings_is_left_out_of_requirements_too(
    vendor: Any, wheel: Callable[..., None], index: SimpleIndex, tmp_path: Path
) -> None:
    """Of the stack's own, and of what builds the compile phase."""
    wheel("builder", "1.0")
    pyproject = '[build-system]\nrequires = ["builder", "triton>=3", "torch"]\nbuild-backend = "none"\n'
    index.add(make_sdist(tmp_path, "kernels", "1.0", requires=("triton",), pyproject=pyproject), OLD)
    requirements = {"triton": {"version": ">=3", "reason": "a"}}
    components = {"lib": {}, "kernels": {"phase": "compile"}}
    write_stack(vendor.project, "s", components, target="gpu", base=VENDOR, requirements=requirements)
    vendor.run(*LOCK)
    files = files_of(vendor, "s", VENDOR)
    assert "\nbuilder==1.0" in files["main.txt"]
    assert not any(f"\n{name}==" in text for name in PROVIDES for text in files.values())
    assert "triton" not in files["main.txt"] + files["compile.txt"]


def test_where_the_python_comes_from_is_recorded(own: Any, wheel: Callable[..., None]) -> None:
    write_stack(own.project, "s", {"lib": {}})
    wheel("lib", "1.0", tags="cp311-cp311-manylinux_2_28_x86_64")
    path = own.project / "envs/bases" / f"{BASE}.toml"
    text = path.read_text()
    own.run(*LOCK)
    assert "python_source" not in files_of(own, "s")["stack.lock.toml"]
    path.write_text(
        text.replace('source = "base"', 'source = "standalone"').replace("/usr/bin/py", "/opt/python/bin/py")
    )
    own.run(*LOCK)
    lock = lock_of(own, "s")
    assert (lock.base.python, lock.base.python_source) == ("3.11", PythonSource.STANDALONE)
    own.run("lock", "--check")


def test_a_component_for_gpus_is_in_the_locks_of_bases_with_cuda_alone(own: Any, wheel: Callable[..., None]) -> None:
    for name in ("lib", "kernels"):
        wheel(name, "1.0")

    def write(kernels: dict[str, Any] | None) -> None:
        builds = [{"target": "cpu", "bases": [BASE]}, {"target": "gpu", "bases": [GPU_BASE]}]
        components = {"lib": {"uses": ["kernels"] if kernels else []}, **({"kernels": kernels} if kernels else {})}
        write_stack(own.project, "s", components, builds=builds)

    write(None)
    own.run(*LOCK, "--base", BASE)
    before = files_of(own, "s", BASE)
    write({"device": "cuda", "modules": ["kernels"]})
    assert result(own.run(*LOCK, "--base", BASE))["built"] is False
    assert files_of(own, "s", BASE) == before
    assert result(own.run(*LOCK, "--base", GPU_BASE))["components"] == {"lib": "1.0", "kernels": "1.0"}
    own.run("lock", "--check")


def test_what_packages_declare_about_what_the_base_brings_is_checked(
    vendor: Any, wheel: Callable[..., None], index: SimpleIndex, tmp_path: Path
) -> None:
    wheel("lib", "2.0", requires=("torch>=2.10", "triton>=3", "dep>=2"))
    wheel("dep", "2.0", requires=("triton<3.4", "torchvision>=0.24"))
    # Only what is taken of it counts, and an override does not hide it.
    wheel("other", "1.0", requires=("torch>=2.9", "triton>=9 ; extra == 'more'", "dep<2"), extras=("more",))
    pyproject = '[build-system]\nrequires = ["torchvision>=0.25", "triton>=3.4"]\nbuild-backend = "none"\n'
    index.add(make_sdist(tmp_path, "kernels", "1.0", requires=("torch<2.8",), pyproject=pyproject), OLD)
    overrides = {"dep": {"version": ">=2", "against": ["other"], "reason": "r"}}

    def write(**components: Any) -> None:
        write_stack(vendor.project, "s", components, target="gpu", base=VENDOR, overrides=overrides)

    write(torch={"version": "==2.11.0"}, lib={}, other={}, kernels={"phase": "compile"})
    message = error(vendor.run(*LOCK, status=5))
    brings = "the base brings"
    torch = f"{brings} torch 2.9.0a0+50eac81.nv25.9, which no lock replaces, and"
    build = "a build of the compile phase requires torchvision>=0.25"
    assert re.findall(r"^\[base-provides:[0-9a-f]{8}\] (.*)", message["why"], re.MULTILINE) == [
        f"{torch} the stack asks for torch==2.11.0",
        f"{brings} torchvision 0.24.0a0, which no lock replaces, and {build}",
        f"{brings} triton 3.4.0, which no lock replaces, and dep 2.0 declares triton<3.4",
        f"{torch} kernels 1.0 declares torch<2.8",
        f"{torch} lib 2.0 declares torch>=2.10",
    ]
    assert "Choose a base that brings such a version, or another version of lib." in message["why"]
    vendor.run(*LOCK, "--allow", "base-provides")
    assert len(lock_of(vendor, "s", VENDOR).allowed) == 5
    write(other={"extras": ["more"]})
    message = error(vendor.run(*LOCK, status=5))
    assert "and other 1.0 declares triton>=9" in message["why"]
    overrides["dep"] |= {"version": "<2"}
    write(other={})
    vendor.run(*LOCK)
    assert lock_of(vendor, "s", VENDOR).allowed == ()


# What a release is for: the Pythons that its metadata states, or that there are wheels for.
FOR_PYTHON = {"stated": {"python": ">=3.11"}, "wheels": {"tags": "cp311-cp311-manylinux_2_17_x86_64"}}
PIN = ("--pin", "lib=2.0", "--name", "x")


@pytest.mark.parametrize("how", FOR_PYTHON)
@pytest.mark.parametrize("more", [{}, pytest.param({"anchor": "lib"}, marks=pytest.mark.slow)], ids=["", "anchor"])
def test_the_base_with_the_python_that_is_needed_is_taken(
    own: Any, wheel: Callable[..., None], how: str, more: dict[str, str]
) -> None:
    write_base(own.project, "old", python="3.10")
    wheel("lib", "1.0")
    wheel("lib", "2.0", **FOR_PYTHON[how])
    builds = [{"target": "cpu", "bases": ["old", BASE], "default_base": "old"}]
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, builds=builds, **more)
    done = own.run(*LOCK, *PIN)
    assert result(done)["base"] == BASE
    assert f"taking {BASE}" in done.stderr
    refused = error(own.run(*LOCK, *PIN, "--base", "old", status=4))
    assert refused["what"].startswith("lib 2.0 needs Python ")
    assert refused["what"].endswith("the base has 3.10")
    command = f"envbuild lock --stack s --target cpu {' '.join(PIN)}"
    assert refused["fix"].endswith(f"The other bases of the stack (small) are tried without --base: {command}")
    # Where no base of the stack has it, the release next to it is what is left.
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, base="old", **more)
    refused = error(own.run(*LOCK, *PIN, status=4))
    assert refused["fix"].endswith("Next, with the nearest release: envbuild lock --stack s --pin lib=1.0 --name x")


def test_a_pinned_release_that_is_not_there_is_refused_before_anything_is_resolved(
    own: Any, wheel: Callable[..., None]
) -> None:
    for version in ("1.0", "1.5", "3.0", "4.0"):
        wheel("lib", version, requires=("dep",))
    wheel("dep", "1.0")
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}, "dep": {}})
    done = own.run(*LOCK, "--pin", "lib=2.0", "--name", "x", status=4)
    refused = error(done)
    assert refused["what"].startswith("there is no release 2.0 of lib")
    near = "1.5 (the newest before it), 3.0 (the first after it), 4.0 (the newest of all)"
    assert f"Releases for the base's Python: {near}." in refused["why"]
    assert refused["fix"].endswith("Next, with the nearest release: envbuild lock --stack s --pin lib=1.5 --name x")
    assert "take part" not in done.stderr
    refused = error(own.run(*LOCK, "--pin", "lib=>=9", "--name", "x", status=4))
    assert refused["what"].startswith("there is no release >=9 of lib")
    assert "4.0 (the newest of all)" in refused["why"]
