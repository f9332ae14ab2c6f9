"""Plans for the smoke runner, as the documents they are in plan.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from envbuild_smoke.plan.axes import Layout, Settings, Training
from envbuild_smoke.plan.json_reader import as_json
from envbuild_smoke.plan.models import Case

Document = dict[str, Any]


def case_document(case_id: str, baseline: str | None = None, *, overlap: bool = False, **layout: int) -> Document:
    """A case; ``layout`` holds the parallel sizes that are not 1."""
    split = Layout(**layout)
    training = {"steps": 5, "micro_batch_size": 2, "global_batch_size": 16, "learning_rate": 0.001}
    case = Case(
        id=case_id,
        baseline=baseline,
        driver="mcore",
        model="gpt",
        layout=split,
        world_size=split.world_size,
        training=Training(**training, clip_grad_norm=1.0, seed=1234),
        settings=Settings(overlap_p2p_comm=overlap, batch_p2p_comm=not overlap, attention_backend="local"),
        compare_weights=False,
        compare_reference=False,
        perturbed_runs=0,
        time_limit_seconds=120,
        home_node=None,
    )
    return as_json(case)


def read_results(out: Path) -> list[Document]:
    """The lines of the results of a run."""
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def plan_document(*cases: Document) -> Document:
    """A plan of these cases on the CPU."""
    return {
        "schema": "envbuild.plan/4",
        "nonce": "0123456789abcdef" * 2,
        "subject": {"stack": "mcore", "target": "cpu"},
        "device": "cpu",
        "gpu": None,
        "expected_versions": {},
        "expected_modules": [],
        "repeats": 1,
        "bandwidth": None,
        "models": {
            "gpt": {
                "kind": "gpt",
                "num_layers": 4,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_query_groups": 4,
                "sequence_length": 64,
                "vocabulary_size": 512,
                "normalization": "LayerNorm",
                "layer_spec": "local",
                "moe": None,
                "mamba": None,
            }
        },
        "cases": list(cases),
    }
