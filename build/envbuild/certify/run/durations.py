"""How long cases took, for the runner's scheduler. A certificate does not depend on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from envbuild.certify.models import CaseVerdict
from envbuild.certify.run.plan import computed
from envbuild.core.digests import digest_of
from envbuild.store import entry_index
from envbuild.store.local import LocalStore

KIND, FILE = "durations", "duration.json"
# A duration is written again only if it changed by more than this, relative.
LEAST_CHANGE = 0.2


def estimates(plan: Mapping[str, Any], store: LocalStore) -> dict[str, float]:
    """How long the cases of a plan took the last time, in seconds, by ID; without those that never ran."""
    known = {case["id"]: _known(store, _key(plan, case)) for case in plan["cases"]}
    return {case_id: seconds for case_id, seconds in known.items() if seconds is not None}


def record(plan: Mapping[str, Any], verdicts: Iterable[CaseVerdict], store: LocalStore) -> None:
    """Keep how long the cases took that ended well."""
    if not store.is_writable:
        return
    seconds: dict[str, list[float]] = {}
    for verdict in verdicts:
        if verdict.passed and verdict.seconds and verdict.reused is None:
            seconds.setdefault(verdict.id, []).append(verdict.seconds)
    for case in plan["cases"]:
        if case["id"] not in seconds:
            continue
        key, took = _key(plan, case), round(max(seconds[case["id"]]), 2)
        before = _known(store, key)
        if before is None or abs(took - before) > LEAST_CHANGE * before:
            store.rebuild(KIND, key, entry_index.json_writer(FILE, {"seconds": took}))


def _key(plan: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    return digest_of(
        {
            "case": computed(case),
            "model": plan["models"][case["model"]],
            "target": plan["subject"]["target"],
        }
    )


def _known(store: LocalStore, key: str) -> float | None:
    path = store.find(KIND, key)
    if path is None:
        return None
    try:
        seconds = float(entry_index.read_json(path, FILE)["seconds"])
    except (ValueError, TypeError, KeyError):
        return None  # as if it had never run: it is written anew
    return seconds if seconds > 0 else None
