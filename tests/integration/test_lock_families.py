"""Releases that are never taken, families of one version, and forced releases that the index does not have: real uv."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import OLD, error, lock_of, result
from helpers.simple_index import SimpleIndex
from helpers.stack_files import BASE, write_stack
from helpers.upstreams import NEMO_URL, SETUPTOOLS, Upstream, project_files

CORE, TORCH = "transformer-engine", "transformer-engine-torch"


@pytest.fixture
def engine(own: Any, wheel: Callable[..., None]) -> Any:
    """Stack `s` of both, whose releases are not the same."""
    write_stack(own.project, "s", {CORE: {}, TORCH: {}})
    for version in ("0.0.0", "2.5.0", "2.6.0", "2.6.0.post1", "2.8.0"):
        wheel("transformer_engine", version)
    for version in ("0.0.1", "2.5.0", "2.6.0", "2.7.0"):
        wheel("transformer_engine_torch", version)
    return own


def test_family_has_one_version(engine: Any) -> None:
    engine.run("lock", "--stack", "s", "--pin", f"{TORCH}=<2.6", "--name", "x")
    assert {component.version for component in lock_of(engine, "x").components.values()} == {"2.5.0"}


def test_yanked_release_is_taken_only_where_the_user_says_so(
    own: Any, wheel: Callable[..., Any], index: SimpleIndex
) -> None:
    write_stack(own.project, "s", {"lib": {}})
    wheel("lib", "1.0")
    index.yank(wheel("lib", "2.0").name)
    own.run("lock", "--stack", "s")
    assert lock_of(own, "s").components["lib"].version == "1.0"
    pinned = ("lock", "--stack", "s", "--pin", "lib=2.0", "--name", "x")
    assert "] lib 2.0 was yanked" in error(own.run(*pinned, "--json", status=5))["why"]
    own.run(*pinned, "--allow", "yanked")
    assert "lib 2.0 was yanked" in lock_of(own, "x").allowed[0]


@pytest.fixture
def upstreams(nemo: Any, upstream: Upstream) -> Callable[..., None]:
    """Stack `nemo` of NeMo, which needs ``lib``, and ``part``; commits to it with settings of uv and a lock."""
    components: dict[str, Any] = {"nemo-toolkit": {"git": NEMO_URL, "ref": "main", "modules": ["nemo"]}, "part": {}}
    requirements = {"setuptools": SETUPTOOLS}
    write_stack(nemo.project, "nemo", components, anchor="nemo-toolkit", as_of="now", requirements=requirements)

    def commit(settings: str, uv_lock: str = "") -> None:
        files = project_files("nemo-toolkit", "2.3.0", "nemo", ("lib",))
        files["pyproject.toml"] = f"{files['pyproject.toml']}[tool.uv]\n{settings}\n"
        upstream.nemo.commit("main", "2025-03-20T12:00:00Z", {**files, **({"uv.lock": uv_lock} if uv_lock else {})})

    return commit


def test_preference_for_a_yanked_release_of_a_component_is_dropped(
    nemo: Any, upstreams: Callable[..., None], wheel: Callable[..., Any], index: SimpleIndex
) -> None:
    for version in ("1.0", "3.0"):
        wheel("part", version, OLD)
        wheel("lib", version, OLD)
    index.yank(wheel("part", "2.0", OLD).name)
    upstreams("", '[[package]]\nname = "part"\nversion = "2.0"\nsource = { registry = "https://x/simple" }\n')
    done = nemo.run("lock", "--stack", "nemo", "--no-verify")
    assert lock_of(nemo, "nemo").components["part"].version == "3.0"
    assert lock_of(nemo, "nemo").verified_in == "nowhere: not verified"
    assert "verified in: nowhere: not verified" in done.stdout


def test_sdist_that_downloads_its_wheel_from_another_index_is_not_taken(
    nemo: Any, upstreams: Callable[..., None], wheel: Callable[..., Any], index: SimpleIndex, tmp_path: Path
) -> None:
    """Megatron-Bridge's uv.lock has nvdlfw-inspect 0.2.1, of which a vendor's index has the wheel."""
    files = {
        "PKG-INFO": "Metadata-Version: 2.4\nName: lib\nVersion: 0.2.1\n",
        "pyproject.toml": '[build-system]\nrequires = ["wheel-stub"]\nbuild-backend = "wheel_stub.buildapi"\n',
    }
    stub = tmp_path / "lib-0.2.1.tar.gz"
    with tarfile.open(stub, "w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"lib-0.2.1/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    index.add(stub, OLD)
    wheel("lib", "0.2.2", OLD)
    wheel("part", "1.0", OLD)
    preferred = '[[package]]\nname = "lib"\nversion = "0.2.1"\nsource = { registry = "https://x/simple" }\n'
    upstreams("", preferred)
    nemo.run("lock", "--stack", "nemo", "--no-verify")
    assert "lib==0.2.2" in (nemo.project / "lockfiles/nemo" / BASE / "main.txt").read_text()
    upstreams('override-dependencies = ["lib==0.2.1"]', preferred)
    refused = error(nemo.run("lock", "--stack", "nemo", "--no-verify", "--exact", "--name", "x", "--json", status=5))
    assert "lib 0.2.1 has no content" in refused["why"]
    assert refused["fix"].endswith("--name x --no-verify")


@pytest.mark.parametrize(
    ("releases", "version"),
    [(("0.43.0", "0.44.0", "0.45.0"), "0.44.0"), (("0.43.0", "0.45.0"), "0.45.0"), (("0.42.0", "0.43.0"), "0.43.0")],
    ids=["same line", "later", "earlier"],
)
def test_forced_release_that_is_not_there_is_replaced_by_the_nearest(
    nemo: Any, upstreams: Callable[..., None], wheel: Callable[..., Any], releases: tuple[str, ...], version: str
) -> None:
    """Megatron-Bridge forces nvidia-modelopt==0.44.0rc5, which a vendor's index has, against what others declare."""
    wheel("part", "1.0", OLD)
    wheel("lib", "1.0", OLD, requires=("nvidia-modelopt<0.1",))
    for release in releases:
        wheel("nvidia_modelopt", release, OLD)
    upstreams('override-dependencies = ["nvidia-modelopt==0.44.0rc5"]')
    done = result(nemo.run("lock", "--stack", "nemo", "--no-verify", "--json"))
    assert done["built"]
    (deviation,) = lock_of(nemo, "nemo").deviations
    assert f"nvidia-modelopt=={version}" in (nemo.project / "lockfiles/nemo" / BASE / "main.txt").read_text()
    assert deviation.startswith("nvidia-modelopt ==")
    assert "instead of ==0.44.0rc5: the index has no release" in deviation
