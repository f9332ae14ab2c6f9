"""Faults in megatron-core: lines of an installed wheel that are other ones."""

from __future__ import annotations

from faults.cases import (
    CONTEXT,
    DATA,
    EXPERTS,
    EXPERTS_TWICE,
    INTERLEAVED,
    PIPELINE,
    RESUMED,
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

LIBRARY = (
    Fault(
        id="interleaved-pipeline-with-batched-sends",
        broken="two interleaved stages take activations for gradients: the library takes its defaults instead",
        where="library",
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
        asked="two-stage interleaved pipeline with batched p2p",
        quick=True,
    ),
    Fault(
        id="gradient-scale-left-out",
        broken="gradients are summed over the data-parallel ranks and not averaged",
        where="library",
        plant=Edit(
            file=BUFFERS,
            changes=(
                ("                bucket.grad_data *= bucket.gradient_scaling_factor\n", "                pass\n"),
            ),
        ),
        case=DATA,
        check="parity-grad-norm",
    ),
    Fault(
        id="all-reduce-left-out-in-data-parallel",
        broken="each data-parallel rank keeps its own gradients",
        where="library",
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
        asked="one all-reduce left out in DP",
        quick=True,
    ),
    Fault(
        id="all-reduce-left-out-in-tensor-parallel",
        broken="each tensor-parallel rank goes on with its own part of a sum",
        where="library",
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
        asked="one all-reduce left out in TP",
        quick=True,
    ),
    Fault(
        id="all-reduce-left-out-in-the-embedding-tie",
        broken="first and last pipeline stage share an embedding and do not add up its gradients",
        where="library",
        plant=Edit(
            file=FINALIZE,
            changes=(("        torch.distributed.all_reduce(grad, group=embd_group)\n", ""),),
        ),
        case=PIPELINE,
        check="parity-grad-norm",
        asked="one all-reduce left out in the embedding tie between pipeline stages",
        quick=True,
    ),
    Fault(
        id="loss-over-too-few-micro-batches",
        broken="a pipeline divides the loss by one micro batch less than there are",
        where="library",
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
    Fault(
        id="gradient-scaled-by-the-context-parallel-size",
        broken="the loss is multiplied by the context-parallel size once too often",
        where="library",
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
        asked="gradient scaled by the context-parallel size",
    ),
    Fault(
        id="norm-gradients-not-reduced-in-sequence-parallel",
        broken="each tensor-parallel rank has the norms' gradients of its own part of the sequence alone",
        where="library",
        plant=Edit(
            file=FINALIZE,
            changes=(("            torch.distributed.all_reduce(coalesced, op=all_reduce_op, group=tp_group)\n", ""),),
        ),
        case=SEQUENCE,
        check="parity-grad-norm",
    ),
    Fault(
        id="expert-gradients-scaled-wrongly",
        broken="experts divide their gradients by the number of their own copies, not of all data-parallel ranks",
        where="library",
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
    Fault(
        id="experts-not-synchronised",
        broken="the copies of an expert keep their own gradients",
        where="library",
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
    Fault(
        id="parameters-not-gathered",
        broken="the distributed optimizer updates its part of the parameters, and nobody gets the others'",
        where="library",
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
    Fault(
        id="clipping-left-out",
        broken="gradients are clipped, but for those of the distributed optimizer",
        where="library",
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
    Fault(
        id="optimizer-state-forgotten",
        broken="a resumed training has its weights, and an optimizer that begins anew",
        where="library",
        plant=Edit(
            file=OPTIMIZER,
            changes=(("        self.optimizer.load_state_dict(state_dict)\n", "        pass\n"),),
        ),
        case=RESUMED,
        check="parity-loss",
    ),
    Fault(
        id="dropout-left-on",
        broken="layers drop a tenth of their activations, whatever the configuration says",
        where="library",
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
        says="hidden_dropout",
        asked="dropout left on",
    ),
    Fault(
        id="dropout-where-nobody-looks",
        broken="a function drops activations although it is told not to",
        where="library",
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
    Fault(
        id="other-attention",
        broken="the layers are built with another attention than was asked for",
        where="library",
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
        says="attention",
        asked="wrong attention backend",
    ),
    Fault(
        id="checkpoint-without-a-layer",
        broken="the last layer of each stage is neither saved nor loaded, and nobody says so",
        where="library",
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
        asked="checkpoint missing a layer",
    ),
)
