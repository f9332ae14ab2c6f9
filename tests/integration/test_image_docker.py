"""A native image in a real docker daemon: `--format docker`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from conftest import Tool
from docker import APIClient
from helpers.docker_daemon import Daemon
from helpers.mini import NAME, image_of

MACHINE = 11
TAG = f"{NAME}:debian12-cpu"


@pytest.mark.slow
def test_native_image_is_loaded_as_it_is(mini: Tool, mini_image: Any, dockerd: Daemon) -> None:
    tool = Tool(mini.project, mini.cache, {"DOCKER_HOST": dockerd.host})
    record = mini_image["record"]
    with contextlib.closing(APIClient(base_url=dockerd.host, version="auto")) as api:
        for found in api.images(all=True):  # other tests of this worker load it too
            if found["Id"] == record["config_digest"]:
                api.remove_image(found["Id"], force=True)
    result = image_of(tool, "--format", "docker", out="native-out")
    assert result["record"]["oci_digest"] == record["oci_digest"]
    assert result["docker"] == {"tag": TAG, "image_id": record["config_digest"], "loaded": True}
    with contextlib.closing(APIClient(base_url=dockerd.host, version="auto")) as api:
        found = api.inspect_image(TAG)
        assert found["Id"] == record["config_digest"]
        assert found["RootFS"]["Layers"] == [layer["diff_id"] for layer in record["layers"]]
        assert image_of(tool, "--format", "docker", out="native-out")["docker"]["loaded"] is False
        api.remove_image(TAG, force=True)
        assert image_of(tool, "--format", "docker", out="native-out")["docker"]["loaded"] is True


def test_error_for_format_docker_without_a_daemon_has_help(mini: Tool, tmp_path: Any) -> None:
    tool = Tool(mini.project, mini.cache, {"DOCKER_HOST": f"unix://{tmp_path}/socket"})
    done = tool.run("image", "--stack", NAME, "--target", "cpu", "--format", "docker", status=MACHINE)
    assert f"no docker daemon answers at unix://{tmp_path}/socket" in done.stderr
    assert "systemctl start docker" in done.stderr
