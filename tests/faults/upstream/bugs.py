"""Real bugs of released libraries that train without an error, each with the case and the check that must find it.

None of the cases was made for its bug: each is in a shipped matrix, with the bands of that matrix. Those of known-wrong
are ordinary rows, kept apart because no stack with such a release could pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from faults.kinds import Edit, edit

MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
CORE = "megatron/core"
OPTIMIZER = f"{CORE}/optimizer/distrib_optimizer.py"
SCHEDULES = f"{CORE}/pipeline_parallel/schedules.py"
MESSAGES = f"{CORE}/pipeline_parallel/p2p_communication.py"
LANGUAGE = f"{CORE}/models/common/language_module/language_module.py"


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A bug of a release of megatron-core.

    Attributes:
        thread: the report or the fix; empty where it was seen here first.
        release: one that has it.
        fixed: a release without it; or, where none has the fix, an edit of ours to that release.
        check: the code of the check that must find it, among the problems of the case.
        device: "cuda" where it does not show on a CPU.
        needs: what else it takes, for people.
        quick: in ``./dev test --all``; the others run in ``./dev soak`` alone.
    """

    id: str
    thread: str = ""
    broken: str
    release: str
    fixed: str | tuple[Edit, ...]
    matrix: Literal["certify-quick", "certify-full", "known-wrong"]
    case: str
    check: str
    device: Literal["cpu", "cuda"] = "cpu"
    needs: str = ""
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class NotCaught:
    """A bug that no case finds, and why: missed, or impossible on the machines that are there."""

    thread: str
    broken: str
    state: Literal["missed", "impossible here", "unknown"]
    why: str


# The state of the optimizer is gathered without the padding between buckets, and cut with it.
_WITHOUT_PADDING = edit(
    OPTIMIZER,
    "                        state_ten = world_tensors[state_key][param_world_start:param_world_end]\n",
    (
        "                        padding = sum(\n"
        "                            bucket.grad_data.numel() - bucket.numel_unpadded\n"
        "                            for bucket in buffer.buckets\n"
        "                            if bucket.offset + bucket.grad_data.numel() <= param_world_start\n"
        "                        )\n"
        "                        own = slice(param_world_start - padding, param_world_end - padding)\n"
        "                        state_ten = world_tensors[state_key][own]\n"
    ),
)
_SPLIT_AGAIN = edit(
    LANGUAGE,
    "        # [b s] => [s b]\n        labels = labels.transpose(0, 1).contiguous()\n",
    (
        "        if not getattr(self, 'parallel_output', True):\n"
        "            logits = tensor_parallel.scatter_to_tensor_model_parallel_region(logits)\n"
        "        labels = labels.transpose(0, 1).contiguous()\n"
    ),
)
_TOKENS_OF_THE_SAMPLE = edit(
    SCHEDULES,
    "                    output_tensor /= torch.clamp(num_tokens, min=1)\n",
    (
        "                    whole = num_tokens.clone()\n"
        "                    torch.distributed.all_reduce(\n"
        "                        whole, group=parallel_state.get_context_parallel_group()\n"
        "                    )\n"
        "                    output_tensor *= cp_group_size\n"
        "                    output_tensor /= torch.clamp(whole, min=1)\n"
    ),
)
_ONE_BY_ONE = edit(
    MESSAGES,
    "        elif config.batch_p2p_comm:\n            assert wait_on_reqs\n",
    "        elif config.batch_p2p_comm and self.pp_group.size() > 2:\n            assert wait_on_reqs\n",
    "        if config.use_ring_exchange_p2p or config.batch_p2p_comm:\n            reqs = []\n",
    "        if p2p_func is not _p2p_ops:\n            reqs = []\n",
)

_GRADIENT_AS_IT_IS = edit(
    f"{CORE}/fusions/fused_cross_entropy.py", "    grad_input = grad_input.to(torch.bfloat16)\n", ""
)

BUGS = (
    Bug(
        id="interleaved-pipeline-with-batched-sends",
        broken="of two interleaved stages the next and the previous one are one rank: activations become gradients",
        release="0.19.2",
        fixed=(_ONE_BY_ONE,),
        matrix="known-wrong",
        case="gpt-fp32-pp2-vp2-bp2p",
        check="parity-loss",
    ),
    Bug(
        id="optimizer-state-of-several-buckets",
        thread=f"{MEGATRON}/pull/5077",
        broken="parts of the sharded optimizer's state are zeros, and others moved, after loading",
        release="0.19.2",
        fixed=(_WITHOUT_PADDING,),
        matrix="known-wrong",
        case="gpt-fp32-dp2-do-ogr-bk20000-resume3-in-dp2",
        check="parity-loss",
    ),
    Bug(
        id="loss-of-gathered-logits",
        thread=f"{MEGATRON}/issues/7452",
        broken="finding 2: the loss takes whole logits for a part of the vocabulary",
        release="0.19.2",
        fixed=(_SPLIT_AGAIN,),
        matrix="known-wrong",
        case="gpt-fp32-tp2-gathered",
        check="parity-loss",
        quick=True,
    ),
    Bug(
        id="gradient-of-the-fused-loss-in-bf16",
        broken="the fused cross entropy rounds the gradient of the logits to bf16, whatever they are",
        release="0.19.2",
        fixed=(_GRADIENT_AS_IT_IS,),
        matrix="known-wrong",
        case="gpt-fp32-ce-native",
        check="parity-grad-norm",
    ),
    Bug(
        id="masked-loss-under-context-parallelism",
        thread=f"{MEGATRON}/pull/7513",
        broken="finding 9: each context-parallel rank divides by its own tokens",
        release="0.19.2",
        fixed=(_TOKENS_OF_THE_SAMPLE,),
        matrix="known-wrong",
        case="gpt-fp32-cp2-mask-uneven",
        check="parity-grad-norm",
    ),
    Bug(
        id="router-losses-of-ranks-that-share-samples",
        thread=f"{MEGATRON}/pull/5047",
        broken="with the mean over tokens, the router's losses are weighed by a rank's tokens",
        release="0.18.0",
        fixed="0.19.2",
        matrix="known-wrong",
        case="moe-aux-fp32-tp2-sp-mask-uneven-ptl",
        check="parity-grad-norm",
    ),
    Bug(
        id="router-losses-under-context-parallelism",
        thread=f"{MEGATRON}/pull/2237",
        broken="the router's losses are divided by the context-parallel size",
        release="0.15.3",
        fixed="0.16.1",
        matrix="certify-full",
        case="moe-aux-fp32-cp2",
        check="parity-grad-norm",
    ),
    # The reference alone finds it in one process: the library agrees with itself.
    Bug(
        id="loss-over-each-sample-and-the-micro-batch",
        thread=f"{MEGATRON}/pull/5798",
        broken="with the mean over tokens, the router's loss over each sample is divided by the micro batch's samples",
        release="0.18.0",
        fixed="0.19.2",
        matrix="known-wrong",
        case="moe-seq-fp32-baseline-ptl",
        check="reference",
        quick=True,
    ),
    Bug(
        id="groups-of-another-learning-rate",
        thread=f"{MEGATRON}/pull/4705",
        broken="groups of parameters that differ in their learning rate alone are mixed up as a checkpoint is loaded",
        release="0.18.0",
        fixed="0.19.2",
        matrix="known-wrong",
        case="gpt-fp32-dp2-dlr0.0005-do-resume3",
        check="parity-grad-norm",
    ),
    Bug(
        id="gradients-of-whole-experts",
        thread=f"{MEGATRON}/pull/5916",
        broken="experts that are whole on each tensor-parallel rank keep their own gradients",
        release="0.18.0",
        fixed="0.19.2",
        matrix="known-wrong",
        case="moe-fp32-tp2-sp-etp1",
        check="parity-grad-norm",
    ),
    # -- on GPUs alone: Mamba's kernels, a race of streams, Transformer Engine's experts. Their record is of two H200s:
    # benchmarks/records/upstream-bugs-2xh200-2026-11-23.json
    Bug(
        id="epsilon-of-mamba",
        thread=f"{MEGATRON}/pull/5750",
        broken="the norm before a Mamba layer has the usual epsilon, whatever the configuration says",
        release="0.18.0",
        fixed="0.19.2",
        matrix="certify-full",
        case="hybrid-local-fp32-baseline",
        check="reference",
        device="cuda",
    ),
    Bug(
        id="overlap-with-several-optimizer-instances",
        thread=f"{MEGATRON}/pull/3693",
        broken="a stream does not wait for the reduction between instances of the optimizer",
        release="0.16.1",
        fixed="0.17.1",
        matrix="certify-full",
        case="wide-fp32-dp2-do-oi2-ogr",
        check="parity-grad-norm",
        device="cuda",
        needs="CUDA_DEVICE_MAX_CONNECTIONS=8, CUDA's default: with one queue nothing overtakes",
    ),
    Bug(
        id="norm-of-the-gradients-of-experts",
        thread=f"{MEGATRON}/pull/5916",
        broken="of Transformer Engine's grouped experts, one tensor-parallel rank's gradients are in the norm",
        release="0.18.0",
        fixed="0.19.2",
        matrix="certify-full",
        case="te-moe-bf16-tp2-sp-ep2-etp1-grouped",
        check="parity-grad-norm",
        device="cuda",
        needs="Transformer Engine 2.13 or newer: 2.11 marks the weights itself",
    ),
)

ISSUE = f"{MEGATRON}/issues/7452"
ENGINE = "https://github.com/NVIDIA/TransformerEngine"
_NO_AXIS = "no case has"

NOT_CAUGHT = (
    NotCaught(
        thread=f"{MEGATRON}/pull/5338",
        broken="the sum of a tensor that is not contiguous is discarded (_reduce)",
        state="missed",
        why="no call of the library itself passes such a tensor; its report says so too",
    ),
    NotCaught(
        thread=f"{MEGATRON}/pull/3023",
        broken="Megatron-FSDP scales the wrong buffer",
        state="missed",
        why=f"{_NO_AXIS} FSDP",
    ),
    NotCaught(
        thread=f"{MEGATRON}/pull/4800",
        broken="mxfp8 parameters gathered without overlap",
        state="impossible here",
        why="mxfp8 needs a B200",
    ),
    NotCaught(
        thread=f"{ENGINE}/issues/1557",
        broken="dQ, dK, dV under context parallelism, before 2.2",
        state="impossible here",
        why="Transformer Engine 2.1 does not build with a torch for Hopper and CUDA 13",
    ),
    NotCaught(
        thread=f"{ENGINE}/issues/1047",
        broken="fp8 from the second micro batch on, in 1.7",
        state="impossible here",
        why="Transformer Engine 1.7 does not build with a torch for Hopper and CUDA 13",
    ),
    NotCaught(
        thread=f"{ENGINE}/issues/2139",
        broken="gradients of the parallel cross entropy vanish, before 2.8",
        state="missed",
        why=f"{_NO_AXIS} Transformer Engine's cross entropy",
    ),
    NotCaught(
        thread=ISSUE,
        broken="finding 1: label smoothing over a rank's part of the vocabulary",
        state="missed",
        why=f"{_NO_AXIS} label smoothing, which no model of the library sets",
    ),
    NotCaught(
        thread=ISSUE,
        broken="finding 3: multi-token prediction normalized with a rank's tokens",
        state="missed",
        why=f"{_NO_AXIS} multi-token prediction",
    ),
    NotCaught(
        thread=ISSUE,
        broken="findings 5 and 10: padding masks of the router under tensor parallelism",
        state="missed",
        why=f"{_NO_AXIS} a padding mask",
    ),
    NotCaught(
        thread=ISSUE,
        broken="finding 8: gradients of attention sinks are left out of the norm",
        state="missed",
        why=f"{_NO_AXIS} attention sinks",
    ),
    NotCaught(
        thread=ISSUE,
        broken="finding 11: the norm of gated delta nets is not summed over tensor-parallel ranks",
        state="missed",
        why=f"{_NO_AXIS} gated delta nets",
    ),
    NotCaught(
        thread=ISSUE,
        broken="finding 12: Megatron-FSDP restores local layers as global ones",
        state="missed",
        why=f"{_NO_AXIS} FSDP",
    ),
    NotCaught(
        thread=ISSUE,
        broken="findings 4, 6, 7 and those after 12",
        state="unknown",
        why="their text was not at hand when this was written",
    ),
)
