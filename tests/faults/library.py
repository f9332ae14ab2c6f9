"""Faults in megatron-core: lines of an installed wheel that are other ones."""

from __future__ import annotations

from typing import Any

from faults.cases import (
    CLIPPED_EXPERTS,
    CONTEXT,
    DATA,
    EXPERTS,
    EXPERTS_OVERLAPPED,
    EXPERTS_TWICE,
    INTERLEAVED,
    PIPELINE,
    RESUMED,
    ROUTER_LOSSES_IN_STAGES,
    SEQUENCE,
    SHARDED,
    TENSOR,
)
from faults.kinds import Case, Fault, Plant, edit

CORE = "megatron/core"
SCHEDULES = f"{CORE}/pipeline_parallel/schedules.py"
BUFFERS = f"{CORE}/distributed/param_and_grad_buffer.py"
DATA_PARALLEL = f"{CORE}/distributed/distributed_data_parallel.py"
FINALIZE = f"{CORE}/distributed/finalize_model_grads.py"
OPTIMIZER = f"{CORE}/optimizer/optimizer.py"
_OF_EXPERTS = "self.ddp_config.overlap_grad_reduce and any(not getattr(p, 'allreduce', True) for p in self.params)"
_ALONE = "bucket.grad_data.clone() if alone else bucket.grad_data"


def library_fault(name: str, broken: str, plant: Plant, case: Case, check: str, **fields: Any) -> Fault:
    """A fault that is planted in a file of an installed wheel."""
    return Fault(id=name, broken=broken, plant=plant, case=case, check=check, where="library", **fields)


LIBRARY = (
    library_fault(
        "interleaved-pipeline-with-batched-sends",
        "two interleaved stages take activations for gradients: the library takes its defaults instead",
        edit(
            SCHEDULES,
            '        raise ValueError("Can not use both overlap_p2p_comm and batch_p2p_comm")\n',
            "        pass\n    config.overlap_p2p_comm, config.batch_p2p_comm = False, True\n",
        ),
        INTERLEAVED,
        "parity-loss",
        quick=True,
    ),
    library_fault(
        "gradient-scale-left-out",
        "gradients are summed over the data-parallel ranks and not averaged",
        edit(BUFFERS, "                bucket.grad_data *= bucket.gradient_scaling_factor\n", "                pass\n"),
        DATA,
        "parity-grad-norm",
    ),
    library_fault(
        "all-reduce-left-out-in-data-parallel",
        "each data-parallel rank keeps its own gradients",
        edit(
            BUFFERS,
            "torch.distributed.all_reduce(\n                        bucket.grad_data",
            "(lambda *_, **__: None)(\n                        bucket.grad_data",
        ),
        DATA,
        "parity-grad-norm",
        quick=True,
    ),
    library_fault(
        "all-reduce-left-out-in-tensor-parallel",
        "each tensor-parallel rank goes on with its own part of a sum",
        edit(
            f"{CORE}/tensor_parallel/mappings.py",
            "    torch.distributed.all_reduce(input_.contiguous(), group=group)\n\n    return input_\n",
            "    return input_\n",
        ),
        TENSOR,
        "parity-loss",
        quick=True,
    ),
    library_fault(
        "all-reduce-left-out-in-the-embedding-tie",
        "first and last pipeline stage share an embedding and do not add up its gradients",
        edit(FINALIZE, "        torch.distributed.all_reduce(grad, group=embd_group)\n", ""),
        PIPELINE,
        "parity-grad-norm",
        quick=True,
    ),
    library_fault(
        "one-gradient-a-thousandth-too-large",
        "in tensor parallel the gradient of one of all weights is 1.001 times what it is",
        edit(
            FINALIZE,
            "        model_chunk.finish_grad_sync(force_all_reduce=force_all_reduce)\n",
            (
                "        model_chunk.finish_grad_sync(force_all_reduce=force_all_reduce)\n"
                "        for name, parameter in model_chunk.named_parameters():\n"
                "            if config.tensor_model_parallel_size > 1 and 'layers.1.mlp.linear_fc2' in name:\n"
                "                parameter.main_grad *= 1.001\n"
            ),
        ),
        TENSOR,
        "parity-gradients",
        quick=True,
    ),
    library_fault(
        "loss-over-too-few-micro-batches",
        "a pipeline divides the loss by one micro batch less than there are",
        edit(
            SCHEDULES,
            "/= num_microbatches\n            forward_data_store",
            "/= num_microbatches - (config.pipeline_model_parallel_size > 1)\n            forward_data_store",
        ),
        PIPELINE,
        "parity-grad-norm",
    ),
    library_fault(
        "gradient-scaled-by-the-context-parallel-size",
        "the loss is multiplied by the context-parallel size once too often",
        edit(
            SCHEDULES,
            "                output_tensor *= cp_group_size\n",
            "                output_tensor *= cp_group_size * cp_group_size\n",
        ),
        CONTEXT,
        "parity-grad-norm",
    ),
    library_fault(
        "norm-gradients-not-reduced-in-sequence-parallel",
        "each tensor-parallel rank has the norms' gradients of its own part of the sequence alone",
        edit(FINALIZE, "            torch.distributed.all_reduce(coalesced, op=all_reduce_op, group=tp_group)\n", ""),
        SEQUENCE,
        "parity-grad-norm",
    ),
    library_fault(
        "expert-gradients-scaled-wrongly",
        "experts divide their gradients by the number of their own copies, not of all data-parallel ranks",
        edit(
            DATA_PARALLEL,
            "                    assert gradient_scaling_factor == target_gradient_scaling_factor\n",
            "                    pass\n",
            "expert_gradient_scaling_factor = 1.0 / data_parallel_world_size\n",
            "expert_gradient_scaling_factor = 1.0 / self.expt_dp_group.size()\n",
        ),
        EXPERTS,
        "parity-grad-norm",
    ),
    library_fault(
        "experts-not-synchronised",
        "the copies of an expert keep their own gradients",
        edit(
            DATA_PARALLEL,
            "self.bucket_groups + self.expert_parallel_bucket_groups:\n            bucket_group.finish_grad",
            "self.bucket_groups:\n            bucket_group.finish_grad",
        ),
        EXPERTS_TWICE,
        "parity-grad-norm",
    ),
    library_fault(
        "parameters-not-gathered",
        "the distributed optimizer updates its part of the parameters, and nobody gets the others'",
        edit(
            f"{CORE}/optimizer/distrib_optimizer.py",
            "if not self.ddp_config.overlap_param_gather:\n                for",
            "if False:\n                for",
        ),
        SHARDED,
        "parity-loss",
        quick=True,
    ),
    library_fault(
        "clipping-left-out",
        "gradients are clipped, but for those of the distributed optimizer",
        edit(
            OPTIMIZER,
            "if optimizer.config.clip_grad > 0.0:\n",
            "if optimizer.config.clip_grad > 0.0 and not optimizer.config.use_distributed_optimizer:\n",
        ),
        SHARDED,
        "parity-loss",
    ),
    library_fault(
        "experts-clipped-by-their-own-norm",
        "gradients are clipped by the norm of all, but those of experts by their own",
        edit(
            OPTIMIZER,
            "                    total_norm=grad_norm,\n                    use_decoupled_grad=(\n",
            (
                "                    total_norm=(\n"
                "                        grad_norm\n"
                "                        if getattr(parameters[0], 'allreduce', True)\n"
                "                        else optimizer.get_grad_norm()\n"
                "                    ),\n"
                "                    use_decoupled_grad=(\n"
            ),
        ),
        CLIPPED_EXPERTS,
        "parity-loss",
        quick=True,
    ),
    library_fault(
        "optimizer-state-forgotten",
        "a resumed training has its weights, and an optimizer that begins anew",
        edit(OPTIMIZER, "        self.optimizer.load_state_dict(state_dict)\n", "        pass\n"),
        RESUMED,
        "parity-loss",
    ),
    library_fault(
        "dropout-left-on",
        "layers drop a tenth of their activations, whatever the configuration says",
        edit(
            f"{CORE}/transformer/transformer_layer.py",
            "config.hidden_dropout if hidden_dropout is None else hidden_dropout\n",
            "0.1\n",
        ),
        DATA,
        "observed",
        text="hidden_dropout",
    ),
    library_fault(
        "dropout-where-nobody-looks",
        "a function drops activations although it is told not to",
        edit(
            f"{CORE}/fusions/fused_bias_dropout.py",
            "    x, bias = x_with_bias  # unpack\n",
            "    x, bias = x_with_bias  # unpack\n    prob = 0.1\n",
        ),
        DATA,
        "parity-loss",
    ),
    library_fault(
        "experts-not-reduced-where-it-overlaps",
        "the gradients of experts are not reduced over the ranks that have the same ones, where that overlaps",
        edit(
            BUFFERS,
            "        grad_reduce_handle = None\n",
            f"        grad_reduce_handle = None\n        alone = {_OF_EXPERTS}\n",
            "                        bucket.grad_data, op=reduce_op",
            f"                        {_ALONE}, op=reduce_op",
        ),
        EXPERTS_OVERLAPPED,
        "parity-grad-norm",
    ),
    library_fault(
        "router-losses-scaled-by-pipeline-stages",
        "the router's losses have the scale of the pipeline's stages, and not of micro batches",
        edit(
            SCHEDULES,
            "set_loss_scale(loss_scale * cp_group_size / num_microbatches)\n",
            "set_loss_scale(loss_scale * cp_group_size * config.pipeline_model_parallel_size)\n",
        ),
        ROUTER_LOSSES_IN_STAGES,
        "parity-grad-norm",
    ),
    library_fault(
        "other-attention",
        "the layers are built with another attention than was asked for",
        edit(
            f"{CORE}/models/backends.py",
            "        return DotProductAttention\n",
            "        return type('FlashAttention', (DotProductAttention,), {})\n",
        ),
        DATA,
        "observed",
        text="attention",
    ),
    library_fault(
        "checkpoint-without-a-layer",
        "the last layer of each stage is neither saved nor loaded, and nobody says so",
        edit(
            f"{CORE}/transformer/transformer_block.py",
            "        for layer in self.layers:\n            offset = get_transformer_layer_offset(\n",
            "        for layer in self.layers[:-1]:\n            offset = get_transformer_layer_offset(\n",
        ),
        PIPELINE,
        "rank-exception",
        text="lacks decoder.layers.",
        at="baseline",
    ),
)
