"""The output of ``envbuild lock``: a summary for people, or everything with ``--json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envbuild.cli.common import Session
from envbuild.core.digests import Json, short
from envbuild.core.text import shown
from envbuild.lock.known_wrong import as_json, known_wrong_in, warning_of
from envbuild.lock.lock import LockResult
from envbuild.lock.lockfile import RECORD_FILE

if TYPE_CHECKING:
    from envbuild.lock.verification import VerifiedLock


# What the JSON object has of the record.
STATED = {"stack", "digest", "exempt", "deviations", "verified_in", "stubbed", "warnings", "driver", "torch"}


def print_lock(session: Session, result: LockResult) -> None:
    """Print a lock, and what its verification showed."""
    lock, path, verified = result.directory.lock, result.directory.path, result.verified
    count = sum(phase.packages for phase in lock.phases.values())
    places = {"find-links": "found in find-links", "torch-index": "found on the index of torch builds"}
    torch = (
        "no torch"
        if not lock.torch.version
        else f"torch {lock.torch.version} ({places.get(lock.torch.found_in, 'the package index has it')})"
    )
    state = "locked" if result.built else "nothing to do: already locked"
    title = f"{state} as of {lock.inputs.as_of}: {lock.stack} on {lock.base.name}"
    lines = [f"{title}, {count} packages, {torch}, lock {short(lock.digest)}"]
    lines += [f"  exempt from the as-of moment: {name} {why}" for name, why in lock.exempt.items()]
    lines += [f"  deviation: {text}" for text in lock.deviations]
    lines += _warnings(lock.warnings)
    wrong = known_wrong_in(result.directory, session.catalog)
    lines += [f"  warning: {warning_of(entry, result.directory)}" for entry in wrong.values()]
    lines += ["  why, and how it is known: envbuild list conflicts"] if wrong else []
    for name, component in lock.components.items():
        at = f" at {component.commit[:12]}" if component.commit else ""
        lines.append(f"  {name} {component.version}{at}  [{component.because}]")
    before = [f"verified in: {lock.verified_in}"] if lock.verified_in else []
    verification = _verified(verified) if verified else before
    session.done(
        {
            "built": result.built,
            "path": str(path),
            **lock.model_dump(mode="json", include=STATED),
            "base": lock.base.name,
            "as_of": lock.inputs.as_of,
            "known_wrong": [as_json(name, entry) for name, entry in wrong.items()],
            "components": {name: component.version for name, component in lock.components.items()},
            "packages": {name: phase.packages for name, phase in lock.phases.items()},
            "verified": _verified_json(verified) if verified else None,
        },
        *lines,
        *verification,
        shown(path),
    )


# More warnings are only counted: the record has all of them.
MOST_WARNINGS = 5


def _warnings(warnings: tuple[str, ...]) -> list[str]:
    """For people: the first of the findings that refuse nothing."""
    lines = [f"  warning: {text}" for text in warnings[:MOST_WARNINGS]]
    more = len(warnings) - len(lines)
    return [*lines, f"  {more} more warnings in {RECORD_FILE}"] if more else lines


def _verified(verified: VerifiedLock) -> list[str]:
    """For people: what `--verify` found."""
    return [
        f"verified in: {verified.where}",
        *([f"compiled modules replaced by stubs: {', '.join(verified.stubbed)}"] if verified.stubbed else []),
        f"imported: {', '.join(verified.imported) or 'nothing'}",
        *[f"not checked: {text}" for text in verified.not_checked],
        *[f"let pass: {finding.what}" for finding in verified.findings],
    ]


def _verified_json(verified: VerifiedLock) -> dict[str, Json]:
    return {
        "where": verified.where,
        "imported": list(verified.imported),
        "not_checked": list(verified.not_checked),
        "stubbed": list(verified.stubbed),
        "failed": [
            {"code": finding.code, "what": finding.what, "packages": list(finding.packages)}
            for finding in verified.findings
        ],
    }
