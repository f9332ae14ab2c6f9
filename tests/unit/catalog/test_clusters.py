"""Files of clusters: what is shipped, what a project adds to it, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from helpers.slurm_jobs import SHIPPED, cluster_of

from envbuild.catalog.catalog import Catalog
from envbuild.cli.main import run
from envbuild.core.errors import ConfigurationError

CATALOG = Catalog.shipped()
# Who made the machines, or wrote what opens images on them.
VENDORS = re.compile(r"https://(github\.com/(GoogleCloudPlatform|aws-samples|NVIDIA)|docs\.nvidia\.com)/")


def write(project: Path, name: str, text: str) -> None:
    path = project / "envs/clusters" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_clusters_that_people_ask_for_are_shipped():
    assert {*SHIPPED} >= {"plain", "dgx-ib", "a3-high", "a3-mega", "a3-ultra", "a4", "p5-efa"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_cluster_says_where_it_is_from_and_lacks_what_only_a_site_knows(name):
    cluster = CATALOG.cluster(name)
    assert VENDORS.match(cluster.source or "")
    assert (cluster.folder, cluster.login, cluster.never_run) == (None, None, True)
    assert cluster.transport is not None
    known = set(CATALOG.names("targets"))
    assert {*cluster.targets, *cluster.floors} <= known


def test_two_lines_make_a_shipped_cluster_ones_own(tmp_path):
    write(tmp_path, "a3-mega", 'extends = "a3-mega"\nfolder = "/shared/envbuild"\n[slurm]\npartition = "mine"\n')
    mine, shipped = Catalog.open(tmp_path).cluster("a3-mega"), CATALOG.cluster("a3-mega")
    assert mine.slurm is not None
    assert (mine.folder, mine.slurm.partition, mine.slurm.gpus_per_node) == ("/shared/envbuild", "mine", 8)
    assert mine.transport == shipped.transport


def test_list_tells_what_was_never_run(tmp_path, monkeypatch, capsys):
    write(tmp_path, "mine", 'extends = "dgx-ib"\nevidence = "certified there in November"\nfolder = "/f"\n')
    write(tmp_path, "broken", 'extends = "dgx-ibb"\n')
    monkeypatch.chdir(tmp_path)
    assert run(["list", "clusters"]) == 3
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    rows = {line.split()[0]: after for line, after in zip(lines, [*lines[1:], ""], strict=True)}
    assert [rows[name].strip() == "never run here" for name in ("plain", "mine", "local")] == [True, False, False]
    assert "there is no cluster 'dgx-ibb'" in shown.err
    assert "Did you mean 'dgx-ib'?" in shown.err
    assert run(["list", "clusters", "--json"]) == 3
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["clusters"]}
    assert (rows["mine"]["never_run"], rows["mine"]["extends"], rows["plain"]["launcher"]) == (False, "dgx-ib", "slurm")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('login = "-oProxyCommand=id"', "login"),
        ('login = "a b"', "login"),
        ('[slurm]\npartition = "a b"', "slurm.partition"),
        ('[slurm]\naccount = "x\\n#SBATCH --uid=0"', "slurm.account"),
        ('[slurm]\nnodelist = "$(id)"', "slurm.nodelist"),
        ('[slurm]\nruntime = "bwrap"', "python"),
        ('[slurm]\npython = "/usr/bin/python3"', "python"),
        ('[slurm]\ndirectives = [{ line = "--x", reason = "" }]', "slurm.directives[0].reason"),
        ('[slurm]\ndirectives = [{ line = "rm -rf /", reason = "r" }]', "slurm.directives[0].line"),
        ('[transport]\nnetwork = "NET/IB"\nvariables = { PATH = ["/x"] }', "PATH would be the batch script's too"),
        ("[slurm]\ndirectives = [{ line = '--comment=\"a b', reason = 'r' }]", "has quotes that do not end"),
        ('[slurm]\ndirectives = [{ line = "--array=1-3", reason = "r" }]', "no --array and no --wait"),
        ('[slurm]\ndirectives = [{ line = "--x\\nid", reason = "r" }]', "slurm.directives[0].line"),
        ('[mounts.data]\nsource = "/a,/b"', "mounts.data.source"),
        ('[mounts.data]\nsource = "/$(id)"', "mounts.data.source"),
        ('[mounts.data]\nsource = "/a"\ntarget = "b"', "mounts.data.target"),
        ('[mounts.home]\nsource = "/home"', "home"),
        ('[image]\nby = "sbcast"', "node_folder"),
        ('[image]\nby = "importer"', "repository"),
        ('[image]\nby = "importer"\nrepository = "registry.example.org/team/nemo"', "image.repository"),
        ('[image]\nfolder = "images"', "image.folder"),
        ('[transport]\nnetwork = "IB"', "transport.network"),
        ('[transport]\nnetwork = "NET/IB"\n[transport.variables]\n"A B" = ["x"]', "A B"),
        ('[transport]\nnetwork = "NET/IB"\n[transport.variables]\nA = "x"', "transport.variables.A"),
        ('[transport]\nnetwork = "NET/IB"\n[transport.variables]\nA = []', "transport.variables.A"),
        ('[transport]\nnetwork = "NET/IB"\n[transport.variables]\nA = ["x\\ny"]', "transport.variables.A"),
        ('[transport]\nnetwork = "NET/IB"\n[transport.variables]\nA = [\'"x"\']', "transport.variables.A"),
        ("[floors.h200.node]\nall_reduce = 0", "floors.h200.node.all_reduce"),
        ("[floors.h200.node]\nreduce = 1", "reduce"),
    ],
)
def test_what_is_refused_is_named(text, named):
    with pytest.raises(ConfigurationError) as caught:
        cluster_of(text)
    assert named in caught.value.why


def test_a_scheduler_and_its_table_need_each_other(tmp_path):
    write(tmp_path, "mine", 'summary = "s"\nlauncher = "slurm"\n')
    with pytest.raises(ConfigurationError, match="1 thing") as caught:
        Catalog.open(tmp_path).cluster("mine")
    assert "launcher slurm needs [slurm]" in caught.value.why
