"""Locks of stacks that come from git: small repositories shaped like upstream's, real git and uv, a loopback index."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.git_repos import History
from helpers.lock_runs import FILES, error, result
from helpers.lock_runs import lock_of as _lock_of
from helpers.stack_files import BASE, write_stack
from helpers.upstreams import (
    MCORE_URL,
    NEMO_URL,
    PUBLIC,
    SETUPTOOLS,
    Upstream,
    made,
    manifest,
    project_files,
)

from envbuild.lock.models import Lock


def lock_of(tool: Any, name: str = "nemo") -> Lock:
    return _lock_of(tool, name)


def text_of(tool: Any, file: str, name: str = "nemo") -> str:
    text: str = (tool.project / "lockfiles" / name / BASE / file).read_text()
    return text


# ---- the branch, and what upstream's manifest pins


def test_lock_nemo_main_pins_the_branch_and_its_companion_by_commit(nemo: Any, upstream: Upstream) -> None:
    done = nemo.run("lock", "--nemo", "main", "--json")
    assert result(done)["packages"] == {"main": 2, "compile": 0, "git": 2}
    lines = [line.split(" ; ")[0] for line in text_of(nemo, "git.txt").splitlines() if line[0].isalpha()]
    assert lines == [
        f"megatron-core @ git+{MCORE_URL}@{upstream.commits['m2']}",
        f"nemo-toolkit @ git+{NEMO_URL}@{upstream.commits['n2']}",
    ]
    components = lock_of(nemo).components
    assert components["nemo-toolkit"].follows
    assert components["nemo-toolkit"].committed_at == "2025-03-10T12:00:00Z"
    assert components["nemo-toolkit"].version == "2.2.0"
    assert not components["megatron-core"].follows
    assert components["megatron-core"].version == "0.12.0"
    at = upstream.commits["n2"][:12]
    assert components["megatron-core"].because == f"requirements/manifest.json of nemo-toolkit {at}"
    assert (components["packaging"].because, components["packaging"].version) == ("the stack's file", "24.2")
    assert str(upstream.folder) not in "".join(text_of(nemo, file) for file in FILES)
    # What upstream names and the stack lacks is noted and recorded, and nothing follows from it.
    left_out = f"apex {'0' * 40} (requirements/manifest.json of nemo-toolkit {at})"
    assert f"note: no component of stack nemo, and so not in the lock: {left_out}" in done.stderr
    assert lock_of(nemo).left_out == (left_out,)
    assert "apex" not in "".join(text_of(nemo, file) for file in FILES if file != "stack.lock.toml")


def test_lock_follows_the_branch(nemo: Any, upstream: Upstream) -> None:
    first = result(nemo.run("lock", "--json"))
    assert result(nemo.run("lock", "--json"))["built"] is False
    nemo.run("lock", "--check")
    files = project_files("nemo-toolkit", "2.3.0", "nemo", ("packaging==24.2", "iniconfig==2.0.0"))
    files["requirements/manifest.json"] = manifest(upstream.commits["m3"])
    new = upstream.nemo.commit("main", "2025-04-01T00:00:00Z", files)
    moved = f"branch main moved from {upstream.commits['n2'][:12]} to {new[:12]}"
    assert moved in error(nemo.run("lock", "--check", "--json", status=5))["why"]
    (diff,) = result(nemo.run("lock", "--diff", "--json"))["locks"]
    because = f"requirements/manifest.json of nemo-toolkit {new[:12]}"
    instead = f"asked for {upstream.commits['m3']} instead of {upstream.commits['m2']}"
    assert {(change["name"], change["why"]) for change in diff["changes"]} >= {
        ("nemo-toolkit", "branch main moved"),
        ("megatron-core", f"{instead}: {because}"),
    }
    assert "+ iniconfig 2.0.0  (needed by nemo-toolkit)" in nemo.run("lock", "--diff").stdout.splitlines()
    assert lock_of(nemo).digest == first["digest"], "--diff and --check write nothing"
    assert moved in nemo.run("lock").stderr
    assert lock_of(nemo).components["megatron-core"].commit == upstream.commits["m3"]
    nemo.run("lock", "--check")
    files = project_files("nemo-toolkit", "2.4.0", "nemo", ("packaging==24.2",))
    upstream.nemo.commit("main", "2025-04-02T00:00:00Z", files)
    assert "- iniconfig 2.0.0  (was needed by nemo-toolkit)" in nemo.run("lock", "--diff").stdout.splitlines()


def test_as_of_a_day_takes_the_branch_as_it_was(nemo: Any, upstream: Upstream) -> None:
    # Committed that day on a side branch: not the branch's own history.
    side = upstream.nemo.commit("side", "2025-03-01T00:00:00Z", parents=(upstream.commits["n1"],))
    upstream.nemo.commit("main", "2025-05-01T00:00:00Z", parents=(upstream.commits["n2"], side))
    arguments = ("lock", "--as-of", "2025-03-09", "--name", "march")
    # Nothing newer than that day is taken from the index either.
    nemo.run(*arguments)
    lock = lock_of(nemo, "march")
    assert lock.components["nemo-toolkit"].commit == upstream.commits["n1"]
    assert lock.components["megatron-core"].commit == upstream.commits["m1"]
    assert not lock.components["nemo-toolkit"].follows
    assert (lock.inputs.as_of, lock.inputs.as_of_asked) == ("2025-03-10T00:00:00Z", "2025-03-09")
    files = project_files("nemo-toolkit", "9", "nemo")
    upstream.nemo.commit("main", "2025-06-01T00:00:00Z", files)
    assert result(nemo.run(*arguments, "--json"))["built"] is False
    before = [text_of(nemo, file, "march") for file in FILES]
    nemo.run(*arguments, "--upgrade")
    assert [text_of(nemo, file, "march") for file in FILES] == before
    nemo.run("lock", "--check")


def test_drift_between_two_commits_is_found(nemo: Any, upstream: Upstream) -> None:
    core = project_files("megatron-core", "0.14.0", "megatron.core")
    core["megatron/core/optimizer.py"] = "def get_optimizer(model):\n    return model\n"
    # Not part of the package that the stack takes: nothing of it counts.
    core["megatron/training/optimizer.py"] = "from megatron.core import nothing\n"
    here = upstream.megatron.commit("main", "2025-04-01T00:00:00Z", core)
    files = project_files("nemo-toolkit", "2.3.0", "nemo", ("packaging==24.2",))
    files["nemo/__init__.py"] = "from nemo.strategy import setup\n"
    # setup.py builds the one and not the other.
    core["setup.py"] = "setup(ext_modules=[Extension('megatron.core.helpers_cpp', sources=[])])\n"
    here = upstream.megatron.commit("main", "2025-04-02T00:00:00Z", core)
    files["nemo/helpers.py"] = "from megatron.core import helpers_cpp\nfrom megatron.core import other_cpp\n"
    files["nemo/strategy.py"] = (
        "from megatron.core.optimizer import get_optimizer\n\n\ndef setup():\n    return get_optimizer(1, cond=None)\n"
    )
    upstream.nemo.commit("main", "2025-04-01T00:00:00Z", {**files, "requirements/manifest.json": manifest(here)})
    refused = error(nemo.run("lock", "--json", "--exact", status=5))
    assert re.search(r"^\[api-drift:[0-9a-f]{8}\] nemo-toolkit", refused["why"])
    # The manifest pins that commit, and it lacks the argument too: the call fails upstream as it does here.
    assert "nemo/strategy.py:5" not in refused["why"]
    assert "megatron/training" not in refused["why"]
    assert "helpers_cpp" not in refused["why"]
    assert "nemo/helpers.py:2: megatron.core has no 'other_cpp'" in refused["why"]
    nemo.run("lock", "--allow", "api-drift", "--no-verify")
    assert lock_of(nemo).allowed[0].startswith("api-drift:")


# ---- tags, commits, names, pins


@pytest.mark.parametrize("how", ["tag", "short commit"])
def test_tag_and_short_commit_of_the_anchor_name_their_variant(nemo: Any, upstream: Upstream, how: str) -> None:
    ref = "v2.1.0" if how == "tag" else upstream.commits["n1"][:10]
    locked = result(nemo.run("lock", "--nemo", ref, "--json"))
    assert locked["path"] == str(nemo.project / "lockfiles" / f"nemo-{ref}" / BASE)
    lock = lock_of(nemo, f"nemo-{ref}")
    component = lock.components["nemo-toolkit"]
    assert (component.commit, component.follows) == (upstream.commits["n1"], False)
    assert (component.ref_kind, component.because) == (how.rsplit(maxsplit=1)[-1], "pinned by the user")
    assert lock.components["megatron-core"].commit == upstream.commits["m1"]
    assert lock.inputs.pins == {"nemo-toolkit": ref}
    if how == "tag":
        assert (lock.inputs.as_of, lock.inputs.as_of_asked) == ("2025-02-24T12:00:00Z", "release")
        reason = "nemo-toolkit v2.1.0 is of 2025-02-10T12:00:00Z, and 14 days of margin"
        assert lock.inputs.as_of_reason == reason


def test_a_release_that_is_not_there_names_near_ones_and_the_tag(
    nemo: Any, upstream: Upstream, wheel: Callable[..., Path]
) -> None:
    for version, day in (("2.6.0", "2024-12-01"), ("2.7.3", "2025-03-01"), ("3.0.0", "2025-04-01")):
        wheel("nemo_toolkit", version, f"{day}T00:00:00Z")
    upstream.nemo.tag("v2.7.99", upstream.commits["n1"])
    upstream.nemo.tag("v12.7.99", upstream.commits["n1"])
    refused = error(nemo.run("lock", "--nemo", "2.7.99", "--json", status=4))
    assert refused["what"] == "there is no release 2.7.99 of nemo-toolkit"
    first, second, *_ = refused["why"].splitlines()
    releases = "2.7.3 (the newest before it), 3.0.0 (the first after it)."
    assert first == f"Releases for the base's Python: {releases}"
    assert second == f"{NEMO_URL} has the tag v2.7.99."
    assert refused["fix"].startswith("Take the tag: --pin nemo-toolkit=v2.7.99. Or a release: ")
    refused = error(nemo.run("lock", "--nemo", "2.7.98", "--as-of", "2025-01-01", "--name", "x", "--json", status=4))
    assert "tag" not in refused["why"].splitlines()[1]
    assert "--pin nemo-toolkit=VERSION" in refused["fix"]


@pytest.mark.slow
def test_unreachable_git(nemo: Any, upstream: Upstream) -> None:
    nemo.run("lock")
    upstream.folder.rename(upstream.folder.with_name("gone"))
    for arguments in (("lock",), ("lock", "--check"), ("lock", "--nemo", "v2.1.0")):
        refused = error(nemo.run(*arguments, "--json", status=10))
        assert NEMO_URL in refused["what"] + refused["why"]


# ---- sync


def write_plain_stack(tool: Any, **modules: str) -> None:
    """The stack without a word on what builds its components from git."""
    components = {
        "nemo-toolkit": {"git": NEMO_URL, "ref": "main", "modules": [modules.get("nemo", "nemo")]},
        "megatron-core": {"git": MCORE_URL, "modules": ["megatron.core"]},
        "packaging": {"version": ">=24", "modules": ["packaging.version"]},
    }
    write_stack(tool.project, "nemo", components, anchor="nemo-toolkit")


def test_sync_installs_what_comes_from_git_and_imports_it(nemo: Any, upstream: Upstream) -> None:
    write_plain_stack(nemo)
    nemo.run("lock")
    done = result(nemo.run("sync", "--into", "venv", "--json"))
    assert [(entry["phase"], entry["packages"]) for entry in done["phases"]] == [("main", 1), ("git", 2)]
    assert done["imported"] == ["nemo", "megatron.core", "packaging.version"]
    assert done["not_checked"] == []
    assert all(Path(entry["log"]).is_file() for entry in done["phases"])
    show = "import nemo, megatron.core; print(nemo.__version__, megatron.core.__version__)"
    shown = subprocess.run([nemo.project / "venv/bin/python", "-c", show], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["2.2.0", "0.12.0"]
    # Made anew, phases apart: what was not installed was not checked.
    part = result(nemo.run("sync", "--into", "venv", "--phases", "main", "--json"))
    assert part["imported"] == ["packaging.version"]
    assert [(entry["module"], entry["component"], entry["reason"]) for entry in part["not_checked"]] == [
        ("nemo", "nemo-toolkit", "phase git is not installed"),
        ("megatron.core", "megatron-core", "phase git is not installed"),
    ]
    assert not list((nemo.project / "venv").glob("lib/*/site-packages/nemo"))


def test_sync_refuses_what_it_must_not_touch_or_install(nemo: Any) -> None:
    write_plain_stack(nemo, nemo="nemo.collections.llm")
    nemo.run("lock", "--no-verify")
    precious = nemo.project / "mine"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    refused = error(nemo.run("sync", "--into", "mine", "--json", status=2))
    assert "mine" in refused["what"] + refused["why"]
    assert os.listdir(precious) == ["thesis.txt"]
    error(nemo.run("sync", "--into", "venv", "--phases", "git", "--json", status=2))
    assert not (nemo.project / "venv").exists()
    refused = error(nemo.run("sync", "--into", "venv", "--json", status=5))
    assert "No module named 'nemo.collections'" in refused["why"]
    main = nemo.project / "lockfiles/nemo" / BASE / "main.txt"
    main.write_text(main.read_text().replace("24.2", "24.0"))
    error(nemo.run("sync", "--into", "other", "--json", status=5))
    assert not (nemo.project / "other").exists()


# ---- the compile phase, from git


KERNELS_URL = f"{PUBLIC}/x/kernels"
# What builds it must be in the environment: a build while locking would end here.
KERNELS = {
    "pyproject.toml": '[build-system]\nrequires = ["setuptools", "packaging"]\n'
    'build-backend = "setuptools.build_meta"\n',
    "setup.py": "import packaging\nfrom setuptools import setup\n\n"
    'assert packaging.__version__ == "24.2"\n'
    'setup(name="kernels", version="1.5", packages=["kernels"], install_requires=["iniconfig<2"])\n',
    "kernels/__init__.py": "",
}


def test_a_component_of_the_compile_phase_from_git(nemo: Any, upstream: Upstream) -> None:
    history = History(made(upstream.folder / "x/kernels"))
    commit = history.commit("main", "2025-03-01T00:00:00Z", KERNELS)
    components: dict[str, Any] = {
        "packaging": {"version": "==24.2"},
        "kernels": {"git": KERNELS_URL, "ref": "main", "phase": "compile", "modules": ["kernels"]},
    }
    write_stack(nemo.project, "nemo", components, requirements={"setuptools": SETUPTOOLS})
    locked = result(nemo.run("lock", "--json"))
    assert locked["packages"] == {"main": 2, "compile": 1, "git": 1}
    assert f"kernels @ git+{KERNELS_URL}@{commit}" in text_of(nemo, "git.txt")
    assert "iniconfig==1" in text_of(nemo, "compile.txt")
    component = lock_of(nemo).components["kernels"]
    assert (component.phase, component.version, component.sdist) == ("compile", "1.5", None)
    assert (component.git, component.commit, component.follows) == (KERNELS_URL, commit, True)
    assert result(nemo.run("lock", "--json"))["built"] is False
    nemo.run("lock", "--check")
    # Built against what is installed, without isolation.
    done = result(nemo.run("sync", "--into", "venv", "--json"))
    assert done["imported"] == ["kernels"]
    assert [phase["phase"] for phase in done["phases"]] == ["main", "compile", "git"]
    # Whose requirements only a build would tell, is no part of a lock.
    setup = KERNELS["setup.py"].replace('["iniconfig<2"]', "needed()")
    history.commit("main", "2025-04-01T00:00:00Z", {**KERNELS, "setup.py": setup})
    refused = error(nemo.run("lock", "--json", status=5))
    assert "requires is not known before a build" in refused["what"]
    assert "setup.py computes them" in refused["why"]
    assert "--pin kernels=VERSION" in refused["fix"]
