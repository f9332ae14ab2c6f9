"""Jobs for Slurm, as plans and clusters' files give them; plans are documents of a few cases."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from helpers.smoke_plans import case_document, plan_document

from envbuild.catalog import toml
from envbuild.catalog.catalog import Catalog
from envbuild.catalog.cluster import Cluster
from envbuild.launch.slurm.job import NamedCluster, SlurmJob
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.plan.reader import parse_plan

DIGEST = "sha256:" + "5a" * 32
SHIPPED = [name for name in Catalog.shipped().names("clusters") if Catalog.shipped().cluster(name).slurm]
SLURM = 'summary = "s"\nlauncher = "slurm"\nfolder = "/shared"\n'
SIZES = "[slurm]\ntime_limit_minutes = 5\ngpus_per_node = 8\n"


def cluster_of(text: str) -> Cluster:
    """The cluster of a file's text, which begins with that of a file without [slurm]."""
    sizes = SIZES if "[slurm]" not in text else re.sub(r"\[slurm\]\n", SIZES, text)
    return toml.parse(SLURM + (text + "\n" + SIZES if "[slurm]" not in text else sizes), Cluster, "mine.toml")


def plan_of(target: str = "cpu", nodes: int = 2, form: str = "sqsh", **layout: int) -> Plan:
    """A plan of a baseline and a case over some nodes, for an image."""
    document = plan_document(case_document("base"), case_document("case", "base", **(layout or {"data": nodes})))
    document["nodes"] = document["cases"][1]["nodes"] = nodes
    document["subject"] = {"target": target, "form": form, "oci_digest": DIGEST, "sqsh_digest": DIGEST}
    if target != "cpu":
        document |= {"device": "cuda", "gpu": {"sm": ["90"]}}
    return parse_plan(json.dumps(document).encode())


def job_of(cluster: Cluster, folder: str = "/shared/run", **plan: Any) -> SlurmJob:
    """The job of such a plan."""
    return NamedCluster(name="mine", cluster=cluster).job(plan_of(**plan), folder)


def shipped_job(name: str) -> SlurmJob:
    """A job of two nodes on a shipped cluster, to which its folder was added."""
    cluster = Catalog.shipped().cluster(name).model_copy(update={"folder": "/shared"})
    return job_of(cluster, target=(cluster.targets or ("h100",))[0])


def plan_folder(folder: Path, plan: Plan) -> Path:
    """The folder of a plan."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_bytes(plan.content)
    return folder
