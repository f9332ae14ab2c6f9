"""Faults in what a library keeps in float32 where all else is in bf16: each leaves the loss as it is to four digits."""

from __future__ import annotations

from typing import Any

from faults.cases import MIXED, MIXED_SHARDED
from faults.kinds import Fault, Plant, edit
from faults.library import CORE, DATA_PARALLEL, OPTIMIZER


def mixed_fault(name: str, broken: str, plant: Plant, text: str, **fields: Any) -> Fault:
    defaults = {"where": "library", "check": "reference", "at": "baseline", "case": MIXED}
    return Fault(id=name, broken=broken, plant=plant, text=text, **{**defaults, **fields})


MIXED_PRECISION = (
    mixed_fault(
        "gradients-accumulated-in-bf16",
        "the gradients of micro batches are added up in bf16, in a buffer of float32",
        edit(
            DATA_PARALLEL,
            "                    param.main_grad.add_(param.grad.data)\n",
            "                    param.main_grad.copy_((param.main_grad + param.grad.data).to(param.dtype))\n",
        ),
        "accumulation in float32",
    ),
    mixed_fault(
        "softmax-in-bf16",
        "attention's softmax is computed in bf16",
        edit(f"{CORE}/fusions/fused_softmax.py", "            input = input.float()\n", "            pass\n"),
        "softmax in float32",
    ),
    mixed_fault(
        "loss-in-bf16",
        "the loss is computed from logits in bf16, and its gradient too",
        edit(
            f"{CORE}/tensor_parallel/cross_entropy.py",
            "vocab_parallel_logits = vocab_parallel_logits.float()\n",
            "vocab_parallel_logits = vocab_parallel_logits.clone()\n",
        ),
        "loss in float32",
    ),
    mixed_fault(
        "main-weights-in-bf16",
        "the optimizer's own weights are rounded to bf16 after each step",
        edit(
            OPTIMIZER,
            (
                "        model_data, main_data = self._get_model_and_main_params_data_float16()\n"
                "        _multi_tensor_copy_this_to_that(\n            this=main_data"
            ),
            (
                "        model_data, main_data = self._get_model_and_main_params_data_float16()\n"
                "        for values in main_data:\n            values.copy_(values.bfloat16())\n"
                "        _multi_tensor_copy_this_to_that(\n            this=main_data"
            ),
        ),
        "main weights in float32",
    ),
    mixed_fault(
        "sharded-main-weights-in-bf16",
        "the distributed optimizer's own weights are rounded to bf16 after each step",
        edit(
            f"{CORE}/optimizer/distrib_optimizer.py",
            "                        shard_model_param.data.copy_(shard_main_param)\n",
            (
                "                        shard_model_param.data.copy_(shard_main_param)\n"
                "                        shard_main_param.data.copy_(shard_model_param)\n"
            ),
        ),
        "main_weights_dtype",
        case=MIXED_SHARDED,
        check="observed",
        at="case",
    ),
)
