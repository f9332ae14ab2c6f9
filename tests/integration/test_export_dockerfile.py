"""`envbuild export --format dockerfile`: real builders make the native image's environment of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.docker_daemon import Daemon
from helpers.git_repos import History
from helpers.image_builders import Builder, Image, add_locked_wheels, apt_mirror, docker_builder, podman_builder
from helpers.image_contents import described
from helpers.lock_runs import OLD
from helpers.mini import NAME
from helpers.simple_index import SimpleIndex, make_sdist, simple_index
from helpers.stack_files import write_stack
from helpers.upstreams import PUBLIC, SETUPTOOLS, made, project_files
from helpers.wheels import make_wheel

from envbuild.catalog.data import data_root
from envbuild.core.process import Finished
from envbuild.core.progress import SilentReporter
from envbuild.image.layers.sandbox import VENV
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.sync.imports import PROBE, ImportProbe, modules_of, try_imports

PYTHON = f"{VENV}/bin/python"
INSIDE_PROBE = "/tmp/probe.py"
LISTED = """\
import importlib.metadata, json, re
found = importlib.metadata.distributions()
print(json.dumps({re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): one.version for one in found}))
"""
EXTENSION = """\
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tinyext", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_tinyext(void) { return PyModule_Create(&module); }
"""
SETUP = """\
from setuptools import Extension, setup
setup(name="tinyext", version="1.0", ext_modules=[Extension("tinyext", ["tinyext.c"])])
"""
PYPROJECT = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'

OWN_INDEX = """\
[tool.uv.sources]
kitops = { index = "my-site" }
[[tool.uv.index]]
name = "my-site"
url = "https://index.example.invalid/simple"
explicit = true
"""


@pytest.fixture(scope="module")
def mirror(mini: Tool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An index on loopback with the packages of the small stack."""
    (uv_lock,) = (mini.project / "lockfiles" / NAME).glob("*/uv.lock")
    with simple_index() as index:
        add_locked_wheels(index, uv_lock, tmp_path_factory.mktemp("wheels"))
        yield index.url


@pytest.fixture(scope="module")
def result(mini: Tool) -> dict[str, Any]:
    """What the command prints for the small stack."""
    words = ("--stack", NAME, "--target", "cpu", "--format", "dockerfile", "--output", "context", "--json")
    found: dict[str, Any] = json.loads(mini.run("export", *words).stdout)
    return found


@pytest.fixture(scope="module")
def exported(result: dict[str, Any]) -> Path:
    """The folder of the small stack."""
    return Path(result["output"])


@pytest.fixture(scope="module", params=["classic", "buildkit", "podman"])
def builder(request: pytest.FixtureRequest) -> Iterator[Builder]:
    if request.param == "podman":
        # podman takes no runroot of more than 50 characters.
        with tempfile.TemporaryDirectory(prefix="pm", ignore_cleanup_errors=True) as folder:
            yield podman_builder(Path(folder), request.getfixturevalue("docker_tools"))
        return
    daemon: Daemon = request.getfixturevalue("dockerd")
    yield docker_builder(daemon, buildkit=request.param == "buildkit")


@pytest.fixture(scope="module")
def image(builder: Builder, exported: Path, mirror: str) -> Image:
    return builder.build(exported, "mini:exported", INDEX_URL=mirror)


@dataclass(frozen=True)
class InImage:
    """Runs the import check's programs in containers."""

    image: Image

    def __call__(self, argv: Sequence[str], *, what: str, log: Path, timeout_seconds: float | None = None) -> Finished:
        done = self.image.run(argv, {data_root() / PROBE: INSIDE_PROBE})
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stdout + done.stderr)
        return Finished(status=done.returncode, output=done.stdout + done.stderr, seconds=0.0)


def check_imports(image: Image, lock: LockDirectory, logs: Path) -> tuple[str, ...]:
    """The import check of `envbuild image`, in containers of the image; the modules that it imported."""
    modules = modules_of(lock.lock)
    found = try_imports(
        modules, ImportProbe(python=PYTHON, run=InImage(image), logs=logs, program=INSIDE_PROBE), SilentReporter()
    )
    return found.refuse_failed().imported


def packages_in(image: Image) -> dict[str, str]:
    done = image.run([PYTHON, "-I", "-c", LISTED])
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_folder_has_the_context(result: dict[str, Any], exported: Path, mini: Tool) -> None:
    assert (result["format"], result["packages"], result["content"]) == ("dockerfile", 2, None)
    assert exported == mini.project / "context"
    assert {path.name for path in exported.rglob("*") if path.is_file()} == {
        "Dockerfile", "base.tar.gz", "configuration.tar.gz", "main.txt", "packages.txt", "uv",
    }  # fmt: skip


@pytest.mark.slow
def test_environment_equals_that_of_the_native_image(
    image: Image, mini: Tool, mini_image: dict[str, Any], tmp_path: Path
) -> None:
    lock = read_lock(mini.project / "lockfiles" / NAME / mini_image["record"]["base"])
    assert sorted(check_imports(image, lock, tmp_path)) == ["packaging.version", "psutil"]
    assert packages_in(image) == mini_image["record"]["packages"]


@pytest.mark.slow
def test_configuration_equals_that_of_the_native_image(image: Image, mini_image: dict[str, Any]) -> None:
    native = described(Path(mini_image["path"]) / "oci")[1]["config"]
    config = image.config()
    assert config["Env"] == native["Env"]
    assert config["Cmd"] == native["Cmd"]
    assert not config.get("Entrypoint")
    assert {name: text for name, text in config["Labels"].items() if not name.startswith("io.buildah")} == native[
        "Labels"
    ]
    assert not config.get("User")
    fingerprint = image.run(["cat", "/etc/envbuild/fingerprint.json"]).stdout
    assert json.loads(fingerprint)["packages"] == mini_image["record"]["packages"]


@pytest.mark.slow
def test_image_has_nothing_of_the_build(image: Image, mirror: str) -> None:
    assert mirror not in image.described()
    done = image.run(["sh", "-c", "ls /build /usr/local/bin/uv; env"])
    assert "cannot access '/build'" in done.stderr
    assert "cannot access '/usr/local/bin/uv'" in done.stderr
    assert "UV_" not in done.stdout


@pytest.mark.slow
def test_sources_are_compiled_in_a_stage(mini: Tool, dockerd: Daemon, index: SimpleIndex, tmp_path: Path) -> None:
    """An sdist of phase compile, which needs a compiler, and a package from git, which needs one of an own index."""
    sdist = make_sdist(
        tmp_path, "tinyext", "1.0", pyproject=PYPROJECT, files={"tinyext.c": EXTENSION, "setup.py": SETUP}
    )
    index.add(sdist, "2025-01-01T00:00:00Z")
    repository = History(made(tmp_path / "served/tools/pure"))
    files = project_files("pure", "0.5", "pure", ("kitops",))
    files["pyproject.toml"] = f"{files['pyproject.toml']}{OWN_INDEX}"
    repository.commit("main", "2025-01-01T00:00:00Z", files)
    own = make_wheel(tmp_path / "own", "kitops", "1.0", "py3-none-any")
    index.add(make_wheel(tmp_path / "public", "kitops", "1.0", "py3-none-any", module="public = 1\n"), OLD)
    settings = tmp_path / "gitconfig"
    settings.write_text(
        f'[url "file://{tmp_path}/served/"]\n\tinsteadOf = {PUBLIC}/\n[protocol "file"]\n\tallow = always\n'
    )
    components = {
        "packaging": {"version": "==25.0", "modules": ["packaging.version"]},
        "tinyext": {"version": "==1.0", "phase": "compile", "modules": ["tinyext"]},
        "pure": {"git": f"{PUBLIC}/tools/pure", "ref": "main", "modules": ["pure"]},
    }
    requirements = {"setuptools": SETUPTOOLS}
    write_stack(tmp_path / "p", "tiny", components, as_of="now", requirements=requirements, base="debian12")
    tool = Tool(tmp_path / "p", mini.cache, {"UV_INDEX": index.url, "GIT_CONFIG_GLOBAL": str(settings)})
    tool.env["ENVBUILD_CONFIG"] = str(tmp_path / "config.toml")
    with simple_index() as site:
        site.add(own, OLD)
        (tmp_path / "config.toml").write_text(f'[indexes]\nmy-site = "{site.url}"\n')
        tool.run("lock", "--stack", "tiny", "--target", "cpu")
        tool.run(
            "export", "--stack", "tiny", "--target", "cpu", "--format", "dockerfile", "--output", str(tmp_path / "out")
        )
        lock = read_lock(tmp_path / "p/lockfiles/tiny/debian12")
        add_locked_wheels(index, lock.path / "uv.lock", tmp_path)
        arguments = {"INDEX_URL": index.url, "APT_MIRROR": apt_mirror(), "INDEX_MY_SITE_URL": site.url}
        image = docker_builder(dockerd, buildkit=True).build(tmp_path / "out", "tiny:exported", **arguments)
    assert sorted(check_imports(image, lock, tmp_path / "logs")) == ["packaging.version", "pure", "tinyext"]
    assert packages_in(image) == lock.packages()
    assert not any("kitops" in path for path in index.requested)
    # The compiler stays in its stage.
    assert image.run(["sh", "-c", "command -v gcc || ls /wheels"]).returncode != 0
