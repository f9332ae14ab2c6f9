"""The catalogue of planted faults: what can be wrong with a training environment, and the check that must say so."""

from __future__ import annotations

from faults.kinds import Case, Edit, Fault, Scenario, Spoil, Switch

CORE = "megatron/core"
SCHEDULES = f"{CORE}/pipeline_parallel/schedules.py"
BUFFERS = f"{CORE}/distributed/param_and_grad_buffer.py"
DATA_PARALLEL = f"{CORE}/distributed/distributed_data_parallel.py"
FINALIZE = f"{CORE}/distributed/finalize_model_grads.py"
OPTIMIZER = f"{CORE}/optimizer/optimizer.py"

DATA = Case(row={"data": 2})
TENSOR = Case(row={"tensor": 2})
PIPELINE = Case(row={"pipeline": 2})
# With two micro batches a pipeline of two stages is never in the phase that the fault is in.
INTERLEAVED = Case(row={"pipeline": 2, "virtual_pipeline": 2, "global_batch_size": 8})
SEQUENCE = Case(kind="norms", row={"tensor": 2, "sequence": True})
CONTEXT = Case(row={"context": 2})
EXPERTS = Case(kind="experts", row={"data": 2, "expert": 2})
EXPERTS_TWICE = Case(kind="experts", row={"data": 4, "expert": 2})
SHARDED = Case(row={"data": 2, "distributed_optimizer": True})
RESUMED = Case(row={"data": 2, "resume_at": 2})
WEIGHTS = Case(row={"pipeline": 2, "compare_weights": True})

LIBRARY = (
    Fault(
        id="interleaved-pipeline-with-batched-sends",
        broken="two interleaved stages take activations for gradients: the library uses its defaults, whatever it is told",
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
            changes=(("                bucket.grad_data *= bucket.gradient_scaling_factor\n", "                pass\n"),),
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
                    "                    torch.distributed.all_reduce(\n"
                    "                        bucket.grad_data, op=reduce_op, group=communication_group, async_op=async_op\n"
                    "                    )\n",
                    "                    pass\n",
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
                    "                output_tensor *= cp_group_size\n                output_tensor /= num_microbatches\n",
                    "                output_tensor *= cp_group_size\n"
                    "                output_tensor /= num_microbatches - (config.pipeline_model_parallel_size > 1)\n",
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
                    "        for bucket_group in self.bucket_groups + self.expert_parallel_bucket_groups:\n"
                    "            bucket_group.finish_grad_sync(",
                    "        for bucket_group in self.bucket_groups:\n            bucket_group.finish_grad_sync(",
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
                    "            if not self.ddp_config.overlap_param_gather:\n"
                    "                for model_chunk in self.model_chunks:\n"
                    "                    model_chunk.start_param_sync()\n",
                    "            pass\n",
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
                    "            if optimizer.config.clip_grad > 0.0:\n",
                    "            if optimizer.config.clip_grad > 0.0 and not optimizer.config.use_distributed_optimizer:\n",
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
                    "        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout\n",
                    "        self.hidden_dropout = 0.1\n",
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

PROCESS = (
    Fault(
        id="other-samples-on-one-rank",
        broken="one data-parallel rank reads other samples",
        where="process",
        plant=Switch(name="other-samples-on-one-rank"),
        case=DATA,
        check="parity-loss",
        asked="one rank reading other samples",
        quick=True,
    ),
    Fault(
        id="other-weights-on-one-rank",
        broken="one data-parallel rank starts from other weights",
        where="process",
        plant=Switch(name="other-weights-on-one-rank"),
        case=DATA,
        check="parity-grad-norm",
        asked="other initial weights on one rank",
    ),
    Fault(
        id="nan-at-step-3",
        broken="a gradient is no number at step 3",
        where="process",
        plant=Switch(name="nan-at-step-3"),
        case=DATA,
        check="not-finite",
        asked="NaN at step 3",
        quick=True,
    ),
    Fault(
        id="killed-rank",
        broken="a rank is killed, as the kernel does when memory runs out",
        where="process",
        plant=Switch(name="killed-rank"),
        case=DATA,
        check="rank-signal",
        says="rank 1",
        asked="a rank killed for memory",
        quick=True,
    ),
    Fault(
        id="out-of-memory",
        broken="a rank allocates more memory than it may have",
        where="process",
        plant=Switch(name="out-of-memory"),
        case=DATA,
        check="rank-exception",
        says="rank 1",
    ),
    Fault(
        id="rank-that-exits",
        broken="a library ends a rank without an exception",
        where="process",
        plant=Switch(name="rank-that-exits"),
        case=DATA,
        check="rank-exit",
        says="rank 1",
    ),
    Fault(
        id="exit-0-without-results",
        broken="every rank ends with success and has trained nothing",
        where="process",
        plant=Switch(name="exit-0-without-results"),
        case=DATA,
        check="not-reported",
        asked="exit 0 with no results",
        quick=True,
    ),
    Fault(
        id="step-not-reported",
        broken="the numbers of a step are lost",
        where="process",
        plant=Switch(name="step-not-reported"),
        case=PIPELINE,
        check="steps",
        asked="results with a step missing",
        quick=True,
    ),
    Fault(
        id="killed-baseline",
        broken="the baseline is killed after it has saved its weights",
        where="process",
        plant=Switch(name="killed-baseline"),
        case=DATA,
        check="baseline",
    ),
    Fault(
        id="rounding",
        broken="a gradient scale that is no power of two: no band sees it, but data parallelism must give the very digits",
        where="process",
        plant=Switch(name="rounding"),
        case=DATA,
        check="data-parallel-bits",
    ),
    Fault(
        id="damaged-checkpoint",
        broken="a disk gives back other bytes of the checkpoint than were written",
        where="file",
        plant=Switch(name="damaged-checkpoint"),
        case=TENSOR,
        check="parity-loss",
    ),
    Fault(
        id="hung-rank",
        broken="a rank waits for ever",
        where="process",
        plant=Switch(name="hung-rank"),
        case=DATA,
        check="timeout",
        asked="a hung rank",
        quick=True,
    ),
    Fault(
        id="stopped-rank",
        broken="a rank is stopped (SIGSTOP) and never goes on",
        where="process",
        plant=Switch(name="stopped-rank"),
        case=DATA,
        check="timeout",
    ),
    Fault(
        id="last-update-lost",
        broken="the weights that a case ends with lack the last step's update; every loss was right",
        where="process",
        plant=Switch(name="last-update-lost"),
        case=WEIGHTS,
        check="parity-weights",
        quick=True,
    ),
)

WHEELS = (
    Fault(
        id="extension-missing",
        broken="an extension is missing, and its package takes a fallback without a word",
        where="wheel",
        plant=Spoil(name="extension_removed"),
        case=DATA,
        check="environment",
        says="file-missing",
        at="run",
        asked="extension missing and silently replaced by a fallback",
        quick=True,
    ),
    Fault(
        id="extension-changed",
        broken="an extension is not the one that was locked: another byte",
        where="wheel",
        plant=Spoil(name="extension_changed"),
        case=DATA,
        check="environment",
        says="file-differs",
        at="run",
    ),
    Fault(
        id="torch-shadowed",
        broken="another torch stands before the environment's on the path",
        where="wheel",
        plant=Spoil(name="torch_shadowed"),
        case=DATA,
        check="environment",
        says="shadowed",
        at="run",
        asked="torch shadowed by another on the path",
        quick=True,
    ),
    Fault(
        id="version-differs",
        broken="a package is of another version than the lock's",
        where="wheel",
        plant=Spoil(name="other_version"),
        case=DATA,
        check="environment",
        says="version-mismatch",
        at="run",
        asked="a component's version differing from the lock",
    ),
    Fault(
        id="package-removed",
        broken="a package of the lock is not installed",
        where="wheel",
        plant=Spoil(name="package_removed"),
        case=DATA,
        check="environment",
        says="package-missing",
        at="run",
    ),
    Fault(
        id="two-nccls",
        broken="a machine's own NCCL is found before the one of the environment",
        where="wheel",
        plant=Spoil(name="second_nccl"),
        case=DATA,
        check="environment",
        says="library-twice",
        at="run",
        asked="two NCCLs",
    ),
)

# Between plan, run and judge: each is set up by a test of its own.
RUNS = (
    Fault(
        id="results-of-another-image",
        broken="the results are of the image that was there before",
        where="run",
        plant=Scenario(),
        check="ResultsRefusedError",
        says="image",
        at="run",
        asked="stale results of another image",
        quick=True,
    ),
    Fault(
        id="results-of-another-plan",
        broken="the results are of another plan with the same cases",
        where="run",
        plant=Scenario(),
        check="ResultsRefusedError",
        says="plan",
        at="run",
        quick=True,
    ),
    Fault(
        id="killed-runner",
        broken="the runner is killed in the middle of a case",
        where="process",
        plant=Switch(name="killed-runner", always=True),
        check="ResultsRefusedError",
        case=DATA,
        says="truncated",
        at="run",
    ),
    Fault(
        id="runner-that-does-nothing",
        broken="the runner ends with 0 and leaves no results, as NeMo-Run's experiment does after a failed job",
        where="process",
        plant=Switch(name="runner-that-does-nothing", always=True),
        check="ResultsRefusedError",
        case=DATA,
        says="missing",
        at="run",
        asked="exit 0 with no results",
    ),
    Fault(
        id="slow-network",
        broken="ranks of one node speak through something slow",
        where="network",
        plant=Scenario(),
        check="bandwidth",
        at="run",
        asked="transport fallen back to sockets",
    ),
    Fault(
        id="noise",
        broken="two runs of the same case do not give the same digits",
        where="process",
        plant=Scenario(),
        case=PIPELINE,
        check="repeats",
        at="case",
    ),
)

FAULTS = (*LIBRARY, *PROCESS, *WHEELS, *RUNS)
BY_ID = {fault.id: fault for fault in FAULTS}


def fault_named(name: str) -> Fault:
    """The entry with this ID."""
    return BY_ID[name]
