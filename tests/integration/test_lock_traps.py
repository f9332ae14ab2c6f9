"""Traps that a resolver does not see, each against the real uv: a test fails when the check that it is for is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import check_stack, error, files_of, lock_of, refused
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import BASE, GPU_BASE, write_stack

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import SilentReporter
from envbuild.lock.inputs.request import LockRequest
from envbuild.lock.lock import LockOptions, lock_stack
from envbuild.lock.lockfile import read_lock
from envbuild.lock.project import plan
from envbuild.lock.project.pyproject import Project
from envbuild.store.local import LocalStore

LOCK = ("lock", "--stack", "s", "--json")


# ---- an override hides a declared range


def override(
    own: Any, *against: str, lib: dict[str, Any] | None = None, version: str = ">=2", **more: Any
) -> tuple[str, ...]:
    """Stack `s` of `lib`, which puts another version of `dep` over what packages declare."""
    overrides = {"dep": {"version": version, "reason": "dep 1 hangs", "against": list(against), **more}}
    write_stack(own.project, "s", {"lib": lib or {}}, target="gpu", base=GPU_BASE, overrides=overrides)
    return LOCK


@pytest.fixture
def lib_and_dep(wheel: Callable[..., None]) -> None:
    wheel("lib", "1.0", requires=("dep<2", "other>=1"))
    wheel("other", "1.0", requires=("dep",))
    wheel("dep", "1.0")
    wheel("dep", "2.0")


@pytest.mark.usefixtures("lib_and_dep")
def test_a_version_outside_a_declared_range_behind_an_override_is_refused(own: Any) -> None:
    actual = "lib 1.0 declares dep<2; the stack (dep 1 hangs) puts dep 2.0 there"
    why = refused(own, override(own), "override-range")
    assert actual in why
    assert "other 1.0" not in why
    assert 'under [overrides.dep] of the stack: its version, against = ["lib"], and the reason' in why
    # A declaration that the stack names as wrong is recorded; the name of another package lets nothing pass.
    own.run(*override(own, "lib"))
    lock = lock_of(own, "s", GPU_BASE)
    assert (lock.overridden, lock.overrides, lock.allowed) == ((actual,), {"dep": ">=2"}, ())
    assert "] lib 1.0 declares dep<2" in error(own.run(*override(own, "other"), status=5))["why"]
    # Inside what is declared it goes against nothing.
    own.run(*override(own, version="==1.0"))
    assert lock_of(own, "s", GPU_BASE).overridden == ()
    # The stack's own requirement is a declaration too.
    command = override(own, "lib")
    stack = own.project / "envs/stacks/s.toml"
    stack.write_text(stack.read_text() + '[requirements.dep]\nversion = "<2"\nreason = "b"\n')
    assert "] the stack declares dep<2" in error(own.run(*command, status=5))["why"]


@pytest.mark.usefixtures("lib_and_dep")
def test_an_override_of_what_one_package_declares_leaves_what_others_declare(
    own: Any, wheel: Callable[..., None]
) -> None:
    wheel("other", "1.0", requires=("dep<3",))
    wheel("dep", "3.0")
    own.run(*override(own, "lib", only_against=True))
    assert "\ndep==2.0 " in files_of(own, "s", GPU_BASE)["main.txt"]
    lock = lock_of(own, "s", GPU_BASE)
    assert lock.overridden == ("lib 1.0 declares dep<2; the stack (dep 1 hangs) puts dep 2.0 there",)
    assert lock.overrides == {"dep": ">=2 for what lib declares"}
    own.run("lock", "--check")
    # Over what all declare, uv takes dep 3, and the check finds who does not.
    refused = error(own.run(*override(own, "lib"), status=5))
    assert "] other 1.0 declares dep<3" in refused["why"]
    # Nor does it silence another: uv finds no dep for both.
    wheel("other", "1.0", requires=("dep<2",))
    own.env["UV_CACHE_DIR"] += "-new"
    assert "other" in error(own.run(*override(own, "lib", only_against=True), "--upgrade", status=4))["why"]


def test_ranges_of_extras_and_of_prereleases_count_where_the_extra_is_asked_for(
    own: Any, wheel: Callable[..., None]
) -> None:
    wheel("lib", "1.0", requires=("dep>=1,<2.0rc1 ; extra == 'more'",), extras=("more", "none"))
    for version in ("1.0", "2.0rc1"):
        wheel("dep", version)
    more = {"extras": ["more"]}
    why = error(own.run(*override(own, lib=more, version="==2.0rc1"), status=5))["why"]
    assert "lib 1.0 declares dep<2.0rc1; " in why
    own.run(*override(own, "lib", lib=more, version="==2.0rc1", only_against=True))
    assert "\ndep==2.0rc1 " in files_of(own, "s", GPU_BASE)["main.txt"]
    assert len(lock_of(own, "s", GPU_BASE).overridden) == 1
    for only_against in (False, True):
        own.run(*override(own, "lib", lib={"extras": ["none"]}, version="==2.0rc1", only_against=only_against))
        assert "\ndep==" not in files_of(own, "s", GPU_BASE)["main.txt"]


def test_the_range_of_a_package_of_the_compile_phase_counts_too(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path
) -> None:
    index.add(make_sdist(tmp_path, "lib", "1.0", requires=("dep~=1.0",)), "2025-01-01T00:00:00Z")
    for name in ("setuptools", "dep"):
        wheel(name, "40.8.0" if name == "setuptools" else "1.0")
    wheel("dep", "2.0")
    why = refused(own, override(own, lib={"phase": "compile"}), "override-range")
    assert "lib 1.0 declares dep~=1.0" in why


# ---- what asks for what is not there


def test_a_component_that_asks_for_what_the_locked_one_lost_is_refused(own: Any, wheel: Callable[..., None]) -> None:
    sources = {
        "lib/train.py": "from dep.optim import build\n\n\ndef train():\n    return build(cond=None)\n",
        "lib/run.py": "from lib.train import train\n\ntrain()\n",
        "lib/save.py": "from dep.gone import strategy\n",
    }
    wheel("lib", "1.0", requires=("dep",), sources=sources)
    wheel("dep", "1.0", sources={"dep/optim.py": "def build(cond): ...\n", "dep/gone.py": "strategy = 1\n"})
    components: dict[str, dict[str, Any]] = {"lib": {"uses": ["dep"]}, "dep": {"version": "==1.0"}}
    write_stack(own.project, "s", components, target="gpu", base=GPU_BASE)
    own.run(*LOCK)
    assert lock_of(own, "s", GPU_BASE).allowed == ()
    wheel("dep", "2.0", sources={"dep/optim.py": "def build(): ...\n"})
    components["dep"]["version"] = "==2.0"
    write_stack(own.project, "t", components, target="gpu", base=GPU_BASE)
    why = error(own.run("lock", "--stack", "t", "--json", status=5))["why"]
    actual = [line for line in why.splitlines() if line.startswith("[")]
    ids = {line.split(" ", 1)[1].split(": ")[0]: line[1:].split("]")[0] for line in actual}
    save, train = "lib 1.0, lib/save.py:1", "lib 1.0, lib/train.py:5"
    assert ids.keys() == {save, train}
    assert "cond" in why
    # One finding alone is let pass.
    still = error(own.run("lock", "--stack", "t", "--allow", ids[save], "--json", status=5))["why"]
    assert [line[1:].split("]")[0] for line in still.splitlines() if line.startswith("[")] == [ids[train]]
    own.run("lock", "--stack", "t", "--allow", ids[save], "--allow", ids[train])
    assert {line.split(": ")[0] for line in lock_of(own, "t", GPU_BASE).allowed} == set(ids.values())


# ---- forks


def test_a_package_present_twice_is_refused(own: Any, wheel: Callable[..., None]) -> None:
    wheel(
        "lib",
        "1.0",
        requires=("dep==1.0 ; python_full_version < '3.11.5'", "dep==2.0 ; python_full_version >= '3.11.5'"),
    )
    for version in ("1.0", "2.0"):
        wheel("dep", version)
    why = refused(own, check_stack(own), "forks")
    assert "dep is locked 2 times, 1.0, 2.0" in why
    assert "needed by lib" in why
    text = files_of(own, "s", GPU_BASE)["main.txt"]
    assert "\ndep==1.0 ; python_full_version < '3.11.5'" in text
    assert "\ndep==2.0 ; python_full_version >= '3.11.5'" in text
    # A dated lock with a fork is made again as it was.
    dated = (*check_stack(own), "--allow", "forks", "--as-of", "2025-04-01", "--name", "dated")
    own.run(*dated)
    before = files_of(own, "dated", GPU_BASE)
    own.run(*dated, "--upgrade")
    assert files_of(own, "dated", GPU_BASE) == before


# ---- an unknown [tool.uv] key


def context_of(own: Any) -> Context:
    return Context(store=LocalStore(own.cache, SilentReporter()), site=load_site(), reporter=SilentReporter())


def test_an_unknown_key_of_uv_is_refused(
    own: Any, wheel: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv only warns, and drops the other settings with it: the as-of moment, and the platform."""
    wheel("lib", "1.0")
    wheel("lib", "2.0", "2025-06-01T00:00:00Z")
    write_stack(own.project, "s", {"lib": {}})
    for name, value in own.env.items():
        monkeypatch.setenv(name, value)
    real = plan.render_project

    def with_unknown_key(project: Project, **more: Any) -> str:
        return real(project, **more).replace("[tool.uv]\n", "[tool.uv]\nno-such-key = 1\n")

    monkeypatch.setattr(plan, "render_project", with_unknown_key)
    selection = Selection(Catalog.open(own.project), "s", BASE, "cpu")

    def lock(*allow: str) -> Path:
        path = own.project / "lockfiles/s" / BASE
        request = LockRequest(as_of="2025-04-01", allow=allow)
        lock_stack(selection, request, LockOptions(path=path), context_of(own))
        return path

    with pytest.raises(CheckRefusedError) as caught:
        lock()
    assert "] uv dropped settings of the project" in caught.value.why
    assert "no-such-key" in caught.value.why
    assert "--allow uv-settings" in caught.value.fix
    assert not (own.project / "lockfiles").exists()
    # Let pass, it is not the lock of that day any more: this is what the check keeps out.
    record = read_lock(lock("uv-settings")).lock
    assert record.components["lib"].version == "2.0"
    (allowed,) = record.allowed
    assert allowed.startswith("uv-settings:")


@pytest.mark.parametrize("how", ["UV_CONFIG_FILE", "UV_NO_CONFIG"])
def test_variables_that_take_the_projects_settings_away_do_not(
    own: Any, wheel: Callable[..., None], tmp_path: Path, how: str
) -> None:
    """With the first two uv reads no [tool.uv] at all, without a word; the user's own index still counts."""
    wheel("lib", "1.0")
    wheel("lib", "2.0", "2025-06-01T00:00:00Z")
    write_stack(own.project, "s", {"lib": {}})
    if how == "UV_CONFIG_FILE":
        (tmp_path / "own.toml").write_text(f'[[index]]\nurl = "{own.env.pop("UV_DEFAULT_INDEX")}"\ndefault = true\n')
    own.env[how] = str(tmp_path / "own.toml") if how == "UV_CONFIG_FILE" else "1"
    own.env["UV_EXCLUDE_NEWER"] = "2025-07-01"
    own.run("lock", "--stack", "s", "--as-of", "2025-04-01", "--name", "x")
    lock = lock_of(own, "x")
    assert (lock.components["lib"].version, lock.allowed) == ("1.0", ())


def test_a_resolution_as_of_another_moment_is_refused(
    own: Any, wheel: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the cause: uv.lock says as of when it is."""
    wheel("lib", "1.0")
    write_stack(own.project, "s", {"lib": {}})
    for name, value in own.env.items():
        monkeypatch.setenv(name, value)
    real = plan.render_project
    monkeypatch.setattr(
        plan, "render_project", lambda *words, **more: real(*words, **more).replace("2025-04-02", "2025-05-02")
    )
    selection = Selection(Catalog.open(own.project), "s", BASE, "cpu")
    request, path = LockRequest(as_of="2025-04-01"), own.project / "there"
    with pytest.raises(CheckRefusedError) as caught:
        lock_stack(selection, request, LockOptions(path=path), context_of(own))
    assert "uv.lock is as of 2025-05-02T00:00:00Z, and the project of 2025-04-02T00:00:00Z" in caught.value.why


# ---- driver nemo without the LLM collection


def test_driver_nemo_without_the_llm_collection_is_refused(
    own: Any, wheel: Callable[..., None], index: SimpleIndex, tmp_path: Path
) -> None:
    """As with 3.0: it resolves and imports, and its recipes are gone."""
    for version, collection in (("2.7.3", "llm"), ("3.0.0", "asr")):
        about = f"Metadata-Version: 2.2\nName: nemo-toolkit\nVersion: {version}\n"
        pyproject = f'[project]\nname = "nemo-toolkit"\nversion = "{version}"\n'
        files = {f"nemo/collections/{collection}/__init__.py": "", "pyproject.toml": pyproject, "PKG-INFO": about}
        index.add(make_sdist(tmp_path, "nemo_toolkit", version, files=files), "2025-01-01T00:00:00Z")

    def write(**components: dict[str, str]) -> None:
        named = {name.replace("_", "-"): spec for name, spec in components.items()}
        write_stack(own.project, "s", named, target="gpu", base=GPU_BASE, driver="nemo")

    write(nemo_toolkit={"version": "==3.0.0"})
    assert "nemo-toolkit 3.0.0 has no nemo/collections/llm" in refused(own, LOCK, "driver-collection")
    write(nemo_toolkit={"version": "==2.7.3"})
    own.run(*LOCK)
    assert lock_of(own, "s", GPU_BASE).allowed == ()
    write(lib={})
    wheel("lib", "1.0")
    assert "there is no nemo-toolkit" in error(own.run(*LOCK, status=5))["why"]
