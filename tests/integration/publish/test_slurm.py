"""Prolog and hook under a real Slurm. The step runs enroot's hook in the place of pyxis, which is not packaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import shared_folder
from helpers.publish_world import PublishWorld, make_publish_world
from helpers.slurm_cluster import Cluster, slurm_cluster, slurm_programs
from helpers.slurm_scripts import SiteScripts, install_scripts

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Site:
    """A cluster with the scripts, and a user's folder with a verified image, ``nemo.sqsh``."""

    cluster: Cluster
    scripts: SiteScripts
    world: PublishWorld
    home: Path

    def srun(self, image: str, *, oci_digest: str = "", **variables: str) -> tuple[int, str, bool]:
        """The exit code of a job's only step, what its user sees, and whether the step began.

        Args:
            image: --container-image; empty: without it.
            oci_digest: of the image that the container is made of; empty: that of the verified one.
        """
        container = self.home / "container"
        (container / "etc").mkdir(parents=True, exist_ok=True)
        digest = oci_digest or self.world.image.record.oci_digest
        (container / "etc/rc").write_text(f"# enroot-provenance: oci:{digest}\n")
        began = self.home / "began"
        began.unlink(missing_ok=True)
        option = [f"--container-image={image}"] if image else []
        script = f'touch "{began}" && ENROOT_ROOTFS="{container}" "{self.scripts.hook}"'
        # Notes are by the job's number, and each worker's cluster begins with the same ones.
        own = {"TMPDIR": str(self.home), **variables}
        done = self.cluster.run("srun", *option, "sh", "-c", script, cwd=self.home, **own)
        return done.returncode, done.stderr, began.exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    # Sockets may have names of 107 bytes.
    folder = tmp_path_factory.mktemp("slurm")
    world = make_publish_world(folder / "project")
    scripts = install_scripts(folder / "site", world.project / "trust.toml")
    home = folder / "home"
    home.mkdir()
    (home / "nemo.sqsh").write_bytes(world.image.sqsh().read_bytes())
    (home / "nemo.sqsh.intoto.jsonl").write_bytes(world.certify().read_bytes())
    programs = slurm_programs(shared_folder(tmp_path_factory) / "slurm")
    with scripts.settings.open("a") as settings:
        for name, value in programs.environment.items():
            settings.write(f"export {name}='{value}'\n" if name != "PATH" else f"PATH=$PATH:'{value}'\n")
    with slurm_cluster(programs, folder / "cluster", scripts.prolog) as cluster:
        yield Site(cluster, scripts, world, home)


@pytest.mark.parametrize("image", ["{home}/nemo.sqsh", "./nemo.sqsh"])
def test_a_verified_image_starts(site: Site, image: str) -> None:
    code, printed, began = site.srun(image.format(home=site.home))
    assert (code, began) == (0, True), printed


def test_the_hook_refuses_another_image_in_that_job(site: Site) -> None:
    code, printed, began = site.srun("./nemo.sqsh", oci_digest=f"sha256:{'0' * 64}")
    assert (code, began) == (1, True)
    assert "nor Slurm's prolog has verified its image for this step" in printed


@pytest.mark.parametrize("image", ["{home}/e#vil.sqsh", ".evil.sqsh", "{home}/a://evil.sqsh", "./e vil.sqsh"])
def test_another_path_cancels_the_job_and_its_user_sees_why(site: Site, image: str) -> None:
    image = image.format(home=site.home)
    place = site.home / image
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(b"another image")
    Path(f"{place}.intoto.jsonl").write_bytes((site.home / "nemo.sqsh.intoto.jsonl").read_bytes())
    code, printed, began = site.srun(image)
    assert (code, began) == (1, False)
    assert "envbuild cancels this job. Cause: " in printed
    assert f"{image} has no certificate that counts here" in printed


def test_a_batch_job_leaves_the_cause_in_its_comment(site: Site) -> None:
    (site.home / "job.sh").write_text(f"#!/bin/sh\ntouch {site.home}/began\n")
    (site.home / "began").unlink(missing_ok=True)
    done = site.cluster.run(
        "sbatch", "--wait", "--parsable", "--container-image=./missing.sqsh", "job.sh", cwd=site.home
    )
    assert not (site.home / "began").exists()
    job = site.cluster.run("scontrol", "show", "job", done.stdout.strip(), cwd=site.home).stdout
    assert "JobState=CANCELLED" in job
    assert f"AdminComment=envbuild: cancelled. Cause: {site.home}/./missing.sqsh or its certificate" in job


def test_each_task_of_an_array_is_cancelled(site: Site) -> None:
    (site.home / "job.sh").write_text(f"#!/bin/sh\ntouch {site.home}/began\n")
    (site.home / "began").unlink(missing_ok=True)
    done = site.cluster.run(
        *("sbatch", "--wait", "--parsable", "--array=0-1%1", "--container-image=./missing.sqsh", "job.sh"),
        cwd=site.home,
    )
    assert not (site.home / "began").exists()
    tasks = site.cluster.run("scontrol", "show", "job", done.stdout.strip(), cwd=site.home).stdout
    assert tasks.count("JobState=CANCELLED") == 2
    assert tasks.count("AdminComment=envbuild: cancelled. Cause: ") == 2


def test_the_hook_refuses_what_came_by_the_variable(site: Site) -> None:
    code, printed, began = site.srun("", PYXIS_CONTAINER_IMAGE=f"{site.home}/nemo.sqsh")
    assert (code, began) == (1, True)
    assert "PYXIS_CONTAINER_IMAGE names a path" in printed


def test_no_node_is_drained(site: Site) -> None:
    site.srun("./missing.sqsh")
    states = site.cluster.run("sinfo", "--noheader", "--format=%T", cwd=site.home).stdout.split()
    assert states
    assert not {"drained", "draining", "down"} & set(states)
