"""The docker builder against a real dockerd: what it makes is the native builder's image, and how it fails."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.docker_daemon import Daemon, docker_daemon
from helpers.image_contents import contents, described, differences, layers_of
from helpers.mini import NAME, image_of, write_stack
from helpers.processes import forked, wait_until
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import write_stack as write_own_stack
from helpers.upstreams import SETUPTOOLS
from helpers.wheels import make_wheel

from envbuild.core import locks
from envbuild.image.docker.engine import HELD_LABEL, open_engine

REFUSED, FAILED, NETWORK, MACHINE, INTERRUPTED = 5, 6, 10, 11, 130
TAG = f"{NAME}:debian12-cpu"


@pytest.fixture(scope="module")
def with_docker(mini: Tool, dockerd: Daemon) -> Tool:
    """The command line in the project of the small stack, with the daemon."""
    return Tool(mini.project, mini.cache, {"DOCKER_HOST": dockerd.host})


@pytest.fixture(scope="module")
def built(with_docker: Tool) -> dict[str, Any]:
    """What the docker builder says of the small stack's image."""
    return image_of(with_docker, "--builder", "docker", out="docker-out")


def api(daemon: Daemon) -> Any:
    from docker import APIClient

    return APIClient(base_url=daemon.host, version="auto", timeout=60)


def ids(daemon: Daemon) -> set[str]:
    """The images that have a name."""
    with contextlib.closing(api(daemon)) as client:
        return {item["Id"] for item in client.images() if item["RepoTags"] and "<none>:<none>" not in item["RepoTags"]}


def layout(result: dict[str, Any]) -> Path:
    return Path(result["path"]) / "oci"


def test_its_files_are_those_of_the_native_image(built: Any, mini_image: Any) -> None:
    """Names, kinds, content, modes, owners, links, times and extended attributes."""
    assert len(contents(layout(mini_image))) > 5000
    assert differences(layout(mini_image), layout(built)) == []


def test_image_diff_names_what_is_left(built: Any, mini_image: Any, mini: Tool) -> None:
    done = mini.run("image", "diff", mini_image["path"], built["path"], "--files", "--times", "--json")
    told = json.loads(done.stdout)
    assert told["files"] == []
    assert told["packages"] == {"python": [], "debian": []}
    assert [item["name"] for item in told["configuration"]] == ["label envbuild.docker.key", "workdir"]


def test_its_configuration_is_that_of_the_native_image(built: Any, mini_image: Any) -> None:
    native, docker = described(layout(mini_image))[1], described(layout(built))[1]
    ours = dict(docker["config"])
    labels = dict(ours.pop("Labels"))
    assert labels.pop("envbuild.docker.key").startswith("sha256:")
    # What docker writes down where nobody said anything.
    assert {ours.pop("WorkingDir", "/"), ours.pop("ArgsEscaped", True), ours.pop("OnBuild", None)} == {"/", True, None}
    assert (ours, labels) == (
        {name: value for name, value in native["config"].items() if name != "Labels"},
        native["config"]["Labels"],
    )
    assert (docker["os"], docker["architecture"]) == (native["os"], native["architecture"])


def test_its_sqsh_is_that_of_the_native_image(built: Any, mini_image: Any) -> None:
    def listed(result: dict[str, Any]) -> list[bytes]:
        sqsh = Path(result["path"]) / "image.sqsh"
        return subprocess.run(["unsquashfs", "-UTC", "-lln", sqsh], capture_output=True, check=True).stdout.splitlines()

    assert len(listed(mini_image)) > 5000
    assert listed(built) == listed(mini_image)


def test_its_record_says_what_built_it(built: Any, mini_image: Any, dockerd: Daemon) -> None:
    record = built["record"]
    assert record["builder"] == "docker"
    assert record["docker"]["engine"].startswith("docker ")
    assert record["docker"]["image_id"] == record["config_digest"] == built["docker"]["image_id"]
    assert {name: record[name] for name in ("packages", "base_packages", "environment", "lock_digest")} == {
        name: mini_image["record"][name] for name in ("packages", "base_packages", "environment", "lock_digest")
    }
    assert mini_image["record"]["builder"] == "native"
    with contextlib.closing(api(dockerd)) as client:
        assert client.inspect_image(TAG)["Id"] == record["config_digest"]


def test_again_it_does_no_work(with_docker: Tool, built: Any, site_cache: Path) -> None:
    logs = {path: path.stat().st_mtime_ns for path in (site_cache / "logs").glob("docker-*/*")}
    assert logs
    again = image_of(with_docker, "--builder", "docker", out="docker-out")
    assert (again["built"], again["placed"], again["docker"]["loaded"]) == (False, False, False)
    assert again["record"] == built["record"]
    assert {path: path.stat().st_mtime_ns for path in (site_cache / "logs").glob("docker-*/*")} == logs


def test_image_that_left_the_daemon_comes_back_from_the_store(with_docker: Tool, built: Any, dockerd: Daemon) -> None:
    with contextlib.closing(api(dockerd)) as client:
        client.remove_image(TAG, force=True)
    assert built["record"]["config_digest"] not in ids(dockerd)
    again = image_of(with_docker, "--builder", "docker", out="docker-out")
    assert again["docker"]["loaded"] is True
    assert again["record"]["docker"] == built["record"]["docker"]
    assert built["record"]["config_digest"] in ids(dockerd)


def test_store_that_lost_the_image_takes_it_from_the_daemon(with_docker: Tool, built: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "bases").symlink_to(with_docker.cache / "bases")
    other = Tool(with_docker.project, cache, with_docker.env)
    again = image_of(other, "--builder", "docker", out=str(tmp_path / "out"))
    assert again["built"] is True
    assert again["record"]["oci_digest"] == built["record"]["oci_digest"]
    assert not list(cache.glob("logs/docker-*/build.log"))


def test_native_image_is_loaded_as_it_is(with_docker: Tool, mini_image: Any, dockerd: Daemon) -> None:
    result = image_of(with_docker, "--builder", "native", "--format", "docker", out="native-out")
    assert result["record"]["oci_digest"] == mini_image["record"]["oci_digest"]
    assert result["docker"] == {"tag": TAG, "image_id": mini_image["record"]["config_digest"], "loaded": True}
    with contextlib.closing(api(dockerd)) as client:
        found = client.inspect_image(TAG)
        assert found["Id"] == mini_image["record"]["config_digest"]
        assert found["RootFS"]["Layers"] == [layer["diff_id"] for layer in mini_image["record"]["layers"]]
    again = image_of(with_docker, "--builder", "native", "--format", "docker", out="native-out")
    assert again["docker"]["loaded"] is False


def test_nothing_of_the_site_is_in_the_image(mini: Tool, dockerd: Daemon, index: SimpleIndex, tmp_path: Path) -> None:
    """A password, an index's address, a certificate and a proxy, all of which the steps had."""
    secret, words = "planted-open-sesame", ["planted-open-sesame", "planted-ca-text", "planted-proxy", index.url]
    index.add(make_wheel(tmp_path, "plantedlib", "1.0", "py3-none-any"), "2025-01-01T00:00:00Z")
    index.password = f"robot:{secret}"
    bundle = Path(os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt").read_text()
    (tmp_path / "ca.pem").write_text(f"# planted-ca-text\n{bundle}")
    write_own_stack(
        tmp_path / "p",
        "secretive",
        {"plantedlib": {"version": "==1.0", "modules": ["plantedlib"]}},
        as_of="now",
        base="debian12",
    )
    tool = Tool(tmp_path / "p", mini.cache, {"DOCKER_HOST": dockerd.host})
    address = index.url.replace("http://", f"http://robot:{secret}@")
    tool.env |= {"UV_DEFAULT_INDEX": address, "SSL_CERT_FILE": str(tmp_path / "ca.pem"), "UV_FIND_LINKS": ""}
    tool.env |= {"PIP_FIND_LINKS": "", "no_proxy": "127.0.0.1,planted-proxy.invalid"}
    tool.run("lock", "--stack", "secretive", "--target", "cpu")
    index.requested.clear()
    done = tool.run(
        "image", "--stack", "secretive", "--target", "cpu", "--builder", "docker", "--format", "oci", "--json"
    )
    result = json.loads(done.stdout)
    assert any(path.endswith(".whl") for path in index.requested)
    seen = json.dumps(described(layout(result))) + done.stdout + done.stderr
    with contextlib.closing(api(dockerd)) as client:
        name = result["docker"]["tag"]
        seen += json.dumps(client.inspect_image(name)) + json.dumps(client.history(name))
    for log in (mini.cache / "logs").glob("docker-*/*"):
        seen += log.read_text(errors="replace").replace(index.url, "")  # uv's log may say where it looked
    assert [word for word in words if word in seen] == []
    for layer in layers_of(layout(result)):
        data = gzip.decompress(layer.read_bytes())
        assert [word for word in words if word.encode() in data] == [], layer


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


def test_sources_of_phase_compile_become_wheels_in_a_stage(
    mini: Tool, dockerd: Daemon, index: SimpleIndex, tmp_path: Path
) -> None:
    files = {"tinyext.c": EXTENSION, "setup.py": SETUP}
    index.add(make_sdist(tmp_path, "tinyext", "1.0", pyproject=PYPROJECT, files=files), "2025-01-01T00:00:00Z")
    components = {
        "packaging": {"version": "==25.0", "modules": ["packaging.version"]},
        "tinyext": {"version": "==1.0", "phase": "compile", "modules": ["tinyext"]},
    }
    write_own_stack(
        tmp_path / "p", "tiny", components, as_of="now", requirements={"setuptools": SETUPTOOLS}, base="debian12"
    )
    tool = Tool(tmp_path / "p", mini.cache, {"DOCKER_HOST": dockerd.host, "UV_INDEX": index.url})
    tool.run("lock", "--stack", "tiny", "--target", "cpu")
    done = tool.run("image", "--stack", "tiny", "--target", "cpu", "--builder", "docker", "--format", "oci", "--json")
    found = contents(layout(json.loads(done.stdout)))
    assert [name for name in found if "/tinyext" in name and name.endswith(".so")]
    # Compilers stay in the stage.
    assert not [name for name in found if name.endswith(("bin/gcc", "/cc1", "/Python.h", "/tinyext.c"))]
    assert "build" not in found
    assert "wheels" not in found


def test_printed_dockerfile_needs_no_daemon(mini: Tool, mini_image: Any) -> None:
    done = Tool(mini.project, mini.cache, {"DOCKER_HOST": "unix:///nowhere"}).run(
        "image", "--stack", NAME, "--target", "cpu", "--print-dockerfile", "--json"
    )
    text = json.loads(done.stdout)["dockerfile"]
    assert "FROM scratch AS base" in text
    assert "syntax=" not in text
    assert "@" not in text.replace('"$@"', "")
    assert "<<" not in text
    assert text.rstrip().endswith('CMD ["/bin/bash"]')
    assert f'LABEL "envbuild.lock"="{mini_image["record"]["lock_digest"]}"' in text


def test_module_that_does_not_import_leaves_no_image(mini: Tool, dockerd: Daemon, tmp_path: Path) -> None:
    before = ids(dockerd)
    write_stack(tmp_path / "p", module="psutil.no_such_part", name="broken")
    tool = Tool(tmp_path / "p", mini.cache, {"DOCKER_HOST": dockerd.host})
    tool.run("lock", "--stack", "broken", "--target", "cpu")
    done = tool.run("image", "--stack", "broken", "--target", "cpu", "--builder", "docker", status=REFUSED)
    assert "No module named 'psutil.no_such_part'" in done.stderr
    assert ids(dockerd) == before
    with contextlib.closing(api(dockerd)) as client:
        assert not client.containers(all=True)
        assert not client.images(filters={"label": "envbuild.stack=broken"})
    assert not list((tmp_path / "p").glob("out/*"))


@pytest.fixture
def failing(mini: Tool, dockerd: Daemon, tmp_path: Path) -> Tool:
    """A locked stack of which no image is there yet."""
    write_stack(tmp_path / "p", name=f"fails-{secrets.token_hex(4)}")
    (stack,) = (tmp_path / "p/envs/stacks").iterdir()
    tool = Tool(tmp_path / "p", mini.cache, {"DOCKER_HOST": dockerd.host})
    tool.run("lock", "--stack", stack.stem, "--target", "cpu")
    return tool


def arguments(tool: Tool) -> tuple[str, ...]:
    (stack,) = (tool.project / "envs/stacks").iterdir()
    return ("image", "--stack", stack.stem, "--target", "cpu", "--builder", "docker", "--format", "oci")


def test_step_that_fails_is_told_with_what_it_printed(failing: Tool, index: SimpleIndex, tmp_path: Path) -> None:
    """An index with other files of the names and versions that are locked."""
    for name, version in (("packaging", "25.0"), ("psutil", "7.0.0")):
        index.add(make_wheel(tmp_path, name, version, "py3-none-any"), "2025-01-01T00:00:00Z")
    failing.env |= {"UV_DEFAULT_INDEX": index.url, "UV_FIND_LINKS": "", "PIP_FIND_LINKS": ""}
    done = failing.run(*arguments(failing), status=FAILED)
    assert "a step exited with status" in done.stderr
    assert "hash" in done.stderr.lower()
    (log,) = [line.split()[-1] for line in done.stderr.splitlines() if line.strip().startswith("log:")]
    assert "uv pip install" in Path(log).read_text()


def test_step_without_a_network_is_told_as_that(failing: Tool) -> None:
    failing.env |= {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_FIND_LINKS": "", "PIP_FIND_LINKS": ""}
    done = failing.run(*arguments(failing), status=NETWORK)
    assert "cannot be reached" in done.stderr


def test_base_that_cannot_be_pulled_is_told_as_that(dockerd: Daemon, tmp_path: Path) -> None:
    from envbuild.core.errors import NetworkError
    from envbuild.core.progress import SilentReporter
    from envbuild.image.docker.engine import open_engine
    from envbuild.image.docker.running import run_build
    from envbuild.image.docker.streams import tar_stream

    context = {"Dockerfile": f"FROM 127.0.0.1:9/nobody/nothing@sha256:{'0' * 64}\nENV A=1\n".encode()}
    engine = open_engine({"DOCKER_HOST": dockerd.host})
    with pytest.raises(NetworkError, match="cannot pull the base image"):
        run_build(engine, tar_stream(context), {}, "try", tmp_path / "log", SilentReporter())
    with pytest.raises(NetworkError, match="cannot pull the base image"):
        engine.pull(f"127.0.0.1:9/nobody/nothing@sha256:{'0' * 64}")


def test_without_a_daemon_it_says_what_to_do(mini: Tool, tmp_path: Path) -> None:
    tool = Tool(mini.project, mini.cache, {"DOCKER_HOST": f"unix://{tmp_path}/socket"})
    for options in (("--builder", "docker"), ("--format", "docker")):
        done = tool.run("image", "--stack", NAME, "--target", "cpu", *options, status=MACHINE)
        assert f"no docker daemon answers at unix://{tmp_path}/socket" in done.stderr
        assert "systemctl start docker" in done.stderr


def test_auto_takes_docker_where_namespaces_are_forbidden(
    with_docker: Tool, built: Any, tmp_path: Path, dockerd: Daemon
) -> None:
    """A bwrap that fails as one does in a container."""
    bwrap = tmp_path / "bin/bwrap"
    bwrap.parent.mkdir()
    bwrap.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed: Operation not permitted'\nexit 1\n")
    bwrap.chmod(0o755)
    tool = Tool(
        with_docker.project, with_docker.cache, {**with_docker.env, "PATH": f"{bwrap.parent}:{os.environ['PATH']}"}
    )
    done = tool.run("image", "--stack", NAME, "--target", "cpu", "--json", "--out-dir", "docker-out")
    assert json.loads(done.stdout)["record"] == built["record"]
    assert "builder docker (docker " in done.stderr
    assert "bubblewrap cannot make its namespaces" in done.stderr
    tool.env["DOCKER_HOST"] = f"unix://{tmp_path}/socket"
    neither = tool.run("image", "--stack", NAME, "--target", "cpu", status=MACHINE)
    assert "no builder can work here: bubblewrap" in neither.stderr
    assert "no docker daemon answers" in neither.stderr


@pytest.fixture
def own_daemon(tmp_path: Path, docker_tools: dict[str, str]) -> Iterator[Daemon]:
    """A daemon for a test that ends it."""
    with docker_daemon(tmp_path / "d", docker_tools) as daemon:
        yield daemon


def test_daemon_that_dies_is_told_and_its_cache_is_gone_on_from(failing: Tool, own_daemon: Daemon) -> None:
    failing.env["DOCKER_HOST"] = own_daemon.host
    before, logs = set(failing.cache.glob("docker-images/*")), build_logs(failing)
    process = failing.start(*arguments(failing))
    log = wait_for_a_step(failing, process, logs)
    own_daemon.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == MACHINE, errors
    assert "went away" in errors
    assert set(failing.cache.glob("docker-images/*")) == before
    own_daemon.start()
    assert ids(own_daemon) == set()
    failing.run(*arguments(failing))
    # Of what was finished a daemon that crashed has what it had written down.
    assert "copy /context /: from the cache" in log.read_text()
    assert len(ids(own_daemon)) == 1


def build_logs(tool: Tool) -> set[Path]:
    return set(tool.cache.glob("logs/docker-*/build.log"))


def wait_for_a_step(tool: Tool, process: subprocess.Popen[str], before: set[Path]) -> Path:
    """Wait until the build is at its first RUN; its log."""

    def is_there() -> bool:
        assert process.poll() is None, process.communicate()
        return any("uv venv" in log.read_text() for log in build_logs(tool) - before)

    wait_until(is_there, seconds=200)
    return (build_logs(tool) - before).pop()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ended_build_leaves_nothing_half_done(failing: Tool, own_daemon: Daemon, how: signal.Signals) -> None:
    failing.env["DOCKER_HOST"] = own_daemon.host
    before, logs = set(failing.cache.glob("docker-images/*")), build_logs(failing)
    process = failing.start(*arguments(failing))
    wait_for_a_step(failing, process, logs)
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (INTERRUPTED if how is signal.SIGINT else -signal.SIGKILL), errors
    assert set(failing.cache.glob("docker-images/*")) == before
    assert ids(own_daemon) == set()
    failing.run(*arguments(failing))
    assert len(ids(own_daemon)) == 1


def held_container(image_id: str, daemon: Daemon, lock: Path) -> None:
    """As a build does while it tries what it built."""
    with locks.exclusive(lock), open_engine({"DOCKER_HOST": daemon.host}).box(image_id, lock):
        time.sleep(60)


def test_container_of_a_killed_build_goes_with_the_next_one(built: Any, dockerd: Daemon, tmp_path: Path) -> None:
    image_id = built["record"]["config_digest"]
    killed, at_work, own = (tmp_path / f"{name}.lock" for name in ("killed", "at work", "own"))

    def held() -> set[str]:
        with contextlib.closing(api(dockerd)) as client:
            found = client.containers(filters={"label": HELD_LABEL})
        return {item["Labels"][HELD_LABEL] for item in found} & {str(killed), str(at_work), str(own)}

    with forked(lambda: held_container(image_id, dockerd, killed)):
        wait_until(lambda: held() == {str(killed)}, seconds=30)
    assert held() == {str(killed)}, "nothing ends it with its build"
    with forked(lambda: held_container(image_id, dockerd, at_work)):
        wait_until(lambda: held() == {str(at_work)}, seconds=30)
        with locks.exclusive(own), open_engine({"DOCKER_HOST": dockerd.host}).box(image_id, own):
            assert held() == {str(at_work), str(own)}
    # Who makes the same again holds the lock that the other one held.
    with locks.exclusive(at_work), open_engine({"DOCKER_HOST": dockerd.host}).box(image_id, at_work):
        assert held() == {str(at_work)}
    assert held() == set()


def test_daemon_without_space_is_told_as_that(failing: Tool, docker_tools: dict[str, str], tmp_path: Path) -> None:
    disk = tmp_path / "d/data"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=220m", "small", disk], check=True)
    try:
        # tmpfs takes no overlay in older kernels.
        with docker_daemon(tmp_path / "d", docker_tools, "--storage-driver=vfs") as daemon:
            failing.env["DOCKER_HOST"] = daemon.host
            done = failing.run(*arguments(failing), status=MACHINE)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=False)
    assert "the disk of the docker daemon is full" in done.stderr
