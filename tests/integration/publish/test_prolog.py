"""Slurm's Prolog: a job with a verified .sqsh starts, another one is cancelled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.publish_world import PublishWorld

PROLOG = Path(__file__).parents[3] / "containers/slurm/prolog.sh"
OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_image"


@pytest.fixture
def sqsh(world: PublishWorld) -> Path:
    """A .sqsh with its certificate next to it."""
    file = world.image.sqsh()
    Path(f"{file}.intoto.jsonl").write_bytes(world.certify().read_bytes())
    return file


def prolog(world: PublishWorld, image: str) -> tuple[int, str, bool]:
    """The exit status, what it printed, and whether the job was cancelled."""
    programs, cancelled = world.project / "bin", world.project / "cancelled"
    programs.mkdir(exist_ok=True)
    for name, body in (
        ("envbuild", f'exec "{sys.executable}" -m envbuild "$@"'),
        ("scancel", f'echo "$1" > "{cancelled}"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "ENVBUILD_TRUST": str(world.project / "trust.toml"),
        OPTION: image,
    }
    done = subprocess.run(["sh", PROLOG], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, cancelled.is_file() and cancelled.read_text() == "7\n"


def test_a_verified_image_starts(world: PublishWorld, sqsh: Path) -> None:
    assert prolog(world, str(sqsh)) == (0, "", False)


@pytest.mark.parametrize("image", ["", "registry.example.org#team/nemo:mcore-h200", "docker://nemo:1", "nemo:1"])
def test_an_image_of_a_registry_is_the_importers(world: PublishWorld, image: str) -> None:
    assert prolog(world, image) == (0, "", False)


def test_another_file_cancels_the_job(world: PublishWorld, sqsh: Path) -> None:
    with sqsh.open("ab") as stream:
        stream.write(b"changed")
    status, printed, cancelled = prolog(world, str(sqsh))
    assert (status, cancelled) == (0, True)
    assert "no certificate that counts" in printed
    Path(f"{sqsh}.intoto.jsonl").unlink()
    assert prolog(world, str(sqsh))[2]
