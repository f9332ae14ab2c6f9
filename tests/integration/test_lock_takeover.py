"""What upstream forces, and what takes over where NeMo's tree has no LLM collection: git, uv and small repositories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.git_repos import History, Submodule
from helpers.lock_runs import error, lock_of, result
from helpers.stack_files import BASE, write_stack
from helpers.upstreams import BRIDGE_URL, MCORE_URL, NEMO_URL, SETUPTOOLS, Upstream, made, manifest, project_files

TAKEOVER = {
    "without": "nemo/collections/llm",
    "driver": "bridge",
    "lead": "megatron-bridge",
    "reason": "it moved",
    "components": {
        "megatron-bridge": {"git": BRIDGE_URL, "ref": "main", "modules": ["bridge"]},
        "nemo-toolkit": {"git": NEMO_URL, "ref": "main", "modules": ["nemo"]},
    },
}
LLM = "nemo/collections/llm/__init__.py"


def write_nemo(tool: Any, **more: Any) -> None:
    """Stack `nemo`, with what takes over."""
    components = {
        "nemo-toolkit": {"git": NEMO_URL, "ref": "main", "modules": ["nemo", "nemo.collections.llm"]},
        "megatron-core": {"git": MCORE_URL, "modules": ["megatron.core"]},
    }
    requirements = {"setuptools": SETUPTOOLS}
    more = {"driver": "nemo", "takeover": TAKEOVER, "requirements": requirements, **more}
    write_stack(tool.project, "nemo", components, anchor="nemo-toolkit", as_of="now", **more)


@pytest.fixture
def bridge(upstream: Upstream) -> Callable[..., str]:
    """Commits to Megatron-Bridge, whose submodule is another Megatron-LM than NeMo's manifest names."""
    history = History(made(upstream.folder / "NVIDIA-NeMo/Megatron-Bridge"))

    def commit(
        *overrides: str, needs: tuple[str, ...] = ("megatron-core", "iniconfig<2"), megatron: str = MCORE_URL
    ) -> str:
        files = project_files("megatron-bridge", "0.6.0", "bridge", needs)
        lines = ", ".join(f'"{line}"' for line in overrides)
        files["pyproject.toml"] = f"{files['pyproject.toml']}[tool.uv]\noverride-dependencies = [{lines}]\n"
        files["pyproject.toml"] += '[tool.uv.sources]\nmegatron-core = { path = "3rdparty/Megatron-LM/" }\n'
        files["3rdparty/Megatron-LM"] = Submodule(upstream.commits["m3"])
        files[".gitmodules"] = f'[submodule "m"]\n\tpath = 3rdparty/Megatron-LM\n\turl = {megatron}\n'
        return history.commit("main", "2025-03-01T00:00:00Z", files)

    return commit


def test_bridge_takes_over_where_the_tree_has_no_llm_collection(
    nemo: Any, upstream: Upstream, bridge: Callable[..., str]
) -> None:
    commit = bridge("iniconfig>=2")
    write_nemo(nemo)
    locked = result(nemo.run("lock", "--nemo", "main", "--json"))
    lock, at = lock_of(nemo, "nemo"), upstream.commits["n2"][:12]
    assert lock.driver == "bridge"
    assert lock.driver_because == f"nemo-toolkit {at} has no nemo/collections/llm: it moved"
    assert locked["driver"] == "bridge"
    components = lock.components
    assert list(components) == ["nemo-toolkit", "megatron-core", "megatron-bridge"]
    assert components["nemo-toolkit"].modules == ("nemo",)
    assert (components["megatron-bridge"].commit, components["megatron-bridge"].follows) == (commit, True)
    # Bridge's Megatron, not the one of NeMo's manifest; and what Bridge forces on others.
    assert components["megatron-core"].commit == upstream.commits["m3"]
    because = f"submodule 3rdparty/Megatron-LM of megatron-bridge {commit[:12]}"
    assert components["megatron-core"].because == because
    assert lock.overrides == {"iniconfig": ">=2 (pyproject.toml [tool.uv] override-dependencies)"}
    assert result(nemo.run("lock", "--nemo", "main", "--json"))["built"] is False
    # The lock follows Bridge's branch too.
    moved = bridge()
    refused = error(nemo.run("lock", "--check", "--json", status=5))
    assert f"megatron-bridge: branch main moved from {commit[:12]} to {moved[:12]}" in refused["why"]


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("https://git.example.invalid/nobody/Megatron-LM", "cannot list the refs of "),
        # It can be reached, and has no such commit.
        (NEMO_URL, f"{NEMO_URL} has no commit "),
    ],
)
def test_a_submodule_that_cannot_be_had(nemo: Any, bridge: Callable[..., str], url: str, what: str) -> None:
    tip = bridge(megatron=url)
    write_nemo(nemo)
    refused = error(nemo.run("lock", "--nemo", "main", "--json", status=10 if "cannot" in what else 3))
    assert what in refused["what"]
    assert url in refused["what"]
    assert f"submodule 3rdparty/Megatron-LM of megatron-bridge {tip[:12]} names it for megatron-core" in refused["why"]
    assert "Or take a commit from before: envbuild lock --as-of DATE --name NAME." in refused["fix"]
    assert not (nemo.project / "lockfiles").exists()


def test_nemo_stays_where_the_tree_has_the_collection(
    nemo: Any, upstream: Upstream, bridge: Callable[..., str]
) -> None:
    bridge()
    files = {**project_files("nemo-toolkit", "2.7.0", "nemo"), LLM: ""}
    files["requirements/manifest.json"] = manifest(upstream.commits["m1"])
    commit = upstream.nemo.commit("main", "2025-04-01T00:00:00Z", files)
    write_nemo(nemo)
    nemo.run("lock")
    lock = lock_of(nemo, "nemo")
    assert (lock.driver, lock.driver_because) == ("nemo", f"nemo-toolkit {commit[:12]} has nemo/collections/llm")
    assert list(lock.components) == ["nemo-toolkit", "megatron-core"]
    assert lock.components["megatron-core"].commit == upstream.commits["m1"]
    # What only the takeover brings cannot be pinned then.
    refused = error(nemo.run("lock", "--pin", "megatron-bridge=0.6.2", "--name", "x", "--json", status=2))
    assert "megatron-bridge is pinned, and is not in the stack" in refused["what"]
    # What no variant of the stack has, nor any component takes from git, is no component.
    refused = error(nemo.run("lock", "--pin", "flash-attn=v2", "--name", "x", "--json", status=2))
    assert refused["what"] == "stack nemo has no component 'flash-attn' to pin"
    refused = error(nemo.run("lock", "--pin", "megatron-bridg=main", "--name", "x", "--json", status=2))
    assert "Did you mean 'megatron-bridge'?" in refused["why"]


def test_a_pin_wins_over_what_takes_over(nemo: Any, upstream: Upstream, bridge: Callable[..., str]) -> None:
    first = bridge()
    bridge("iniconfig>=2")
    write_nemo(nemo)
    pins = ("--pin", f"megatron-bridge={first}", "--pin", "megatron-core=core_v0.12.0")
    nemo.run("lock", *pins, "--name", "own")
    components = lock_of(nemo, "own").components
    assert components["megatron-bridge"].commit == first
    assert components["megatron-core"].commit == upstream.commits["m2"]
    assert components["megatron-bridge"].because == "pinned by the user"
    assert lock_of(nemo, "own").overrides == {}


def test_driver_nemo_on_a_commit_without_the_collection_is_refused(nemo: Any, upstream: Upstream) -> None:
    components = {"nemo-toolkit": {"git": NEMO_URL, "ref": "main"}, "megatron-core": {"git": MCORE_URL}}
    more = {"driver": "nemo", "requirements": {"setuptools": SETUPTOOLS}}
    write_stack(nemo.project, "nemo", components, anchor="nemo-toolkit", **more)
    refused = error(nemo.run("lock", "--json", status=5))
    at = upstream.commits["n2"][:12]
    assert f"] the stack's driver is nemo, and nemo-toolkit {at} has no {TAKEOVER['without']}" in (refused["why"])
    nemo.run("lock", "--allow", "driver-collection")
    (allowed,) = lock_of(nemo, "nemo").allowed
    assert allowed.startswith("driver-collection:")


def test_a_release_without_the_collection_is_taken_over_too(own: Any, wheel: Callable[..., None]) -> None:
    wheel("nemo_toolkit", "2.7.3", sources={LLM: ""})
    wheel("nemo_toolkit", "3.0.0", sources={"nemo/collections/asr/__init__.py": ""})
    for name, version in (("megatron_core", "0.15.3"), ("megatron_core", "0.19.2"), ("megatron_bridge", "0.6.2")):
        wheel(name, version)
    wheel("setuptools", "80.0")
    write_nemo(own)
    own.run("lock", "--nemo", "2.7.3", "--no-verify")
    lock = lock_of(own, "nemo-2.7.3")
    assert (lock.driver, lock.driver_because) == ("nemo", "nemo-toolkit 2.7.3 has nemo/collections/llm")
    own.run("lock", "--nemo", "3.0.0", "--pin", "megatron-bridge=0.6.2", "--name", "three", "--no-verify")
    lock = lock_of(own, "three")
    assert (lock.driver, lock.driver_because) == ("bridge", "nemo-toolkit 3.0.0 has no nemo/collections/llm: it moved")
    assert lock.components["megatron-bridge"].version == "0.6.2"
    # What belongs to Bridge, not to NeMo.
    core = lock.components["megatron-core"]
    assert (core.version, core.because) == (
        "0.19.2",
        "envs/companions/megatron-bridge.toml for megatron-bridge 0.6.2",
    )


# ---- what upstream forces on others


def test_an_override_of_upstream_against_another_packages_range_is_recorded(
    nemo: Any, bridge: Callable[..., str]
) -> None:
    """pytest 8.0 declares pluggy<2.0,>=1.3; Bridge's own lock has the older one that it forces."""
    bridge("pluggy==1.2.0", needs=("megatron-core", "pytest==8.0.0"))
    write_nemo(nemo)
    nemo.run("lock")
    (line,) = lock_of(nemo, "nemo").overridden
    assert line.startswith("pytest 8.0.0 declares pluggy>=1.3.0; pyproject.toml [tool.uv] override-dependencies of")
    # The stack says it too.
    overrides = {"pluggy": {"version": "==1.2.0", "against": ["pytest"], "reason": "seen to work"}}
    write_nemo(nemo, overrides=overrides)
    nemo.run("lock")
    lock = lock_of(nemo, "nemo")
    assert lock.allowed == ()
    (line,) = lock.overridden
    assert line.endswith("; the stack (seen to work) puts pluggy 1.2.0 there")


def test_markers_of_upstreams_overrides_are_kept(nemo: Any, bridge: Callable[..., str]) -> None:
    bridge(
        "iniconfig==1.1.0 ; sys_platform == 'linux'",
        "packaging==1.0 ; sys_platform == 'win32'",
        "packaging==24.1 ; sys_platform == 'linux'",
        "pluggy==1.5.0 ; python_version < '3.0'",
        "megatron-core==0.0.1 ; sys_platform == 'never'",
        needs=("megatron-core", "iniconfig", "packaging", "pluggy"),
    )
    write_nemo(nemo)
    nemo.run("lock")
    packages = (nemo.project / "lockfiles/nemo" / BASE / "main.txt").read_text()
    assert "\niniconfig==1.1.0" in packages
    assert "\npackaging==24.1" in packages
    assert "\npackaging==1.0" not in packages
    # As with uv: an override whose marker does not hold takes the requirement away.
    assert "\npluggy==" not in packages
    where = "(pyproject.toml [tool.uv] override-dependencies)"
    assert lock_of(nemo, "nemo").overrides["iniconfig"] == f'==1.1.0 ; sys_platform == "linux" {where}'
