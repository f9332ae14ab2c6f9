"""Syncing a lock into a folder of this machine: what is refused before anything is touched."""

import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.locks import make_lock

from envbuild.catalog.context import Context
from envbuild.catalog.fields import MACHINES
from envbuild.catalog.models import Target
from envbuild.catalog.site import load_site
from envbuild.core.errors import MachineError, UsageError
from envbuild.core.progress import SilentReporter
from envbuild.lock.lockfile import read_lock
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.store.local import LocalStore
from envbuild.sync import imports as modules_check
from envbuild.sync import local
from envbuild.sync.imports import Imports
from envbuild.sync.install import InstallScope, PhaseRun
from envbuild.sync.local import sync


@pytest.fixture
def lock(tmp_path):
    here = next(name for name, machine in MACHINES.items() if machine == platform.machine())
    made = make_lock(tmp_path / "lock")
    make_lock(tmp_path / "lock", base=made.base.model_copy(update={"platform": here, "glibc": "2.17"}))
    return read_lock(tmp_path / "lock")


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What would be installed and imported; torch's build is in a folder."""
    made: dict = {}

    def install(lock, place, source, reporter, scope):
        made["install"] = (place.venv, source.uv_args(), list(scope.phases))
        assert (scope.wheels, scope.leave_out) == ({}, ())
        return tuple(PhaseRun(phase=phase, packages=1, seconds=0.1, log=tmp_path) for phase in scope.phases)

    def check(modules, probe, reporter, *, absent):
        made.update(imports=dict(modules), variables=probe.run.environment, absent=absent, probe=probe.program)
        return Imports(imported=tuple(module for names in modules.values() for module in names), not_checked=())

    monkeypatch.setattr(local, "install", install)
    monkeypatch.setattr(modules_check, "try_imports", check)
    monkeypatch.setattr(local, "check_prebuilt", lambda *_: ())
    monkeypatch.setattr(local, "site_packages_of", lambda venv: venv)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").write_bytes(b"")
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    return made


def run(lock, tmp_path, *phases, into="venv"):
    reporter = SilentReporter()
    return sync(
        lock,
        tmp_path / into,
        InstallScope(phases=phases or ("main", "compile", "git")),
        Target(summary="x", device="cuda", sm=("90", "100a"), platform="linux/amd64"),
        tmp_path / "logs",
        Context(store=LocalStore(tmp_path / "cache", reporter), site=load_site(), reporter=reporter),
    )


def test_a_place_that_cannot_be_written_is_refused_before_uv_runs(lock, tmp_path, calls):
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="file/venv"):
        run(lock, tmp_path, into="file/venv")
    assert calls == {}


def test_modules_of_phases_that_were_left_out_are_not_checked(lock, tmp_path, calls):
    components = {
        "torch": lock.lock.components["torch"],
        "flash-attn": lock.lock.components["torch"].model_copy(update={"phase": "compile", "modules": ("flash",)}),
        "nemo": lock.lock.components["torch"].model_copy(update={"commit": "a" * 40, "modules": ("nemo",)}),
    }
    components["flash-attn"] = type(components["torch"])(**components["flash-attn"].model_dump(warnings=False))
    part = type(lock)(lock.path, lock.lock.model_copy(update={"components": components}))
    done = run(part, tmp_path, "main", "git")
    assert (done.imported, not_checked(done)) == (("torch", "nemo"), {"flash": "phase compile is not installed"})
    done = run(part, tmp_path, "main")
    assert not_checked(done) == {"flash": "phase compile is not installed", "nemo": "phase git is not installed"}
    assert calls["absent"].brings("flash")
    assert calls["absent"].brings("nemo")
    assert not calls["absent"].brings("torch")


def test_the_stacks_variables_are_set_while_its_modules_are_imported(lock, tmp_path, calls):
    changed = lock.lock.model_copy(update={"environment": {"CUDA_HOME": "{site_packages}/nvidia/cu13"}})
    done = run(type(lock)(lock.path, changed), tmp_path)
    expected = str(tmp_path / "venv/lib/python3.11/site-packages/nvidia/cu13")
    assert calls["variables"]["CUDA_HOME"] == expected
    assert done.environment == {"CUDA_HOME": expected}


def not_checked(done):
    return {item.module: item.reason for item in done.not_checked}


def test_modules_are_imported_for_the_targets_gpus_and_with_nothing_that_others_compiled(
    lock, tmp_path, calls, monkeypatch
):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    run(lock, tmp_path)
    variables = calls["variables"]
    assert variables["TORCH_CUDA_ARCH_LIST"] == "9.0;10.0a"
    assert variables["TORCH_EXTENSIONS_DIR"] != "/somewhere"
    assert "PYTHONPATH" not in variables
    assert Path(calls["probe"]).is_file()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"glibc": "99.0"}, "The base has glibc 99.0; this machine has "),
        (
            {"platform": "linux/amd64" if platform.machine() == "aarch64" else "linux/arm64"},
            f"this machine is {platform.machine()}",
        ),
    ],
)
def test_a_machine_that_cannot_run_what_is_locked_is_refused_before_anything_is_touched(
    lock, tmp_path, calls, changes, why
):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/pyvenv.cfg").write_text("")
    changed = lock.lock.model_copy(update={"base": lock.lock.base.model_copy(update=changes)})
    with pytest.raises(
        MachineError, match="stack mcore on base debian12 cannot be installed on this machine"
    ) as caught:
        run(type(lock)(lock.path, changed), tmp_path)
    assert why in caught.value.why
    assert "envbuild image" in caught.value.fix
    assert (calls, (tmp_path / "venv/pyvenv.cfg").is_file()) == ({}, True)


def test_lock_is_refused_without_the_base_that_brings_packages(lock, tmp_path, calls):
    base = lock.lock.base.model_copy(update={"provides": {"torch": "2.9.0"}})
    with pytest.raises(MachineError, match="cannot be installed without its base") as caught:
        run(replace(lock, lock=lock.lock.model_copy(update={"base": base})), tmp_path)
    assert "brings torch 2.9.0" in caught.value.why
    assert calls == {}


@pytest.mark.parametrize("phases", [("git",), ("main", "wheels"), ("",)])
def test_phases_that_cannot_be_installed(lock, tmp_path, calls, phases):
    with pytest.raises(UsageError, match="cannot be installed"):
        run(lock, tmp_path, *phases)
    assert calls == {}


def test_an_environment_is_made_anew_and_nothing_else_is_touched(lock, tmp_path, calls):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/pyvenv.cfg").write_text("")
    run(lock, tmp_path)
    assert not any((tmp_path / "venv").iterdir()), "the old one went; the install is a fake here"
    (tmp_path / "empty").mkdir()
    run(lock, tmp_path, into="empty")
    calls.clear()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis").write_text("years")
    (tmp_path / "file").write_text("")
    for name in ("mine", "file"):
        with pytest.raises(UsageError, match="exists and is not an environment"):
            run(lock, tmp_path, into=name)
    assert (calls, os.listdir(tmp_path / "mine")) == ({}, ["thesis"])


def test_the_environment_that_envbuild_runs_from_is_kept(lock, tmp_path, calls, monkeypatch):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/pyvenv.cfg").write_text("")
    (tmp_path / "linked").symlink_to("venv")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    for name in ("venv", "linked"):
        with pytest.raises(UsageError, match="is the environment that envbuild runs from"):
            run(lock, tmp_path, into=name)
    assert (calls, os.listdir(tmp_path / "venv")) == ({}, ["pyvenv.cfg"])


def test_a_stack_without_torch_and_a_base_that_brings_it_look_for_none(lock, monkeypatch):
    monkeypatch.setenv("ENVBUILD_TORCH_INDEX", "http://127.0.0.1:1/")
    monkeypatch.setenv("UV_FIND_LINKS", "")
    for changes in (
        {"torch": lock.lock.torch.model_copy(update={"version": ""})},
        {"base": lock.lock.base.model_copy(update={"provides": {"torch": "2.13.0"}})},
    ):
        assert locked_torch(load_site(), lock.lock.model_copy(update=changes)).kind == "package-index"
