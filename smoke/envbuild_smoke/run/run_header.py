"""The first line of the results: what ran, where, and the differences from the lock."""

import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence

from envbuild_smoke import __version__
from envbuild_smoke.environment import gpus, machine
from envbuild_smoke.environment.findings import all_findings
from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.environment.imported import Ready
from envbuild_smoke.environment.inventory import describe
from envbuild_smoke.results import Finding, NodeState, RunLine
from envbuild_smoke.run.context import RunContext
from envbuild_smoke.run.forkserver import rank_variables, zipapp_path


def run_line(context: RunContext, devices: Sequence[int], node: NodeState) -> RunLine:
    """Return the line; `node` is what runs on this one."""
    plan = context.plan
    return RunLine(
        **vars(node),
        plan_digest=plan.digest,
        nonce=plan.nonce,
        subject=plan.subject,
        smoke_version=__version__,
        smoke_digest=smoke_digest(),
        started_at=context.started_at,
        isolation=context.options.isolation,
        devices=context.device_ids(devices),
    )


def node_state(
    context: RunContext,
    ready: Ready,
    files: Sequence[Finding],
    listed: ListedFiles,
    unusable: str | None,
) -> NodeState:
    """Return what runs here; `ready` is what the fork server reported, bare when it could not import the libraries."""
    plan, options = context.plan, context.options
    findings = all_findings(plan, ready, files, listed, options.image)
    if unusable is not None:
        findings.append(Finding("unusable", None, None, unusable))
    variables = {**rank_variables(plan.device), **options.variables}
    return NodeState(
        host=host_name(),
        environment=describe(plan.device, ready.modules, options.gpus),
        environment_findings=tuple(findings),
        machine=machine.describe(options.gpus, variables, ready.versions),
        image=options.image,
        free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        gpu_states=tuple(gpus.states(options.gpus)),
    )


def host_name() -> str:
    """Return what people call this node: Slurm's name of it, which `scontrol` takes, else the machine's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def smoke_digest() -> str | None:
    """Return "sha256:..." of the zipapp this runs from, or None when it runs from its sources."""
    path = zipapp_path()
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest() if path else None
