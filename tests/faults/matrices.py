"""The matrices that show the faults: written for what is to be run, from ``matrix.toml`` and the catalogue."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tomlkit
from faults.kinds import Fault

from envbuild_smoke.plan.axes import Training, axes

SHARED = Path(__file__).with_name("matrix.toml")


def matrix_of(faults: Iterable[Fault], shared: Path = SHARED, **settings: object) -> str:
    """A matrix with the cases of these faults and their baselines; ``settings`` replace what is in the file."""
    document = tomlkit.parse(shared.read_text()).unwrap()
    document.update(settings)
    kinds = document["models"]
    rows: list[dict[str, object]] = []
    models = {}
    for fault in faults:
        models[fault.model] = kinds[fault.case.kind]
        row = {"model": fault.model, **fault.case.row}
        # What decides the mathematics, a baseline has too.
        common = {"model", "precision", *(axis.name for axis in axes(Training))} - {"micro_batch_size"}
        baseline = {name: value for name, value in row.items() if name in common}
        rows += [wanted for wanted in (baseline, row) if wanted not in rows]
    return tomlkit.dumps({**document, "models": models, "cases": rows})
