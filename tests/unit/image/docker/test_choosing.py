"""What a daemon is for, where none answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envbuild.core.errors import MachineError
from envbuild.image.docker.choosing import Builder, ImageRequest, make_image


def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builder: Builder, *formats: str) -> MachineError:
    """The error where no daemon answers; nothing of the job is looked at before."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    job: Any = None
    with pytest.raises(MachineError) as caught:
        make_image(job, ImageRequest(builder=builder, formats=formats, tag="mini:cpu"))
    return caught.value


@pytest.mark.parametrize(
    ("formats", "instead"),
    [(("docker",), "oci"), (("docker", "sqsh"), "sqsh"), (("docker", "oci", "sqsh"), "oci,sqsh")],
)
def test_format_docker_needs_a_daemon_whoever_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: tuple[str, ...], instead: str
) -> None:
    error = refused(tmp_path, monkeypatch, "native", *formats)
    assert "no docker daemon answers at unix://" in error.what
    assert "--format docker puts the image into a daemon" in error.why
    assert "there is no socket" in error.why
    assert "systemctl start docker" in error.fix
    assert "--builder" not in error.fix
    assert error.fix.endswith(f"Without a daemon: --format {instead}.")


def test_builder_docker_needs_a_daemon_and_the_other_builder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(tmp_path, monkeypatch, "docker", "oci", "sqsh")
    assert "there is no socket" in error.why
    assert error.fix.endswith("Without a daemon: --builder native.")


def test_builder_and_format_docker_are_both_left_out_without_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(tmp_path, monkeypatch, "docker", "docker", "sqsh")
    assert error.fix.endswith("Without a daemon: --builder native --format sqsh.")
