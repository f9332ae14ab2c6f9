"""A matrix: the certification cases of a stack, how they train, and how closely they must agree."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import Field

from envbuild.catalog.fields import Device, Model, Name

# With a vocabulary of 1 every loss is 0, whatever is computed; this many leave something to compare.
LEAST_VOCABULARY = 32


class GptModel(Model):
    """A small GPT for certification, in megatron-core's words."""

    kind: Literal["gpt"]
    num_layers: Annotated[int, Field(gt=0, le=1024)]
    hidden_size: Annotated[int, Field(gt=0, le=65536)]
    num_attention_heads: Annotated[int, Field(gt=0, le=1024)]
    sequence_length: Annotated[int, Field(gt=0, le=131072, description="tokens a sample")]
    vocabulary_size: Annotated[int, Field(ge=LEAST_VOCABULARY, le=2**20)]


class Training(Model):
    """How every case of a matrix trains."""

    steps: Annotated[int, Field(gt=0, le=100_000)]
    micro_batch_size: Annotated[int, Field(gt=0, le=1024, description="samples")]
    global_batch_size: Annotated[int, Field(gt=0, le=65536, description="samples")]
    learning_rate: Annotated[float, Field(gt=0)]
    clip_grad_norm: Annotated[float, Field(gt=0)]
    seed: Annotated[int, Field(ge=0, lt=2**32)]


class Tolerance(Model):
    """How far a step's numbers may be from the baseline's, relative to the baseline's."""

    loss_relative: Annotated[float, Field(ge=0, le=0.01)]
    grad_norm_relative: Annotated[float, Field(ge=0, le=0.02)]


class Precision(str, Enum):
    """The number format a case trains in."""

    FP32 = "fp32"


class CaseSpec(Model):
    """One row of a matrix: the axes in which it differs from the baseline."""

    model: Name
    precision: Precision = Precision.FP32
    data: Annotated[int, Field(ge=1, le=1024)] = 1
    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    virtual_pipeline: Annotated[int, Field(ge=1, le=1024, description="model chunks a pipeline stage")] = 1
    overlap_p2p_comm: bool | None = Field(
        default=None, description="megatron-core's flag; without it the setting that is right for the layout"
    )


class Matrix(Model):
    """The certification cases of a stack (``envs/matrices/*.toml``)."""

    summary: str
    devices: tuple[Device, ...] = Field(min_length=1, description="the devices these cases can run on")
    time_limit_seconds: Annotated[int, Field(gt=0, le=604_800, description="for each case")]
    models: dict[Name, GptModel] = Field(min_length=1)
    training: Training
    tolerance: dict[Precision, Tolerance]
    cases: tuple[CaseSpec, ...] = Field(min_length=1)
