"""Real builders of Dockerfiles (docker's classic one, BuildKit, podman), and where their steps get packages from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from helpers.docker_daemon import Daemon
from helpers.simple_index import SimpleIndex

# Nested in a container of this machine, podman may neither raise limits nor use crun with two versions of cgroups.
PODMAN_RUN = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")


@dataclass(frozen=True, kw_only=True)
class Image:
    """A built image, and what runs programs in it."""

    program: tuple[str, ...]
    environment: Mapping[str, str]
    run_options: tuple[str, ...]
    tag: str

    def _call(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.program, *words], env=dict(self.environment), capture_output=True, text=True)

    def run(self, argv: Sequence[str], mounted: Mapping[Path, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program in a container without a network."""
        mounts = [word for path, place in (mounted or {}).items() for word in ("-v", f"{path}:{place}:ro")]
        return self._call("run", "--rm", "--network", "none", *self.run_options, *mounts, self.tag, *argv)

    def config(self) -> dict[str, Any]:
        """How its containers start."""
        found: dict[str, Any] = json.loads(self._call("image", "inspect", self.tag).stdout)[0]["Config"]
        return found

    def described(self) -> str:
        """All that the builder keeps with the image."""
        return self._call("image", "inspect", self.tag).stdout + self._call("history", "--no-trunc", self.tag).stdout


@dataclass(frozen=True, kw_only=True)
class Builder:
    """A program that builds Dockerfiles."""

    program: tuple[str, ...]
    environment: Mapping[str, str]
    build_options: tuple[str, ...] = ()
    run_options: tuple[str, ...] = ()

    def build(self, folder: Path, tag: str, **arguments: str) -> Image:
        """Build a folder; its steps reach this machine's loopback."""
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        words = [*self.program, "build", "--network", "host", *self.build_options, *given, "--tag", tag, str(folder)]
        done = subprocess.run(words, env=dict(self.environment), capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return Image(program=self.program, environment=self.environment, run_options=self.run_options, tag=tag)


def docker_builder(daemon: Daemon, *, buildkit: bool) -> Builder:
    """docker's command line of the daemon's own version, where that was unpacked, else this machine's."""
    environment = {**os.environ, **daemon.programs, "DOCKER_HOST": daemon.host, "DOCKER_BUILDKIT": str(int(buildkit))}
    return Builder(program=(_docker_of_its_dockerd(environment),), environment=environment)


def podman_builder(folder: Path, programs: Mapping[str, str]) -> Builder:
    """podman with images of its own; installed where it is missing and this account may."""
    if shutil.which("podman") is None:
        install = ["apt-get", "install", "-qq", "-y", "--no-remove", "--no-install-recommends", "podman"]
        subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, **programs}
    options = ["--root", str(folder / "root"), "--runroot", str(folder / "run"), "--cgroup-manager", "cgroupfs"]
    options += ["--runtime", _found("runc", environment)]
    return Builder(
        program=("podman", *options),
        environment=environment,
        build_options=("--isolation", "chroot", "--layers=false"),
        run_options=PODMAN_RUN,
    )


def _docker_of_its_dockerd(environment: Mapping[str, str]) -> str:
    """A newer docker elsewhere on PATH has no BuildKit of its own, and asks for a plugin that may not be there."""
    version = _version(_found("dockerd", environment))
    places = [Path(folder) / "docker" for folder in environment["PATH"].split(os.pathsep)]
    same = [str(place) for place in places if os.access(place, os.X_OK) and _version(place) == version]
    return same[0] if same else _found("docker", environment)


def _version(program: str | Path) -> str:
    return subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.partition(",")[0]


def _found(name: str, environment: Mapping[str, str]) -> str:
    path = shutil.which(name, path=environment["PATH"])
    assert path is not None, f"{name} is not installed"
    return path


def add_locked_wheels(index: SimpleIndex, uv_lock: Path, folder: Path) -> None:
    """Put the wheels that a uv.lock names on an index that steps of a build reach without a certificate."""
    for package in tomlkit.parse(uv_lock.read_text())["package"]:
        for url in (wheel["url"] for wheel in package.get("wheels", ()) if "url" in wheel):
            file = folder / url.rpartition("/")[2]
            with urllib.request.urlopen(url) as answer:
                file.write_bytes(answer.read())
            index.add(file, None)


def apt_mirror() -> str:
    """The mirror of this machine's distribution, from its apt sources."""
    words = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    addresses = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return min(addresses, key=len).rstrip("/")
