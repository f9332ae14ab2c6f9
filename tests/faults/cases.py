"""The cases in which faults show; the smallest that have what is broken."""

from __future__ import annotations

from faults.kinds import Case

DATA = Case(row={"data": 2})
OVER_NODES = Case(row={"data": 2, "nodes": 2})
TENSOR = Case(row={"tensor": 2})
PIPELINE = Case(row={"pipeline": 2})
# With two micro batches a pipeline of two stages is never in the phase that the fault is in.
INTERLEAVED = Case(row={"pipeline": 2, "virtual_pipeline": 2, "global_batch_size": 8})
SEQUENCE = Case(kind="norms", row={"tensor": 2, "sequence": True})
CONTEXT = Case(row={"context": 2})
EXPERTS = Case(kind="experts", row={"data": 2, "expert": 2})
CLIPPED_EXPERTS = Case(kind="experts", row={"data": 2, "expert": 2, "clip_grad_norm": 0.1})
EXPERTS_TWICE = Case(kind="experts", row={"data": 4, "expert": 2, "global_batch_size": 8})
SHARDED = Case(row={"data": 2, "distributed_optimizer": True})
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 4000}
OVERLAPPED = Case(row={"data": 2, **BUCKETS})
GATHERED = Case(row={"data": 2, "distributed_optimizer": True, "overlap_param_gather": True, **BUCKETS})
DECAYED = Case(row={"data": 2, "distributed_optimizer": True, "weight_decay": 0.1, "compare_weights": True})
TWO_RATES = Case(row={"data": 2, "distributed_optimizer": True, "decoupled_lr": 5e-4})
PER_TOKEN = Case(row={"data": 2, "loss_mask": "uneven", "calculate_per_token_loss": True})
EXPERTS_OVERLAPPED = Case(kind="experts", row={"data": 4, "expert": 2, "global_batch_size": 8, **BUCKETS})
ROUTER_LOSSES_IN_STAGES = Case(kind="router-losses", row={"pipeline": 2})
ROUTER_LOSSES_PER_TOKEN = Case(kind="router-losses", row={"data": 2, "calculate_per_token_loss": True})
ROUTER_LOSSES = Case(kind="router-losses", row={"tensor": 2, "sequence": True})
DOCUMENTS = Case(kind="documents", row={"data": 2})
DOCUMENTS_RESUMED = Case(kind="documents", row={"data": 2, "resume_at": 2})
CONTINUED = Case(row={"tensor": 2, "resume_at": 2, "continue_in": {"pipeline": 2}})
# Learning rates of 3e-4, 1e-3 and 5.5e-4, and the least one, 1e-4.
SCHEDULE = {
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 1,
    "lr_warmup_init": 3e-4,
    "lr_decay_iters": 3,
    "min_lr": 1e-4,
    "adam_beta2": 0.95,
    "weight_decay": 0.5,
    "start_weight_decay": 0.1,
    "weight_decay_incr_style": "cosine",
}
SCHEDULED = Case(row={"data": 2, **SCHEDULE})
SCHEDULED_AGAIN = Case(row={"data": 2, "resume_at": 2, **SCHEDULE})
AVERAGED = Case(row={"data": 2, "average_in_collective": True})
AVERAGED_EXPERTS = Case(
    kind="experts", row={"data": 4, "expert": 2, "global_batch_size": 8, "average_in_collective": True}
)
REDUCED_IN_FP32 = Case(row={"data": 2, "precision": "bf16"})
SCALED = Case(row={"data": 2, "precision": "fp16"})
SCALED_AGAIN = Case(row={"data": 2, "precision": "fp16", "resume_at": 2})
FUSED_ACTIVATION = Case(kind="norms", row={"bias_activation_fusion": True})
FUSED_LOSS = Case(row={"tensor": 2, "precision": "bf16", "cross_entropy_fusion": "native"})
RESUMED = Case(row={"data": 2, "resume_at": 2})
WEIGHTS = Case(row={"pipeline": 2, "compare_weights": True})
MIXED = Case(row={"data": 2, "precision": "bf16"})
MIXED_SHARDED = Case(row={"data": 2, "precision": "bf16", "distributed_optimizer": True})
