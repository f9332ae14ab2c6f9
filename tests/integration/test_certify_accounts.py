"""`certify --on` where Slurm keeps accounts: a job that its controller has forgotten."""

from __future__ import annotations

import getpass
from collections.abc import Iterator

import pytest
from conftest import shared_folder
from helpers.processes import wait_until
from helpers.slurm_accounting import accounting_programs
from helpers.slurm_cluster import Cluster, slurm_cluster, slurm_programs
from helpers.slurm_project import NAME, record_of, write_cluster
from integration.test_certify_on import Site, hold, site  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, shared = tmp_path_factory.mktemp("slurm"), shared_folder(tmp_path_factory)
    programs, database = slurm_programs(shared / "slurm"), accounting_programs(shared / "slurmdbd")
    with slurm_cluster(programs, folder / "c", nodes=2, keeps_accounts=database) as running:
        for words in (["account", "lab"], ["user", getpass.getuser(), "account=lab"]):
            running.run("sacctmgr", "--immediate", "add", *words, cwd=folder)
        yield running


@pytest.mark.slow
def test_accounts_tell_how_a_forgotten_job_ended(site: Site) -> None:  # noqa: F811
    hold(site)
    with site.started() as process:
        number = record_of(site.out)["job"]
        process.kill()
        process.wait()
    site.slurm("scancel", number)
    wait_until(lambda: not site.slurm("squeue", "--noheader", "--states=all", "--format=%i").split(), 120)
    printed = site.certify("--judge", number, status=8).stderr
    assert f"job {number} on {NAME} ended before its cases did: it was cancelled" in printed


@pytest.mark.slow
def test_unknown_account_lists_those_of_the_user(site: Site) -> None:  # noqa: F811
    write_cluster(site.tool.project, site.storage, account="other")
    printed = site.certify(status=8).stderr
    assert "Slurm refuses the job" in printed
    assert "Your accounts there are lab" in printed
