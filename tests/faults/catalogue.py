"""The catalogue of planted faults: what can be wrong with a training environment, and the check that must say so."""

from __future__ import annotations

from faults.kinds import Case, Edit, Fault, Scenario, Spoil, Switch

CORE = "megatron/core"
SCHEDULES = f"{CORE}/pipeline_parallel/schedules.py"
BUFFERS = f"{CORE}/distributed/param_and_grad_buffer.py"
DATA_PARALLEL = f"{CORE}/distributed/distributed_data_parallel.py"
FINALIZE = f"{CORE}/distributed/finalize_model_grads.py"
OPTIMIZER = f"{CORE}/optimizer/optimizer.py"

BASELINE = Case()
DATA = Case(row={"data": 2})
TENSOR = Case(row={"tensor": 2})
PIPELINE = Case(row={"pipeline": 2})
INTERLEAVED = Case(row={"pipeline": 2, "virtual_pipeline": 2})

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
            changes=(("    torch.distributed.all_reduce(input_.contiguous(), group=group)\n\n    return input_\n", "    return input_\n"),),
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
        check="parity-loss",
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
        at="baseline",
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
)

FAULTS = (*LIBRARY, *PROCESS, *WHEELS)
