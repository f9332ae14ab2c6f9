"""`certify --on` a cluster behind a login host: everything that it needs of Slurm and of the storage goes by ssh."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool, shared_folder
from helpers.mini import NAME as STACK
from helpers.programs import path_without
from helpers.slurm_cluster import Cluster, slurm_cluster, slurm_programs
from helpers.slurm_project import NAME, stepping_runner, write_cluster
from helpers.ssh_server import HOST, SshServer, ssh_server, sshd_program

from envbuild.certify.run import job
from envbuild.launch.slurm.run_folder import RunFolder

CERTIFY = ("certify", "--stack", STACK, "--target", "cpu", "--only", "gpt-fp32-tp2", "--in", "sqsh")
SLURM = ("sbatch", "squeue", "scontrol", "sinfo", "scancel", "sacctmgr")


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(slurm_programs(shared_folder(tmp_path_factory) / "slurm"), folder / "c", nodes=2) as running:
        yield running


@pytest.fixture
def server(virtual: Cluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """A login host whose profile prints, and knows where Slurm is."""
    home = tmp_path / "home"
    home.mkdir()
    variables = virtual.environment
    lines = [f"export {name}='{value}'" for name, value in variables.items()]
    (home / ".profile").write_text("\n".join(["echo 'Welcome. Job 12 is yours.'", *lines, ""]))
    sshd = sshd_program(shared_folder(tmp_path_factory) / "sshd")
    with ssh_server(sshd, tmp_path / "server", {"HOME": str(home)}) as running:
        yield running


@pytest.fixture
def tool(
    mini: Tool, mini_image: dict[str, Any], server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Tool:
    """A project on a machine without Slurm, whose cluster has a login host."""
    project = tmp_path / "project"
    subprocess.run(["cp", "-a", mini.project, project], check=True)
    storage = tmp_path / "storage"
    storage.mkdir()
    write_cluster(project, storage)
    file = project / f"envs/clusters/{NAME}.toml"
    file.write_text(f'login = "{HOST}"\n{file.read_text()}')
    runner = stepping_runner(tmp_path, storage)
    monkeypatch.setattr(job, "smoke_file", lambda _store: runner)
    path = f"{server.programs}:{path_without(tmp_path / 'programs', *SLURM)}"
    return Tool(project, mini.cache, {**mini.env, "PATH": path})


def test_a_job_is_certified_and_signed_and_the_key_stays_here(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool.run("certificate", "keygen", "--out", "keys")
    secret = (tool.project / "keys/envbuild.key").read_bytes()
    there: list[Path] = []

    def look(folder: RunFolder) -> None:
        # Before it is removed: all that was ever there.
        there.extend(path for path in (tmp_path / "storage").rglob("*") if path.is_file())
        assert all(secret.strip() not in path.read_bytes() for path in there)
        removed(folder)

    removed = RunFolder.remove
    monkeypatch.setattr(RunFolder, "remove", look)
    done = tool.run(*CERTIFY, "--on", NAME, "--nodes", "2", "--key", "keys/envbuild.key", "--json")
    result = json.loads(done.stdout)
    assert (result["ran"], result["written"]) == (True, True)
    # The token's file is gone with the job.
    assert {"plan.json", "smoke.pyz"} <= {path.name for path in there}
    trust = tool.project / "trust.toml"
    trust.write_text(f'[keys.lab]\nfile = "{tool.project}/keys/envbuild.pub"\n')
    tool.run("certificate", "verify", result["certificate"], "--trust", trust)
    left = [path.name for path in (tmp_path / "storage").rglob("*.*") if path.suffix not in (".lock", ".sqsh")]
    assert left == []


def test_a_refused_key_ends_it_before_anything_is_copied(tool: Tool, server: SshServer, tmp_path: Path) -> None:
    (server.folder / "authorized").write_text((server.folder / "stranger.pub").read_text())
    done = tool.run(*CERTIFY, "--on", NAME, "--nodes", "2", status=8)
    assert f"ssh to {HOST} failed" in done.stderr
    assert "Permission denied (publickey)" in done.stderr
    assert list((tmp_path / "storage").iterdir()) == []
