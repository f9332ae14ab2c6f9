"""Locks whose components from git take packages from git themselves ([tool.uv.sources]): the real git and uv."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.build_backend import BACKEND, SETUPTOOLS_MODULE
from helpers.git_repos import History
from helpers.lock_runs import ANY, error, lock_of, result
from helpers.stack_files import BASE, write_stack
from helpers.upstreams import MCORE_URL, NEMO_URL, PUBLIC, SETUPTOOLS, Upstream, made, project_files
from helpers.wheels import make_wheel, served

OPTIM_URL = f"{PUBLIC}/x/Optim"
STACK = {
    # It asks for an extra of the other, of which the stack says nothing.
    "nemo-toolkit": {"git": NEMO_URL, "ref": "main", "modules": ["nemo"]},
    "megatron-core": {"git": MCORE_URL, "ref": "main", "modules": ["megatron.core"]},
}


def text_of(tool: Any, file: str, name: str = "nemo") -> str:
    text: str = (tool.project / "lockfiles" / name / BASE / file).read_text()
    return text


def from_git(tool: Any, name: str = "nemo") -> list[str]:
    return [line.split(" ; ")[0] for line in text_of(tool, "git.txt", name).splitlines() if line[0].isalpha()]


def with_sources(files: dict[str, Any], sources: str, extras: dict[str, list[str]] | None = None) -> dict[str, Any]:
    """A project's files with `[tool.uv.sources]`, and with extras."""
    text = files["pyproject.toml"]
    if extras:
        lines = "".join(f"{name} = {json.dumps(items)}\n" for name, items in extras.items())
        text = text.replace("[tool.setuptools]", f"[project.optional-dependencies]\n{lines}[tool.setuptools]")
    return {**files, "pyproject.toml": f"{text}[tool.uv.sources]\n{sources}"}


@pytest.fixture
def optim(upstream: Upstream) -> dict[str, str]:
    """A package that no index has, at a tag and later on its branch; its commits."""
    history = History(made(upstream.folder / "x/Optim"))
    first = history.commit("main", "2025-01-01T00:00:00Z", project_files("envbuild-optim", "1.0", "optim"))
    history.tag("v1", first)
    files = project_files("envbuild-optim", "2.0", "optim", ("iniconfig<2",))
    return {"v1": first, "main": history.commit("main", "2025-03-01T00:00:00Z", files)}


def megatron(
    upstream: Upstream, source: str, *, needs: tuple[str, ...] = (), groups: str = "", **extras: list[str]
) -> str:
    """Megatron-LM's next commit, which takes the package so."""
    files = with_sources(project_files("megatron-core", "0.19.0", "megatron.core", needs), source, extras)
    files["pyproject.toml"] += f"[dependency-groups]\n{groups}" if groups else ""
    return upstream.megatron.commit("main", "2025-04-01T00:00:00Z", files)


def asking(tool: Any, upstream: Upstream, *needs: str, stack: dict[str, Any] | None = None, sources: str = "") -> str:
    """NeMo's next commit, which needs these; and the stack of the two."""
    files = project_files("nemo-toolkit", "3.0", "nemo", needs)
    files = with_sources(files, sources) if sources else files
    write_stack(
        tool.project,
        "nemo",
        stack or STACK,
        anchor="nemo-toolkit",
        as_of="now",
        requirements={"setuptools": SETUPTOOLS},
    )
    return upstream.nemo.commit("main", "2025-04-02T00:00:00Z", files)


def test_what_an_extra_takes_from_git_is_locked_by_commit(nemo: Any, upstream: Upstream, optim: dict[str, str]) -> None:
    core = megatron(
        upstream,
        f'envbuild_optim = {{ git = "{OPTIM_URL}", tag = "v1" }}\n',
        dev=["Envbuild.Optim"],
        other=["iniconfig"],
    )
    asking(nemo, upstream, "megatron-core[dev]")
    locked = result(nemo.run("lock", "--json"))
    assert locked["packages"]["git"] == 3
    assert f"envbuild-optim @ git+{OPTIM_URL}@{optim['v1']}" in from_git(nemo)
    component = lock_of(nemo, "nemo").components["envbuild-optim"]
    assert (component.version, component.asked, component.ref_kind) == ("1.0", "v1", "tag")
    assert component.because == f"pyproject.toml [tool.uv.sources] of megatron-core {core[:12]}"
    assert component.committed_at == "2025-01-01T00:00:00Z"
    assert component.transitive
    assert not component.follows
    assert f"envbuild-optim @ git+{OPTIM_URL}@{optim['v1']}" in text_of(nemo, "pyproject.toml")
    assert result(nemo.run("lock", "--json"))["built"] is False
    nemo.run("lock", "--check")
    assert "no change" in nemo.run("lock", "--diff").stdout
    # The three plain commands and sync install it from there.
    done = result(nemo.run("sync", "--into", "venv", "--json"))
    assert [(entry["phase"], entry["packages"]) for entry in done["phases"]][-1] == ("git", 3)
    shown = subprocess.run(
        [nemo.project / "venv/bin/python", "-c", "import optim; print(optim.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == ["1.0"]


def test_a_branch_is_followed_and_as_of_holds(nemo: Any, upstream: Upstream, optim: dict[str, str]) -> None:
    # No ref at all is the default branch.
    megatron(upstream, f'envbuild-optim = {{ git = "{OPTIM_URL}" }}\n', dev=["envbuild-optim"])
    asking(nemo, upstream, "megatron-core[dev]")
    nemo.run("lock")
    component = lock_of(nemo, "nemo").components["envbuild-optim"]
    assert (component.commit, component.follows) == (optim["main"], True)
    assert "iniconfig==1" in text_of(nemo, "main.txt")
    nemo.run("lock", "--check")
    history = upstream.folder / "x/Optim"
    files = project_files("envbuild-optim", "3.0", "optim")
    new = History(history).commit("main", "2025-05-01T00:00:00Z", files)
    assert (
        f"moved from {optim['main'][:12]} to {new[:12]}"
        in error(nemo.run("lock", "--check", "--json", status=5))["why"]
    )
    nemo.run("lock", "--as-of", "2025-04-20", "--name", "april")
    component = lock_of(nemo, "april").components["envbuild-optim"]
    assert (component.commit, component.follows) == (optim["main"], False)


def test_what_nothing_asks_for_decides_nothing(nemo: Any, upstream: Upstream, optim: dict[str, str]) -> None:
    gone = f"{PUBLIC}/x/gone"
    megatron(
        upstream,
        f'iniconfig = {{ git = "{OPTIM_URL}", rev = "{optim["v1"]}" }}\n'
        f'envbuild-gone = {{ git = "{gone}" }}\n'
        f'envbuild-group = {{ git = "{gone}", group = "test" }}\n'
        f'envbuild-mac = {{ git = "{gone}", marker = "sys_platform == \'darwin\'" }}\n'
        f'envbuild-undeclared = {{ git = "{gone}" }}\n',
        dev=["iniconfig", "envbuild-gone", "envbuild-mac ; sys_platform == 'darwin'"],
        groups='test = ["envbuild-group"]\n',
    )
    # Another one asks for it, of the index.
    asking(nemo, upstream, "megatron-core", "iniconfig==2.0.0")
    refused = nemo.run("lock").stderr
    assert "iniconfig==2.0.0" in text_of(nemo, "main.txt")
    assert "iniconfig" not in lock_of(nemo, "nemo").components
    assert OPTIM_URL not in text_of(nemo, "pyproject.toml")
    assert "envbuild-gone of pyproject.toml [tool.uv.sources]" in refused
    assert "megatron-core[dev]" in refused
    assert "envbuild-undeclared" not in refused
    # Where the extra is asked for, its repository is missed.
    asking(nemo, upstream, "megatron-core[dev]")
    refused = error(nemo.run("lock", "--json", status=4))
    assert gone in refused["why"]
    assert "Its authors take envbuild-gone from elsewhere" in refused["fix"]


def test_the_index_and_the_commit_of_one_package_are_one(nemo: Any, upstream: Upstream, optim: dict[str, str]) -> None:
    history = History(made(upstream.folder / "x/ini"))
    commit = history.commit("main", "2025-01-01T00:00:00Z", project_files("iniconfig", "2.5", "iniconfig"))
    megatron(upstream, f'iniconfig = {{ git = "{PUBLIC}/x/ini", rev = "{commit[:10]}" }}\n', dev=["iniconfig"])
    # Its other requirers, one of which is from the index, name releases.
    asking(nemo, upstream, "megatron-core[dev]", "iniconfig>=2", "pytest==8.3.5")
    nemo.run("lock")
    assert f"iniconfig @ git+{PUBLIC}/x/ini@{commit}" in from_git(nemo)
    assert "iniconfig==" not in text_of(nemo, "main.txt")
    assert lock_of(nemo, "nemo").components["iniconfig"].version == "2.5"


def test_the_stack_and_the_user_win_and_say_so(nemo: Any, upstream: Upstream, optim: dict[str, str]) -> None:
    core = megatron(upstream, f'envbuild-optim = {{ git = "{OPTIM_URL}", tag = "v1" }}\n', dev=["envbuild-optim"])
    asking(nemo, upstream, "megatron-core[dev]")
    over = f"v1 of {OPTIM_URL} (pyproject.toml [tool.uv.sources] of megatron-core {core[:12]})"
    nemo.run("lock", "--pin", "envbuild_optim=main", "--name", "pinned")
    component = lock_of(nemo, "pinned").components["envbuild-optim"]
    assert (component.commit, component.because) == (optim["main"], f"pinned by the user, over {over}")
    nemo.run("lock", "--check", "--name", "pinned")
    refused = error(nemo.run("lock", "--pin", "envbuild-optin=main", "--name", "x", "--json", status=2))
    assert "no component 'envbuild-optin' to pin" in refused["what"]
    assert "envbuild-optim" in refused["why"]
    stack = {**STACK, "envbuild-optim": {"git": OPTIM_URL, "ref": "main"}}
    asking(nemo, upstream, "megatron-core[dev]", stack=stack)
    nemo.run("lock")
    component = lock_of(nemo, "nemo").components["envbuild-optim"]
    assert (component.commit, component.because) == (optim["main"], f"the stack's file, over {over}")
    assert not component.transitive


@pytest.mark.slow
def test_what_is_taken_takes_something_itself(nemo: Any, upstream: Upstream, optim: dict[str, str]) -> None:
    # In a folder of its repository, with a word of its own.
    history = History(made(upstream.folder / "x/mono"))
    inner = with_sources(
        project_files("envbuild-inner", "4.0", "inner", ("envbuild-optim",)),
        f'envbuild-optim = {{ git = "{OPTIM_URL}", rev = "{optim["v1"]}" }}\n',
    )
    commit = history.commit("main", "2025-01-01T00:00:00Z", {f"python/{name}": text for name, text in inner.items()})
    source = f'envbuild-inner = {{ git = "{PUBLIC}/x/mono", branch = "main", subdirectory = "python" }}\n'
    megatron(upstream, source, dev=["envbuild-inner"])
    asking(nemo, upstream, "megatron-core[dev]")
    nemo.run("lock")
    assert f"envbuild-inner @ git+{PUBLIC}/x/mono@{commit}#subdirectory=python" in from_git(nemo)
    assert f"envbuild-optim @ git+{OPTIM_URL}@{optim['v1']}" in from_git(nemo)
    components = lock_of(nemo, "nemo").components
    assert components["envbuild-inner"].subdirectory == "python"
    because = f"python/pyproject.toml [tool.uv.sources] of envbuild-inner {commit[:12]}"
    assert components["envbuild-optim"].because == because
    done = result(nemo.run("sync", "--into", "venv", "--json"))
    assert done["phases"][-1]["packages"] == 4


def test_what_upstream_builds_in_the_environment_is_not_built_to_lock(
    nemo: Any, upstream: Upstream, optim: dict[str, str]
) -> None:
    history = History(made(upstream.folder / "x/kernels"))
    setup = (
        'import torch\nfrom setuptools import setup\nsetup(name="envbuild-kernels", version="1.5", py_modules=["k"], '
        'install_requires=["iniconfig<2"])\n'
    )
    pyproject = '[build-system]\nrequires = ["setuptools", "packaging"]\nbuild-backend = "setuptools.build_meta"\n'
    files = {"setup.py": setup, "k.py": "", "pyproject.toml": pyproject}
    commit = history.commit("main", "2025-01-01T00:00:00Z", files)
    source = f'envbuild-kernels = {{ git = "{PUBLIC}/x/kernels", rev = "main" }}\n'
    settings = '[tool.uv]\nno-build-isolation-package = ["envbuild_kernels"]\n'
    core = with_sources(
        project_files("megatron-core", "0.19.0", "megatron.core"), source, {"dev": ["envbuild-kernels"]}
    )
    core["pyproject.toml"] += settings
    upstream.megatron.commit("main", "2025-04-01T00:00:00Z", core)
    asking(nemo, upstream, "megatron-core[dev]")
    nemo.run("lock")
    component = lock_of(nemo, "nemo").components["envbuild-kernels"]
    assert (component.phase, component.version, component.commit) == ("compile", "1.5", commit)
    assert "iniconfig==1" in text_of(nemo, "main.txt")
    # What builds it is there before it is built.
    assert "packaging==" in text_of(nemo, "main.txt")


@pytest.mark.slow
def test_a_build_has_its_own_requirements(nemo: Any, upstream: Upstream, wheel: Callable[..., Path]) -> None:
    """Its limit of setuptools, and what it imports, are its own and are locked; the environment has others."""
    wheel("setuptools", "78.0", module=SETUPTOOLS_MODULE, sources={"setuptools/build_meta.py": BACKEND})
    history = History(made(upstream.folder / "x/Optim"))
    pyproject = (
        '[build-system]\nrequires = ["setuptools<79", "iniconfig<2"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "envbuild-optim"\nversion = "1.0"\n'
    )
    setup = (
        "from importlib.metadata import version\nimport setuptools\n"
        'open("optim.py", "w").write(f"BUILT_BY = {version(\'setuptools\')!r}, {version(\'iniconfig\')!r}\\n")\n'
        'setuptools.setup(name="envbuild-optim", version="1.0")\n'
    )
    history.commit("main", "2025-01-01T00:00:00Z", {"pyproject.toml": pyproject, "setup.py": setup})
    megatron(upstream, f'envbuild_optim = {{ git = "{OPTIM_URL}" }}\n', needs=("envbuild-optim", "iniconfig>=2"))
    asking(nemo, upstream, "megatron-core")
    nemo.run("lock")
    # NeMo's and Megatron-LM's builds take the environment's.
    builds = text_of(nemo, "git-build.txt").splitlines()
    assert builds[2:] == ["iniconfig==1.1.0", "setuptools<=80.0"]
    command = "# uv pip install --no-deps --build-constraints git-build.txt -r git.txt"
    assert builds[1] == text_of(nemo, "git.txt").splitlines()[1] == command
    nemo.run("sync", "--into", "venv")
    program = "from importlib.metadata import version as v; from optim import BUILT_BY; "
    program += "print(*BUILT_BY, v('setuptools'), v('iniconfig'))"
    shown = subprocess.run(
        [nemo.project / "venv/bin/python", "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["78.0", "1.1.0", "80.0", "2.0.0"]
    assert result(nemo.run("lock", "--json"))["built"] is False
    (nemo.project / "lockfiles/nemo" / BASE / "git-build.txt").write_text("setuptools\n")
    assert "git-build.txt: the record states" in error(nemo.run("sync", "--into", "venv", "--json", status=5))["why"]


def test_the_address_of_a_file_is_locked_with_its_hash(nemo: Any, upstream: Upstream, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "files", "filed", "1.5", ANY)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with served(wheel.parent) as place:
        url = f"{place}/{wheel.name}"
        core = megatron(upstream, f'filed = {{ url = "{url}" }}\n', dev=["filed"])
        asking(nemo, upstream, "megatron-core[dev]")
        locked = result(nemo.run("lock", "--json"))
        component = lock_of(nemo, "nemo").components["filed"]
        assert (component.version, component.url, component.commit) == ("1.5", url, None)
        assert component.because == f"pyproject.toml [tool.uv.sources] of megatron-core {core[:12]}"
        lines = text_of(nemo, "main.txt").splitlines()
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"filed @ {url}")]
        assert f"--hash=sha256:{digest}" in lines[at + 1]
        done = result(nemo.run("sync", "--into", "venv", "--json"))
        assert done["phases"][0]["packages"] == locked["packages"]["main"]
        assert "no change" in nemo.run("lock", "--diff").stdout
        for kind in ("requirements", "pylock", "cyclonedx"):
            assert "filed" in nemo.run("export", "--stack", "nemo", "--format", kind).stdout
