"""Faults that only one axis shows: where it is left out, the same training agrees with its baseline."""

from __future__ import annotations

from faults.cases import CONTINUED, DECAYED, GATHERED, OVERLAPPED, PER_TOKEN, ROUTER_LOSSES, TWO_RATES
from faults.kinds import Fault, Switch, edit
from faults.library import BUFFERS, CORE, library_fault

SHARDED_OPTIMIZER = f"{CORE}/optimizer/distrib_optimizer.py"

AXES = (
    library_fault(
        "bucket-not-reduced",
        "of several gradient buckets the second is never reduced: each rank keeps its own",
        edit(
            BUFFERS,
            "all_reduce(\n                        bucket.grad_data, op",
            (
                "all_reduce(\n                        "
                "bucket.grad_data.clone() if bucket.bucket_id == 1 else bucket.grad_data, op"
            ),
        ),
        OVERLAPPED,
        "parity-grad-norm",
        quick=True,
    ),
    library_fault(
        "bucket-not-gathered",
        "of several buckets the weights of the second are never gathered: each rank goes on with old ones",
        edit(
            BUFFERS,
            "    bucket.param_data,\n                    local_data_view,\n",
            (
                "    bucket.param_data.clone() if bucket.bucket_id == 1 else bucket.param_data,\n"
                "                    local_data_view,\n"
            ),
        ),
        GATHERED,
        "parity-loss",
    ),
    library_fault(
        "biases-and-norms-decayed",
        "the sharded optimizer decays biases and norms too",
        edit(
            SHARDED_OPTIMIZER,
            '            self.optimizer.param_groups = [g["orig_group"] for g in self.opt_group_ranges]\n',
            (
                '            self.optimizer.param_groups = [g["orig_group"] for g in self.opt_group_ranges]\n'
                "            for group in self.optimizer.param_groups:\n"
                '                group["wd_mult"] = 1.0\n'
            ),
        ),
        DECAYED,
        "parity-weights",
        quick=True,
    ),
    library_fault(
        "one-learning-rate",
        "the sharded optimizer gives embeddings the learning rate of everything else",
        edit(
            SHARDED_OPTIMIZER,
            '            self.optimizer.param_groups = [g["orig_group"] for g in self.opt_group_ranges]\n',
            (
                '            self.optimizer.param_groups = [g["orig_group"] for g in self.opt_group_ranges]\n'
                "            for group in self.optimizer.param_groups:\n"
                '                group.pop("max_lr", None)\n'
            ),
        ),
        TWO_RATES,
        "parity-loss",
    ),
    library_fault(
        "tokens-of-one-rank",
        "gradients are divided by the tokens of a rank, and not by those of all ranks",
        edit(
            f"{CORE}/distributed/finalize_model_grads.py",
            "        torch.distributed.all_reduce(num_tokens, group=dp_cp_group)\n",
            "        num_tokens *= dp_cp_group.size()\n",
        ),
        PER_TOKEN,
        "parity-grad-norm",
    ),
    library_fault(
        "auxiliary-loss-scaled-by-tensor-parallel",
        "the router's auxiliary loss counts once for each tensor-parallel rank",
        edit(
            f"{CORE}/transformer/moe/router.py",
            "MoEAuxLossAutoScaler.apply(activation, aux_loss)\n",
            "MoEAuxLossAutoScaler.apply(activation, aux_loss * self.config.tensor_model_parallel_size)\n",
        ),
        ROUTER_LOSSES,
        "parity-grad-norm",
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
