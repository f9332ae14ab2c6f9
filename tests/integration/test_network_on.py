"""`certify --on` where NCCL's log has another network than the cluster's file: refused, whatever the cases computed."""

from __future__ import annotations

import json
import re

import pytest
from helpers.slurm_project import NAME
from integration.test_certify_on import Site, site, virtual  # noqa: F401 - fixtures

SOCKETS = [
    "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
    "NET/IB : No device found.",
    "Using network Socket",
]


@pytest.mark.slow
def test_sockets_where_the_cluster_has_infiniband(site: Site) -> None:  # noqa: F811
    file = site.tool.project / f"envs/clusters/{NAME}.toml"
    file.write_text(f'{file.read_text()}\n[transport]\nnetwork = "NET/IB"\n')
    table = r"network   nodes 0 \(\S+\) and 1 \(\S+\): {}, all_reduce 300, all_gather 300, all_to_all 300 GB/s"
    assert re.search(table.format("NET/IB"), site.certify().stderr)
    (site.storage / "sweeps").write_text(json.dumps({"transports": ["NET/Socket"], "network_log": SOCKETS}))
    failed = site.certify("--json", "--fresh", status=7)
    problems = json.loads(failed.stdout)["error"]["problems"]
    assert {problem["check"] for problem in problems} == {"transport"}
    expected = "ranks communicated by NET/Socket; the cluster's file expects NET/IB. NCCL sees no device"
    assert any(expected in problem["text"] for problem in problems)
    assert re.search(table.format("NET/Socket"), failed.stderr)
