"""`certify --on` over hosts with networks and mounts of their own: one that is not as the others is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import shared_folder
from helpers.slurm_cluster import Cluster, slurm_cluster, slurm_programs
from helpers.slurm_project import write_cluster
from helpers.virtual_hosts import Host, virtual_hosts
from integration.test_certify_on import Site, site  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, ...]]:
    with virtual_hosts(2) as running:
        yield running


@pytest.fixture(scope="module")
def virtual(hosts: tuple[Host, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    programs = slurm_programs(shared_folder(tmp_path_factory) / "slurm")
    with slurm_cluster(programs, folder / "c", hosts=hosts) as running:
        yield running


@pytest.fixture
def other(hosts: tuple[Host, ...]) -> Iterator[Host]:
    """The host that is not node 0 of a job, without what a test mounted there."""
    before = mounts(hosts[1])
    yield hosts[1]
    for target in reversed(mounts(hosts[1])[len(before) :]):
        hosts[1].run("umount", "--lazy", target)


def mounts(host: Host) -> list[str]:
    return [line.split()[4] for line in Path(f"/proc/{host.holder.pid}/mountinfo").read_text().splitlines()]


def test_host_with_another_image(site: Site, other: Host, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    site.certify()
    (placed,) = (site.storage / "images").glob("*.sqsh")
    changed = site.storage / "changed.sqsh"
    changed.write_bytes(placed.read_bytes() + bytes(4096))
    other.run("mount", "--bind", changed, placed)
    # The real runner.
    monkeypatch.undo()
    printed = site.certify("--fresh", status=8).stderr
    assert "node 1: --image /envbuild/image.sqsh is sha256:" in printed
    assert f"and the plan is for sha256:{placed.stem}" in printed


def test_host_without_the_shared_folder(site: Site, other: Host) -> None:  # noqa: F811
    other.run("mount", "-t", "tmpfs", "none", site.storage)
    printed = site.certify(status=8).stderr
    assert f"n2 does not have {site.storage}/runs/" in printed
    assert "/smoke.pyz: it must lie on storage that all nodes share" in printed


def test_host_whose_disk_is_full(site: Site, other: Host, tmp_path: Path) -> None:  # noqa: F811
    disk = tmp_path / "disk"
    disk.mkdir()
    other.run("mount", "-t", "tmpfs", "-o", "size=64k", "none", disk)
    write_cluster(site.tool.project, site.storage, image={"by": "sbcast", "node_folder": str(disk)})
    printed = site.certify(status=8).stderr
    assert "sbcast: error: REQUEST_FILE_BCAST(n2)" in printed
    assert f"the image was not copied to {disk} of each node: it may be full, or not there" in printed
