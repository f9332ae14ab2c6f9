"""The first line of the results: what ran, where, and what is not as the lock says."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envbuild_smoke import __version__, environment, machine
from envbuild_smoke.installed import Finding
from envbuild_smoke.plan import Plan
from envbuild_smoke.ranks import zipapp_path
from envbuild_smoke.results import SCHEMA
from envbuild_smoke.strangers import ListedFiles

if TYPE_CHECKING:
    from envbuild_smoke.runner import Options


def make(
    plan: Plan,
    options: "Options",
    ready: Mapping[str, Any],
    files: Sequence[Finding],
    listed: ListedFiles,
    started_at: str,
    devices: Sequence[int],
    unusable: str | None,
) -> dict[str, Any]:
    """Return the line; `ready` is what the template reported, empty if it did not come to that."""
    findings = environment.all_findings(plan, ready, files, listed, options.image)
    if unusable is not None:
        findings.append({"code": "unusable", "package": None, "expected": None, "found": unusable})
    gpus = options.gpus
    image = options.image
    return {
        "schema": SCHEMA,
        "type": "run",
        "plan_digest": plan.digest,
        "nonce": plan.nonce,
        "subject": dict(plan.subject),
        "smoke_version": __version__,
        "smoke_digest": smoke_digest(),
        "started_at": started_at,
        "environment": environment.describe(plan.device, ready.get("modules", {}), gpus),
        "environment_findings": findings,
        "machine": machine.describe(plan.device, gpus, options.variables, ready.get("versions", {})),
        "image": None if image is None else dict(image),
        "isolation": options.isolation,
        "devices": [gpus[device].index if gpus else device for device in devices],
    }


def smoke_digest() -> str | None:
    """Return "sha256:..." of the zipapp this runs from, or None when it runs from its sources."""
    path = zipapp_path()
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest() if path else None
