"""Faults that only one axis shows: where it is left out, the same training agrees with its baseline."""

from __future__ import annotations

from functools import partial

from faults.cases import CONTINUED, DECAYED, GATHERED, OVERLAPPED, PER_TOKEN, ROUTER_LOSSES, TWO_RATES
from faults.kinds import Edit, Fault, Switch

CORE = "megatron/core"
BUFFERS = f"{CORE}/distributed/param_and_grad_buffer.py"
SHARDED_OPTIMIZER = f"{CORE}/optimizer/distrib_optimizer.py"
axis_fault = partial(Fault, where="library")

AXES = (
    axis_fault(
        id="bucket-not-reduced",
        broken="of several gradient buckets the second is never reduced: each rank keeps its own",
        plant=Edit(
            file=BUFFERS,
            changes=(
                (
                    "all_reduce(\n                        bucket.grad_data, op",
                    (
                        "all_reduce(\n                        "
                        "bucket.grad_data.clone() if bucket.bucket_id == 1 else bucket.grad_data, op"
                    ),
                ),
            ),
        ),
        case=OVERLAPPED,
        check="parity-grad-norm",
        quick=True,
    ),
    axis_fault(
        id="bucket-not-gathered",
        broken="of several buckets the weights of the second are never gathered: each rank goes on with old ones",
        plant=Edit(
            file=BUFFERS,
            changes=(
                (
                    "    bucket.param_data,\n                    local_data_view,\n",
                    (
                        "    bucket.param_data.clone() if bucket.bucket_id == 1 else bucket.param_data,\n"
                        "                    local_data_view,\n"
                    ),
                ),
            ),
        ),
        case=GATHERED,
        check="parity-loss",
    ),
    axis_fault(
        id="biases-and-norms-decayed",
        broken="the sharded optimizer decays biases and norms too",
        plant=Edit(
            file=SHARDED_OPTIMIZER,
            changes=(
                (
                    '            self.optimizer.param_groups = [g["orig_group"] for g in self.opt_group_ranges]\n',
                    (
                        '            self.optimizer.param_groups = [g["orig_group"] for g in self.opt_group_ranges]\n'
                        "            for group in self.optimizer.param_groups:\n"
                        '                group["wd_mult"] = 1.0\n'
                    ),
                ),
            ),
        ),
        case=DECAYED,
        check="parity-weights",
        quick=True,
    ),
    axis_fault(
        id="one-learning-rate",
        broken="the sharded optimizer gives embeddings the learning rate of everything else",
        plant=Edit(
            file=SHARDED_OPTIMIZER,
            changes=(
                (
                    '            self.optimizer.param_groups = [g["orig_group"] for g in self.opt_group_ranges]\n',
                    (
                        '            self.optimizer.param_groups = [g["orig_group"] for g in self.opt_group_ranges]\n'
                        "            for group in self.optimizer.param_groups:\n"
                        '                group.pop("max_lr", None)\n'
                    ),
                ),
            ),
        ),
        case=TWO_RATES,
        check="parity-loss",
    ),
    axis_fault(
        id="tokens-of-one-rank",
        broken="gradients are divided by the tokens of a rank, and not by those of all ranks",
        plant=Edit(
            file=f"{CORE}/distributed/finalize_model_grads.py",
            changes=(
                (
                    "        torch.distributed.all_reduce(num_tokens, group=dp_cp_group)\n",
                    "        num_tokens *= dp_cp_group.size()\n",
                ),
            ),
        ),
        case=PER_TOKEN,
        check="parity-grad-norm",
    ),
    axis_fault(
        id="auxiliary-loss-scaled-by-tensor-parallel",
        broken="the router's auxiliary loss counts once for each tensor-parallel rank",
        plant=Edit(
            file=f"{CORE}/transformer/moe/router.py",
            changes=(
                (
                    "MoEAuxLossAutoScaler.apply(activation, aux_loss)\n",
                    "MoEAuxLossAutoScaler.apply(activation, aux_loss * self.config.tensor_model_parallel_size)\n",
                ),
            ),
        ),
        case=ROUTER_LOSSES,
        check="parity-grad-norm",
    ),
    Fault(
        id="resharded-state-has-zeros",
        where="process",
        broken="an optimizer that is loaded in another layout has zeros in a part of its state",
        plant=Switch(name="resharded-state-has-zeros"),
        case=CONTINUED,
        check="parity-loss",
        quick=True,
    ),
)
