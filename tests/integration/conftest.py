"""An image that takes seconds where its base is there, and a package index of a test's own."""

from __future__ import annotations

import shutil
import zipapp
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool, shared_folder
from helpers.browser import Browser, open_browser
from helpers.build_backend import BACKEND, SETUPTOOLS_MODULE
from helpers.cuda import toolkit
from helpers.docker_daemon import Daemon, docker_daemon, docker_programs
from helpers.git_repos import History
from helpers.kept_entries import keep_base
from helpers.lock_runs import ANY, OLD
from helpers.mini import NAME, image_of, write_stack
from helpers.programs import path_without
from helpers.simple_index import SimpleIndex, simple_index
from helpers.stack_files import GPU_BASE, write_base, write_target
from helpers.stack_files import write_stack as write_own_stack
from helpers.upstreams import MCORE_URL, NEMO_URL, PUBLIC, SETUPTOOLS, Upstream, made, manifest, project_files
from helpers.wheels import make_wheel

from envbuild.catalog.catalog import Catalog, HostDistribution, select
from envbuild.catalog.data import data_root
from envbuild.wheels.toolchain.toolchain import Toolchain

SMOKE = Path(__file__).resolve().parents[2] / "smoke"


@pytest.fixture(scope="session")
def mini_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the small stack, for all workers: its cache of uv is small enough to be copied."""
    cache = shared_folder(tmp_path_factory) / "mini-store"
    keep_base(select(Catalog.open(data_root()), "mcore", "cpu", None, HostDistribution.here()), cache)
    return cache


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory, mini_cache: Path) -> Tool:
    """The command line in a project with the small stack, locked."""
    project = tmp_path_factory.mktemp("mini")
    write_stack(project)
    tool = Tool(project, mini_cache)
    tool.run("lock", "--stack", NAME, "--target", "cpu")
    return tool


@pytest.fixture(scope="session")
def mini_image(mini: Tool) -> dict[str, Any]:
    """What ``envbuild image --json`` says of the small stack's image."""
    return image_of(mini)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium, for pages."""
    with open_browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    """The real toolkit, of the package index where this machine has none."""
    return toolkit(shared_folder(tmp_path_factory) / "cuda-toolkit")


@pytest.fixture(scope="session")
def nvcc(cuda: Toolchain) -> Path:
    return cuda.nvcc


@pytest.fixture
def index() -> Iterator[SimpleIndex]:
    with simple_index() as running:
        yield running


@pytest.fixture
def wheel(index: SimpleIndex, tmp_path: Path) -> Callable[..., Path]:
    """Uploads a wheel of a few bytes, and says where it is here."""

    def upload(
        name: str,
        version: str,
        uploaded: str | None = OLD,
        *,
        tags: str = ANY,
        requires: tuple[str, ...] = (),
        **more: Any,
    ) -> Path:
        path = make_wheel(tmp_path / "wheels", name, version, tags, requires, **more)
        index.add(path, uploaded)
        return path

    return upload


@pytest.fixture(scope="session")
def uv_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cold cache of uv's costs more than a small lock: one for the session and all its workers."""
    return str(shared_folder(tmp_path_factory) / "uv")


@pytest.fixture(scope="session")
def path_without_mmdebstrap(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH of a machine that makes no bases: a lock is verified on it, and not in a base, which takes minutes."""
    return path_without(tmp_path_factory.mktemp("programs"), "mmdebstrap")


@pytest.fixture
def index_only(index: SimpleIndex, uv_cache: str, path_without_mmdebstrap: str) -> dict[str, str]:
    """The environment of a machine with this index alone, on which locks are verified."""
    return index_settings(index, uv_cache) | {"PATH": path_without_mmdebstrap}


@pytest.fixture
def own(tool: Any, tmp_path: Path, index_only: dict[str, str]) -> Any:
    """The tool in a project with bases of its own, and this index as its only one."""
    project = tmp_path / "project"
    write_base(project)
    write_base(project, GPU_BASE, cuda="13.0", glibc="2.35")
    write_target(project, "gpu", sm=("90",))
    return type(tool)(project, tmp_path / "cache", dict(index_only))


def index_settings(index: SimpleIndex, uv_cache: str) -> dict[str, str]:
    """The environment in which this index is the only place of packages."""
    return {
        "UV_DEFAULT_INDEX": index.url,
        "UV_CACHE_DIR": uv_cache,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_FIND_LINKS": "",
        "PIP_FIND_LINKS": "",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@pytest.fixture(scope="session")
def first_upstream(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    folder = tmp_path_factory.mktemp("upstream")
    nemo, megatron = History(made(folder / "NVIDIA-NeMo/NeMo")), History(made(folder / "NVIDIA/Megatron-LM"))
    commits = {
        f"m{number}": megatron.commit(
            "main", f"2025-0{number}-01T00:00:00Z", project_files("megatron-core", f"0.1{number}.0", "megatron.core")
        )
        for number in (1, 2, 3)
    }
    megatron.tag("core_v0.12.0", commits["m2"])
    for number, day in ((1, "2025-02-10"), (2, "2025-03-10")):
        files = project_files("nemo-toolkit", f"2.{number}.0", "nemo", ("packaging==24.2",))
        files["requirements/manifest.json"] = manifest(commits[f"m{number}"])
        commits[f"n{number}"] = nemo.commit("main", f"{day}T12:00:00Z", files)
    nemo.tag("v2.1.0", commits["n1"])
    return Upstream(folder, nemo, megatron, commits)


@pytest.fixture
def upstream(first_upstream: Upstream, tmp_path: Path) -> Upstream:
    """A test's own copy, to which it may commit."""
    folder = tmp_path / "served"
    shutil.copytree(first_upstream.folder, folder)
    nemo, megatron = (History(folder / name) for name in ("NVIDIA-NeMo/NeMo", "NVIDIA/Megatron-LM"))
    return Upstream(folder, nemo, megatron, dict(first_upstream.commits))


@pytest.fixture
def nemo(
    tool: Any,
    tmp_path: Path,
    upstream: Upstream,
    index: SimpleIndex,
    wheel: Callable[..., Path],
    index_only: dict[str, str],
) -> Any:
    """The tool in a project whose stack `nemo` has these two, reached only through a URL rewrite of git's settings.

    The index has what they need, and what builds them. Its locks are not verified: that is most of what a lock takes.
    """
    project = tmp_path / "project"
    write_base(project)
    components = {
        "nemo-toolkit": {"git": NEMO_URL, "ref": "main", "modules": ["nemo"], "uses": ["megatron-core"]},
        "megatron-core": {"git": MCORE_URL, "modules": ["megatron.core"]},
        "packaging": {"version": ">=24", "modules": ["packaging.version"]},
    }
    write_own_stack(
        project, "nemo", components, anchor="nemo-toolkit", as_of="now", requirements={"setuptools": SETUPTOOLS}
    )
    wheel("setuptools", "80.0", module=SETUPTOOLS_MODULE, sources={"setuptools/build_meta.py": BACKEND})
    for version in ("24.0", "24.1", "24.2", "25.0"):
        uploaded = "2025-04-19T00:00:00Z" if version == "25.0" else OLD
        module = f'__version__ = "{version}"\n'
        wheel("packaging", version, uploaded, module=module, sources={"packaging/version.py": ""})
    for name, version in (("iniconfig", "1.1.0"), ("iniconfig", "2.0.0"), ("pluggy", "1.2.0"), ("pluggy", "1.5.0")):
        wheel(name, version)
    for version, pluggy in (("8.0.0", "pluggy<2.0,>=1.3.0"), ("8.3.5", "pluggy<2,>=1.5")):
        wheel("pytest", version, requires=("iniconfig", "packaging", pluggy))
    settings = tmp_path / "gitconfig"
    settings.write_text(
        f'[url "file://{upstream.folder}/"]\n\tinsteadOf = {PUBLIC}/\n[protocol "file"]\n\tallow = always\n'
    )
    runner = type(tool)(project, tmp_path / "cache", dict(index_only), verifies=False)
    runner.env |= {"GIT_CONFIG_GLOBAL": str(settings), "GIT_CONFIG_NOSYSTEM": "1"}
    return runner


@pytest.fixture(scope="session")
def docker_tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return docker_programs(shared_folder(tmp_path_factory) / "docker")


@pytest.fixture(scope="session")
def dockerd(tmp_path_factory: pytest.TempPathFactory, docker_tools: dict[str, str]) -> Iterator[Daemon]:
    """A docker daemon of the session's own."""
    with docker_daemon(tmp_path_factory.mktemp("dockerd"), docker_tools) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def smoke_pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner as nodes get it."""
    target = tmp_path_factory.mktemp("zipapp") / "smoke.pyz"
    zipapp.create_archive(SMOKE, target, filter=lambda path: "__pycache__" not in path.parts)
    return target
