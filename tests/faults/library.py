"""Faults in megatron-core: lines of an installed wheel that are other ones."""

from __future__ import annotations

from functools import partial

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
from faults.kinds import Edit, Fault

CORE = "megatron/core"
SCHEDULES = f"{CORE}/pipeline_parallel/schedules.py"
BUFFERS = f"{CORE}/distributed/param_and_grad_buffer.py"
DATA_PARALLEL = f"{CORE}/distributed/distributed_data_parallel.py"
FINALIZE = f"{CORE}/distributed/finalize_model_grads.py"
OPTIMIZER = f"{CORE}/optimizer/optimizer.py"
_OF_EXPERTS = "self.ddp_config.overlap_grad_reduce and any(not getattr(p, 'allreduce', True) for p in self.params)"
_ALONE = "bucket.grad_data.clone() if alone else bucket.grad_data"
library_fault = partial(Fault, where="library")

LIBRARY = (
    library_fault(
        id="interleaved-pipeline-with-batched-sends",
        broken="two interleaved stages take activations for gradients: the library takes its defaults instead",
        plant=Edit(
            file=SCHEDULES,
            changes=(
                (
                    '        raise ValueError("Can not use both overlap_p2p_comm and batch_p2p_comm")\n',
                    "        pass\n    config.overlap_p2p_comm, config.batch_p2p_comm = False, True\n",
                ),
            ),
        ),
        case=INTERLEAVED,
        check="parity-loss",
        quick=True,
    ),
    library_fault(
        id="gradient-scale-left-out",
        broken="gradients are summed over the data-parallel ranks and not averaged",
        plant=Edit(
            file=BUFFERS,
            changes=(
                ("                bucket.grad_data *= bucket.gradient_scaling_factor\n", "                pass\n"),
            ),
        ),
        case=DATA,
        check="parity-grad-norm",
    ),
    library_fault(
        id="all-reduce-left-out-in-data-parallel",
        broken="each data-parallel rank keeps its own gradients",
        plant=Edit(
            file=BUFFERS,
            changes=(
                (
                    "torch.distributed.all_reduce(\n                        bucket.grad_data",
                    "(lambda *_, **__: None)(\n                        bucket.grad_data",
                ),
            ),
        ),
        case=DATA,
        check="parity-grad-norm",
        quick=True,
    ),
    library_fault(
        id="all-reduce-left-out-in-tensor-parallel",
        broken="each tensor-parallel rank goes on with its own part of a sum",
        plant=Edit(
            file=f"{CORE}/tensor_parallel/mappings.py",
            changes=(
                (
                    "    torch.distributed.all_reduce(input_.contiguous(), group=group)\n\n    return input_\n",
                    "    return input_\n",
                ),
            ),
        ),
        case=TENSOR,
        check="parity-loss",
        quick=True,
    ),
    library_fault(
        id="all-reduce-left-out-in-the-embedding-tie",
        broken="first and last pipeline stage share an embedding and do not add up its gradients",
        plant=Edit(
            file=FINALIZE,
            changes=(("        torch.distributed.all_reduce(grad, group=embd_group)\n", ""),),
        ),
        case=PIPELINE,
        check="parity-grad-norm",
        quick=True,
    ),
    library_fault(
        id="one-gradient-a-thousandth-too-large",
        broken="in tensor parallel the gradient of one of all weights is 1.001 times what it is",
        plant=Edit(
            file=FINALIZE,
            changes=(
                (
                    "        model_chunk.finish_grad_sync(force_all_reduce=force_all_reduce)\n",
                    (
                        "        model_chunk.finish_grad_sync(force_all_reduce=force_all_reduce)\n"
                        "        for name, parameter in model_chunk.named_parameters():\n"
                        "            if config.tensor_model_parallel_size > 1 and 'layers.1.mlp.linear_fc2' in name:\n"
                        "                parameter.main_grad *= 1.001\n"
                    ),
                ),
            ),
        ),
        case=TENSOR,
        check="parity-gradients",
        quick=True,
    ),
    library_fault(
        id="loss-over-too-few-micro-batches",
        broken="a pipeline divides the loss by one micro batch less than there are",
        plant=Edit(
            file=SCHEDULES,
            changes=(
                (
                    "/= num_microbatches\n            forward_data_store",
                    "/= num_microbatches - (config.pipeline_model_parallel_size > 1)\n            forward_data_store",
                ),
            ),
        ),
        case=PIPELINE,
        check="parity-grad-norm",
    ),
    library_fault(
        id="gradient-scaled-by-the-context-parallel-size",
        broken="the loss is multiplied by the context-parallel size once too often",
        plant=Edit(
            file=SCHEDULES,
            changes=(
                (
                    "                output_tensor *= cp_group_size\n",
                    "                output_tensor *= cp_group_size * cp_group_size\n",
                ),
            ),
        ),
        case=CONTEXT,
        check="parity-grad-norm",
    ),
    library_fault(
        id="norm-gradients-not-reduced-in-sequence-parallel",
        broken="each tensor-parallel rank has the norms' gradients of its own part of the sequence alone",
        plant=Edit(
            file=FINALIZE,
            changes=(("            torch.distributed.all_reduce(coalesced, op=all_reduce_op, group=tp_group)\n", ""),),
        ),
        case=SEQUENCE,
        check="parity-grad-norm",
    ),
    library_fault(
        id="expert-gradients-scaled-wrongly",
        broken="experts divide their gradients by the number of their own copies, not of all data-parallel ranks",
        plant=Edit(
            file=DATA_PARALLEL,
            changes=(
                (
                    "                    assert gradient_scaling_factor == target_gradient_scaling_factor\n",
                    "                    pass\n",
                ),
                (
                    "expert_gradient_scaling_factor = 1.0 / data_parallel_world_size\n",
                    "expert_gradient_scaling_factor = 1.0 / self.expt_dp_group.size()\n",
                ),
            ),
        ),
        case=EXPERTS,
        check="parity-grad-norm",
    ),
    library_fault(
        id="experts-not-synchronised",
        broken="the copies of an expert keep their own gradients",
        plant=Edit(
            file=DATA_PARALLEL,
            changes=(
                (
                    "self.bucket_groups + self.expert_parallel_bucket_groups:\n            bucket_group.finish_grad",
                    "self.bucket_groups:\n            bucket_group.finish_grad",
                ),
            ),
        ),
        case=EXPERTS_TWICE,
        check="parity-grad-norm",
    ),
    library_fault(
        id="parameters-not-gathered",
        broken="the distributed optimizer updates its part of the parameters, and nobody gets the others'",
        plant=Edit(
            file=f"{CORE}/optimizer/distrib_optimizer.py",
            changes=(
                (
                    "if not self.ddp_config.overlap_param_gather:\n                for",
                    "if False:\n                for",
                ),
            ),
        ),
        case=SHARDED,
        check="parity-loss",
        quick=True,
    ),
    library_fault(
        id="clipping-left-out",
        broken="gradients are clipped, but for those of the distributed optimizer",
        plant=Edit(
            file=OPTIMIZER,
            changes=(
                (
                    "if optimizer.config.clip_grad > 0.0:\n",
                    "if optimizer.config.clip_grad > 0.0 and not optimizer.config.use_distributed_optimizer:\n",
                ),
            ),
        ),
        case=SHARDED,
        check="parity-loss",
    ),
    library_fault(
        id="experts-clipped-by-their-own-norm",
        broken="gradients are clipped by the norm of all, but those of experts by their own",
        plant=Edit(
            file=OPTIMIZER,
            changes=(
                (
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
            ),
        ),
        case=CLIPPED_EXPERTS,
        check="parity-loss",
        quick=True,
    ),
    library_fault(
        id="optimizer-state-forgotten",
        broken="a resumed training has its weights, and an optimizer that begins anew",
        plant=Edit(
            file=OPTIMIZER,
            changes=(("        self.optimizer.load_state_dict(state_dict)\n", "        pass\n"),),
        ),
        case=RESUMED,
        check="parity-loss",
    ),
    library_fault(
        id="dropout-left-on",
        broken="layers drop a tenth of their activations, whatever the configuration says",
        plant=Edit(
            file=f"{CORE}/transformer/transformer_layer.py",
            changes=(
                (
                    "config.hidden_dropout if hidden_dropout is None else hidden_dropout\n",
                    "0.1\n",
                ),
            ),
        ),
        case=DATA,
        check="observed",
        text="hidden_dropout",
    ),
    library_fault(
        id="dropout-where-nobody-looks",
        broken="a function drops activations although it is told not to",
        plant=Edit(
            file=f"{CORE}/fusions/fused_bias_dropout.py",
            changes=(
                (
                    "    x, bias = x_with_bias  # unpack\n",
                    "    x, bias = x_with_bias  # unpack\n    prob = 0.1\n",
                ),
            ),
        ),
        case=DATA,
        check="parity-loss",
    ),
    library_fault(
        id="experts-not-reduced-where-it-overlaps",
        broken="the gradients of experts are not reduced over the ranks that have the same ones, where that overlaps",
        plant=Edit(
            file=BUFFERS,
            changes=(
                (
                    "        grad_reduce_handle = None\n",
                    f"        grad_reduce_handle = None\n        alone = {_OF_EXPERTS}\n",
                ),
                (
                    "                        bucket.grad_data, op=reduce_op",
                    f"                        {_ALONE}, op=reduce_op",
                ),
            ),
        ),
        case=EXPERTS_OVERLAPPED,
        check="parity-grad-norm",
    ),
    library_fault(
        id="router-losses-scaled-by-pipeline-stages",
        broken="the router's losses have the scale of the pipeline's stages, and not of micro batches",
        plant=Edit(
            file=SCHEDULES,
            changes=(
                (
                    "set_loss_scale(loss_scale * cp_group_size / num_microbatches)\n",
                    "set_loss_scale(loss_scale * cp_group_size * config.pipeline_model_parallel_size)\n",
                ),
            ),
        ),
        case=ROUTER_LOSSES_IN_STAGES,
        check="parity-grad-norm",
    ),
    library_fault(
        id="other-attention",
        broken="the layers are built with another attention than was asked for",
        plant=Edit(
            file=f"{CORE}/models/backends.py",
            changes=(
                (
                    "        return DotProductAttention\n",
                    "        return type('FlashAttention', (DotProductAttention,), {})\n",
                ),
            ),
        ),
        case=DATA,
        check="observed",
        text="attention",
    ),
    library_fault(
        id="checkpoint-without-a-layer",
        broken="the last layer of each stage is neither saved nor loaded, and nobody says so",
        plant=Edit(
            file=f"{CORE}/transformer/transformer_block.py",
            changes=(
                (
                    "        for layer in self.layers:\n            offset = get_transformer_layer_offset(\n",
                    "        for layer in self.layers[:-1]:\n            offset = get_transformer_layer_offset(\n",
                ),
            ),
        ),
        case=PIPELINE,
        check="rank-exception",
        text="lacks decoder.layers.",
        at="baseline",
    ),
)
