"""A case: one row of a matrix with its defaults, the ID made from it, and what it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from envbuild.catalog.catalog import Selection
from envbuild.catalog.fields import Device
from envbuild.catalog.matrix import Matrix, RecipeAs
from envbuild.catalog.model_spec import ModelSpec
from envbuild_smoke.plan.axes import TABLE, CaseAxes, CaseParts, Layout, Settings, Training, axes


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
    def for_selection(cls, selection: Selection, packages: Iterable[str] = ()) -> Capabilities:
        """That of a selection: with the packages of its lock, what the stack names, and what the base brings."""
        target, stack = selection.target, selection.stack
        # Without a lock, as for --print-cases, only the stack and the base say what there will be.
        names = frozenset({*packages, *stack.components, *stack.requirements, *selection.base.provides})
        return cls(device=target.device, sm=target.sm, packages=names)


@dataclass(frozen=True, kw_only=True)
class Case(CaseParts):
    """One certification run. Its ID is made from its fields: ``gpt-fp32-tp2-pp2-do``.

    Attributes:
        words: the axes other than the layout in which it differs from its baseline, and their words in its ID.
        separate: the words for what its training has in the place of the matrix's; its baseline has them too.
    """

    model: str
    settings: Settings
    compare_weights: bool
    words: tuple[tuple[str, str], ...] = ()
    separate: str = ""

    @property
    def id(self) -> str:
        # Only baselines have "baseline" in their ID, and no other case of one process.
        layout = () if self.layout.world_size == 1 and self.words else (self.layout.label,)
        words = (self.model, self.precision, *layout, self.separate, *(word for _, word in self.words))
        return "-".join(filter(None, words))

    @property
    def is_baseline(self) -> bool:
        return self.id == self.baseline_id

    @property
    def baseline_id(self) -> str:
        """The case whose weights and numbers this one must reproduce."""
        return "-".join(filter(None, (self.model, self.precision, "baseline", self.separate)))

    @property
    def compared_with(self) -> str | None:
        """The ID of its baseline; None for a baseline."""
        return None if self.is_baseline else self.baseline_id

    @property
    def micro_batches(self) -> int:
        """How many micro batches each data-parallel rank trains in a step."""
        return self.training.microbatches(self.layout)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in which it differs from its baseline."""
        return (*self.layout.axes, *(axis for axis, _ in self.words))


def same_arithmetic(case: Case, driver: str = "mcore") -> bool:
    """Whether a case must agree with its baseline bit for bit, and not only within a tolerance.

    Data parallelism computes the same micro batches, and adds their gradients in float32 in another order. The sum of
    two numbers does not depend on it; of numbers in bf16 the sum is exact but for a few elements, and what is left is
    too little for weights in bf16. fp8 has scales of its own on each rank.
    """
    # Measured in bf16: equal digit for digit with up to four ranks of several micro batches (megatron-core 0.16.1, 2x
    # and 4x H100, 2x H200, and CPUs with three instruction sets). In fp32 with four micro batches a rank the seventh
    # digit differs (NeMo 2.7.3).
    plain = case.layout == Layout(data=case.layout.data) and all(axis == "nodes" for axis, _ in case.words)
    if not plain or case.layout.data == 1:
        return False
    if case.precision == "bf16" and driver == "mcore":
        return True
    return case.layout.data == 2 and case.micro_batches == 1 and case.precision != "fp8"


# Axes of data parallelism that leave each micro batch's gradients as they are until the step after.
_SUMS_ALONE = {
    "bucket_size",
    "continue_in",
    "distributed_optimizer",
    "nodes",
    "num_distributed_optimizer_instances",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "resume_at",
}


def same_gradients(case: Case, driver: str = "mcore") -> bool:
    """Whether gradients of the first step differ from the baseline's by the order of sums in float32 alone."""
    plain = case.layout == Layout(data=case.layout.data) and all(axis in _SUMS_ALONE for axis, _ in case.words)
    return plain and case.precision == "bf16" and driver == "mcore"


# The flags that cure what a framework's recipe is known to train wrongly.
_CURES = ("overlap_p2p_comm", "sequence_parallel_input_regather")
_USUAL = {axis.name: axis.default for axis in TABLE}
_OF_TRAINING = tuple(axis.name for axis in axes(Training))


@dataclass(frozen=True, kw_only=True)
class ResolvedRow:
    """All that decides a case: its row of the matrix, and what it runs on.

    Attributes:
        values: those that the row names, by axis.
    """

    values: Mapping[str, object]
    model: ModelSpec
    matrix_training: Training
    capabilities: Capabilities

    @classmethod
    def from_matrix(cls, values: Mapping[str, object], matrix: Matrix, capabilities: Capabilities) -> ResolvedRow:
        """A row of a matrix."""
        model = matrix.models[str(values["model"])]
        return cls(values=values, model=model, matrix_training=matrix.training, capabilities=capabilities)

    @property
    def is_plain_recipe(self) -> bool:
        """Whether it trains the framework's recipe without the flags that cure it."""
        return self.values.get("recipe") is RecipeAs.PLAIN

    @property
    def gathers_for_lora(self) -> bool:
        """Whether LoRA's adapters need the input that sequence parallel has split."""
        return self.values.get("sequence") is True and self._training.finetune == "lora"

    @cached_property
    def usual(self) -> Mapping[str, object]:
        """What its baseline has, or any case of its layout: a row that has it has no word for it in its ID."""
        local = self.model.layer_spec == "local"
        return {
            **_USUAL,
            **vars(self.matrix_training),
            # Interleaved stages overlap: with two of them megatron-core's own default trains wrongly
            # (envs/conflicts/interleaved-batched-p2p.toml).
            "overlap_p2p_comm": self._layout.virtual_pipeline > 1,
            "attention_backend": "local" if local else "auto",
            # Without it a gradient of LoRA is lost (envs/conflicts/lora-gathered-norm.toml).
            "sequence_parallel_input_regather": self.gathers_for_lora,
        }

    @cached_property
    def _layout(self) -> Layout:
        return _filled(Layout, self.values)

    @cached_property
    def _training(self) -> Training:
        """How it trains: as the matrix, but for what the row has in its place."""
        own = {name: value for name, value in self.values.items() if name in _OF_TRAINING}
        return _filled(Training, {**vars(self.matrix_training), **own})

    @cached_property
    def case(self) -> Case:
        """The case that it is."""
        values = {**self.usual, **(dict.fromkeys(_CURES, False) if self.is_plain_recipe else {}), **self.values}
        values["batch_p2p_comm"] = not values["overlap_p2p_comm"]
        case = Case(
            model=str(values["model"]),
            layout=self._layout,
            training=self._training,
            settings=_filled(Settings, values),
            compare_weights=False,
            words=tuple(self._differing(values, own_baseline=False)),
            separate="-".join(word for _, word in self._differing(values, own_baseline=True)),
            **vars(_filled(CaseAxes, values)),
        )
        # A baseline's weights would be compared with themselves.
        compared = self.values.get("compare_weights") is True and not case.is_baseline
        return dataclasses.replace(case, compare_weights=compared)

    def _differing(self, values: Mapping[str, object], *, own_baseline: bool) -> Iterator[tuple[str, str]]:
        """The axes in which it is not as usual, with their words."""
        for axis in (*axes(Training), *axes(Settings), *axes(CaseAxes)):
            # Packing must change nothing: the baseline of packed fine-tuning has the same samples unpacked.
            packs_pairs = axis.name == "packed" and self._training.packs_pairs
            if (axis.own_baseline and not packs_pairs) is not own_baseline:
                continue
            value = values[axis.name]
            word = axis.word_for(value)
            if word and (packs_pairs or value != self.usual[axis.name]):
                yield axis.name, word


_T = TypeVar("_T")


def _filled(kind: type[_T], values: Mapping[str, object]) -> _T:
    """A part of a case, with those of the values that are its own."""
    return kind(**{each.name: values[each.name] for each in dataclasses.fields(kind) if each.name in values})  # type: ignore[arg-type]
