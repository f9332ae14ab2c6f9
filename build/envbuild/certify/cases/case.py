"""A case: one row of a matrix with its defaults, the ID made from it, and what it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from envbuild.catalog.catalog import Selection
from envbuild.catalog.fields import Device
from envbuild.catalog.matrix import (
    AttentionBackend,
    CaseSpec,
    Dispatcher,
    Finetune,
    Fp8Recipe,
    LayoutSpec,
    Matrix,
    Precision,
    RecipeAs,
    Recompute,
    Training,
)
from envbuild.catalog.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What cases run on.

    Attributes:
        sm: the target's compute capabilities ("90", "100a"); empty on the CPU.
        packages: the names of the packages in the environment.
    """

    device: Device
    sm: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset()

    @classmethod
    def of(cls, selection: Selection, packages: Iterable[str] = ()) -> Capabilities:
        """That of a selection: with the packages of its lock, what the stack names, and what the base brings."""
        target, stack = selection.target, selection.stack
        # Without a lock, as for --print-cases, only the stack and the base say what there will be.
        names = frozenset({*packages, *stack.components, *stack.requirements, *selection.base.provides})
        return cls(device=target.device, sm=target.sm, packages=names)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes: how many processes share what. Expert parallelism has the ranks of data x context."""

    data: int = 1
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @classmethod
    def of(cls, spec: LayoutSpec) -> Layout:
        return cls(**{name: getattr(spec, name) for name in cls.__dataclass_fields__})

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def label(self) -> str:
        """The layout in the field's short words: ``tp2-pp2``; ``baseline`` for one process."""
        sizes = (
            ("dp", self.data),
            ("tp", self.tensor),
            ("sp", int(self.sequence)),
            ("pp", self.pipeline),
            ("vp", self.virtual_pipeline),
            ("cp", self.context),
            ("ep", self.expert),
        )
        # True as a number is 1: a size counts from 2 on, and sp, which is on or off, from 1 on.
        words = [word if word == "sp" else f"{word}{size}" for word, size in sizes if size > (word != "sp")]
        # As many as tensor without it: also 1 is another layout.
        words += [f"etp{self.expert_tensor}"] if self.expert_tensor is not None else []
        return "-".join(words) or "baseline"

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that split something."""
        split = [name for name, size in vars(self).items() if name != "expert_tensor" and size > (name != "sequence")]
        return (*split, *(("expert_tensor",) if self.expert_tensor is not None else ()))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of megatron-core that change how a case computes, and not what."""

    overlap_p2p_comm: bool
    attention_backend: AttentionBackend
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    bucket_size: int | None
    recompute: Recompute
    parallel_output: bool
    num_distributed_optimizer_instances: int
    moe_token_dispatcher_type: Dispatcher | None
    moe_grouped_gemm: bool
    sequence_parallel_input_regather: bool
    fp8_recipe: Fp8Recipe | None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One certification run. Its ID is made from its fields: ``gpt-fp32-tp2-pp2-do``.

    Attributes:
        words: the axes other than the layout in which it differs from its baseline, and their words in its ID.
        separate: the words for what its training has in the place of the matrix's; its baseline has them too.
    """

    model: str
    precision: Precision
    layout: Layout
    training: Training
    settings: Settings
    resume_at: int | None
    continue_in: Layout | None
    compare_weights: bool
    words: tuple[tuple[str, str], ...] = ()
    separate: str = ""

    @property
    def id(self) -> str:
        # Only baselines have "baseline" in their ID, and no other case of one process.
        layout = () if self.layout.world_size == 1 and self.words else (self.layout.label,)
        words = (self.model, self.precision.value, *layout, self.separate, *(word for _, word in self.words))
        return "-".join(filter(None, words))

    @property
    def is_baseline(self) -> bool:
        return self.id == self.baseline_id

    @property
    def baseline_id(self) -> str:
        """The case whose weights and numbers this one must reproduce."""
        return "-".join(filter(None, (self.model, self.precision.value, "baseline", self.separate)))

    @property
    def compared_with(self) -> str | None:
        """The ID of its baseline; None for a baseline."""
        return None if self.is_baseline else self.baseline_id

    @property
    def world_size(self) -> int:
        """Number of processes, each with a GPU of its own where there are any."""
        return self.layout.world_size

    @property
    def micro_batches(self) -> int:
        """How many micro batches each data-parallel rank trains in a step."""
        return self.training.rows // (self.training.micro_batch_size * self.layout.data)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in which it differs from its baseline."""
        return (*self.layout.axes, *(axis for axis, _ in self.words))


def same_arithmetic(case: Case) -> bool:
    """Whether a case must agree with its baseline bit for bit, and not only within a tolerance.

    With two data-parallel ranks of one micro batch each, the baseline adds the gradients of the same two micro batches,
    and the sum of two numbers does not depend on their order. fp8 has scales of its own on each rank.
    """
    # Measured: equal digit for digit on two H200 in bf16 (megatron-core 0.16.1). With four micro batches a rank the
    # seventh digit differs (NeMo 2.7.3).
    plain = case.layout == Layout(data=2) and not case.words
    return plain and case.micro_batches == 1 and case.precision is not Precision.FP8


# What a row may have in the place of the matrix's training.
_OWN_TRAINING = tuple(name for name in Training.model_fields if name in CaseSpec.model_fields)


@dataclass(frozen=True, kw_only=True)
class ResolvedRow:
    """All that decides a case: its row of the matrix, and what it runs on."""

    spec: CaseSpec
    model: ModelSpec
    matrix_training: Training
    capabilities: Capabilities

    @classmethod
    def of(cls, spec: CaseSpec, matrix: Matrix, capabilities: Capabilities) -> ResolvedRow:
        model = matrix.models[spec.model]
        return cls(spec=spec, model=model, matrix_training=matrix.training, capabilities=capabilities)

    @cached_property
    def training(self) -> Training:
        """How it trains: as the matrix, but for what the row has in its place."""
        own = {name: value for name in _OWN_TRAINING if (value := getattr(self.spec, name)) is not None}
        return self.matrix_training.model_copy(update=own)

    @property
    def overlap_p2p_comm(self) -> bool:
        # Interleaved stages overlap by default: with two stages megatron-core's own default trains wrongly
        # (envs/conflicts/interleaved-batched-p2p.toml).
        stated = self.spec.overlap_p2p_comm
        return self.spec.virtual_pipeline > 1 and self._cured if stated is None else stated

    @property
    def sequence_parallel_input_regather(self) -> bool:
        # Without it a gradient of LoRA is lost (envs/conflicts/lora-gathered-norm.toml).
        stated = self.spec.sequence_parallel_input_regather
        return self.gathers_for_lora and self._cured if stated is None else stated

    @property
    def _cured(self) -> bool:
        return self.spec.recipe is not RecipeAs.PLAIN

    @property
    def gathers_for_lora(self) -> bool:
        """Whether LoRA's adapters need the input that sequence parallel has split."""
        return self.spec.sequence and self.training.finetune is Finetune.LORA

    @property
    def usual_attention(self) -> AttentionBackend:
        """The attention of the model's baselines."""
        local = self.model.layer_spec is LayerSpec.LOCAL
        return AttentionBackend.LOCAL if local else AttentionBackend.AUTO

    @property
    def attention_backend(self) -> AttentionBackend:
        return self.spec.attention_backend or self.usual_attention

    @cached_property
    def case(self) -> Case:
        """The case that it is."""
        spec = self.spec
        settings = {name: getattr(spec, name) for name in Settings.__dataclass_fields__}
        settings |= {
            "overlap_p2p_comm": self.overlap_p2p_comm,
            "attention_backend": self.attention_backend,
            "sequence_parallel_input_regather": self.sequence_parallel_input_regather,
        }
        case = Case(
            model=spec.model,
            precision=spec.precision,
            layout=Layout.of(spec),
            training=self.training,
            settings=Settings(**settings),
            resume_at=spec.resume_at,
            continue_in=Layout.of(spec.continue_in) if spec.continue_in else None,
            compare_weights=False,
            words=tuple(self._words()),
            separate="-".join(self._separate()),
        )
        # A baseline's weights would be compared with themselves.
        return case if case.is_baseline else dataclasses.replace(case, compare_weights=spec.compare_weights)

    def _separate(self) -> list[str]:
        """The words for what decides the mathematics and is not the matrix's."""
        own, usual = self.training, self.matrix_training
        words = {
            "global_batch_size": f"gb{own.global_batch_size}",
            "clip_grad_norm": f"clip{own.clip_grad_norm:g}",
            "weight_decay": f"wd{own.weight_decay:g}",
            "decoupled_lr": f"dlr{own.decoupled_lr:g}" if own.decoupled_lr else "",
            "loss_mask": f"mask-{own.loss_mask.value}",
            "calculate_per_token_loss": "ptl" if own.calculate_per_token_loss else "mbl",
            "packed": "packed" if own.packed else "whole",
            "finetune": own.finetune.value if own.finetune is not Finetune.NONE else "pretrain",
        }
        # Packing must change nothing: the baseline of packed fine-tuning has the same samples unpacked.
        if own.packs_pairs:
            del words["packed"]
        found = [word for name, word in words.items() if getattr(own, name) != getattr(usual, name)]
        return [*found, *([self.spec.fp8_recipe.value] if self.spec.fp8_recipe else [])]

    def _words(self) -> list[tuple[str, str]]:
        spec, micro_batch_size = self.spec, self.training.micro_batch_size
        instances = spec.num_distributed_optimizer_instances
        dispatcher, continued = spec.moe_token_dispatcher_type, spec.continue_in
        possible = [
            (micro_batch_size != self.matrix_training.micro_batch_size, "micro_batch_size", f"mb{micro_batch_size}"),
            (self.training.packs_pairs, "packed", "packed"),
            (spec.distributed_optimizer, "distributed_optimizer", "do"),
            (instances > 1, "num_distributed_optimizer_instances", f"oi{instances}"),
            (spec.overlap_grad_reduce, "overlap_grad_reduce", "ogr"),
            (spec.overlap_param_gather, "overlap_param_gather", "opg"),
            (spec.bucket_size is not None, "bucket_size", f"bk{spec.bucket_size}"),
            # Without interleaved stages it is off in every case (rules.py).
            (spec.virtual_pipeline > 1 and not self.overlap_p2p_comm, "overlap_p2p_comm", "bp2p"),
            (spec.recompute is not Recompute.NONE, "recompute", f"rc-{spec.recompute.value}"),
            (
                self.attention_backend is not self.usual_attention,
                "attention_backend",
                f"attn-{self.attention_backend.value}",
            ),
            (not spec.parallel_output, "parallel_output", "gathered"),
            (dispatcher is not None, "moe_token_dispatcher_type", dispatcher.value if dispatcher else ""),
            (spec.moe_grouped_gemm, "moe_grouped_gemm", "grouped"),
            (
                self.gathers_for_lora and not self.sequence_parallel_input_regather,
                "sequence_parallel_input_regather",
                "gathered-norm",
            ),
            (spec.resume_at is not None, "resume_at", f"resume{spec.resume_at}"),
            (continued is not None, "continue_in", f"in-{Layout.of(continued).label}" if continued else ""),
        ]
        return [(axis, word) for differs, axis, word in possible if differs]
