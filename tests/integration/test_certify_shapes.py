"""What the planner accepts, megatron-core's own configuration accepts too."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.rows import rows
from hypothesis import HealthCheck, given, settings

from envbuild.certify.cases.case import ResolvedRow
from envbuild.certify.cases.rules import broken_rules, missing_capabilities

SAMPLE = 600
# Prints why megatron-core refuses each of the configurations in a file; an empty text for those that it takes.
PROGRAM = """
import json, sys, torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
refusals = []
for options in json.load(open(sys.argv[1])):
    backend = AttnBackend[options.pop("attention_backend")]
    try:
        TransformerConfig(**options, attention_backend=backend, pipeline_dtype=torch.float32)
        refusals.append("")
    except Exception as error:
        refusals.append(f"{type(error).__name__}: {error}")
print(json.dumps(refusals))
"""


def options_of(row: ResolvedRow) -> dict[str, Any]:
    """A row in megatron-core's words."""
    case, model = row.case, row.model
    layout, settings = case.layout, case.settings
    options: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "normalization": model.normalization,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence,
        "overlap_p2p_comm": settings.overlap_p2p_comm,
        "batch_p2p_comm": not settings.overlap_p2p_comm,
        "attention_backend": settings.attention_backend,
        "bf16": case.precision != "fp32",
        "fp8": "hybrid" if case.precision == "fp8" else None,
        "add_bias_linear": False,
    }
    if model.moe is not None:
        options |= {"num_moe_experts": model.moe.num_experts, "moe_router_topk": model.moe.router_topk}
    if model.mamba is not None:
        mamba = model.mamba
        options |= {"is_hybrid_model": True, "mamba_state_dim": mamba.state_dim, "mamba_head_dim": mamba.head_dim}
        options["mamba_num_groups"] = mamba.num_groups
    match settings.recompute:
        case "selective":
            options["recompute_granularity"] = "selective"
        case "full":
            options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return options


def sample() -> list[ResolvedRow]:
    """Random rows, half of which break no rule."""
    sampled: list[ResolvedRow] = []

    @settings(max_examples=SAMPLE, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(row=rows())
    def collect(row: ResolvedRow) -> None:
        # megatron-core asks for Transformer Engine's version where experts train in fp8, and it is not here.
        if row.model.moe is None or row.case.precision != "fp8":
            sampled.append(row)

    collect()
    return sampled


def answers(python: Path, folder: Path, options: list[dict[str, Any]]) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "options.json").write_text(json.dumps(options))
    command = [python, folder / "program.py", folder / "options.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    refusals: list[str] = json.loads(done.stdout.splitlines()[-1])
    return refusals


@pytest.mark.slow
def test_megatron_core_takes_every_row_that_breaks_no_rule(stack_python: Path, tmp_path: Path) -> None:
    sampled = sample()
    refusals = answers(stack_python, tmp_path, [options_of(row) for row in sampled])
    broken = [bool(broken_rules(row) or missing_capabilities(row)) for row in sampled]
    wrong = {text: sampled[index] for index, text in enumerate(refusals) if text and not broken[index]}
    assert wrong == {}
    assert broken.count(False) > SAMPLE / 4
    # The program above can refuse.
    assert len([text for text in refusals if text]) > 10
