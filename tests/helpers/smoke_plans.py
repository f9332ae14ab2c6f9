"""Plans for the smoke runner, as the documents they are in plan.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def case_document(case_id: str, baseline: str | None = None, *, overlap: bool = False, **layout: int) -> Document:
    """A case; ``layout`` holds the parallel sizes that are not 1."""
    sizes = {"data": 1, "tensor": 1, "pipeline": 1, "virtual_pipeline": 1, "context": 1, "expert": 1, **layout}
    return {
        "id": case_id,
        "baseline": baseline,
        "driver": "mcore",
        "model": "gpt",
        "precision": "fp32",
        "layout": {**sizes, "sequence": False, "expert_tensor": None},
        "world_size": sizes["data"] * sizes["tensor"] * sizes["pipeline"] * sizes["context"],
        "training": {
            "steps": 5,
            "micro_batch_size": 2,
            "global_batch_size": 16,
            "learning_rate": 0.001,
            "clip_grad_norm": 1.0,
            "weight_decay": 0.0,
            "decoupled_lr": None,
            "loss_mask": "none",
            "calculate_per_token_loss": False,
            "seed": 1234,
            "packed": False,
            "finetune": "none",
        },
        "settings": {
            "overlap_p2p_comm": overlap,
            "batch_p2p_comm": not overlap,
            "attention_backend": "local",
            "distributed_optimizer": False,
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
            "bucket_size": None,
            "recompute": "none",
            "parallel_output": True,
            "num_distributed_optimizer_instances": 1,
            "moe_token_dispatcher_type": None,
            "moe_grouped_gemm": False,
            "sequence_parallel_input_regather": False,
            "fp8_recipe": None,
        },
        "resume_at": None,
        "continue_in": None,
        "compare_weights": False,
        "compare_reference": False,
        "perturbed_runs": 0,
        "time_limit_seconds": 120,
    }


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
