"""What a certification finds: verdicts, their numbers and their problems.

They are the form in which the judge, certificates, reports and ``--json`` show them.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import ConfigDict, Field, JsonValue

from envbuild.catalog.fields import Moment, TomlModel
from envbuild.core.validation import Digest
from envbuild_smoke.results import Step

# Programs read these names: in certificates, as types of JUnit, and with --json (docs/reference/certify.md).
Check = Literal[
    "parity-loss",
    "parity-grad-norm",
    "parity-gradients",
    "parity-weights",
    "data-parallel-bits",
    "steps",
    "not-finite",
    "timeout",
    "rank-exception",
    "rank-signal",
    "rank-exit",
    "baseline",
    "not-reported",
    "observed",
    "environment",
    "bandwidth",
    "transport",
    "bad-node",
    "repeats",
    "nodes",
    "node-numbers",
    "node-slow",
    "reference",
    "samples",
    "hugging-face",
    "hardware",
]
CHECKS: tuple[str, ...] = get_args(Check)


class Problem(TomlModel):
    """Why a case or a run did not pass: the check that failed, and what it found."""

    check: Check
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


class Numbers(TomlModel):
    """One number for each thing that is compared; None where it was not."""

    loss: float | None = None
    grad_norm: float | None = None
    weights: float | None = None
    gradients: float | None = None


class Spread(TomlModel):
    """How far a baseline's numbers move when each of its weights moves by one unit in the last place, relative to them.

    Attributes:
        runs: how many times the weights were moved.
        loss, grad_norm: up to each step, the largest of all runs.
        weights: of the final weights, the largest of all tensors; None where it is not finite.
        caught: the relative error that is caught in the norm of the gradient of half of the tensors.
    """

    runs: int = Field(ge=1)
    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    weights: float | None
    caught: float | None = None


class ReferenceNumbers(TomlModel):
    """One number for each thing of a baseline that is compared with the reference; None where it was not."""

    loss: float | None = None
    grad_norm: float | None = None
    activations: float | None = None
    gradients: float | None = None
    weights: float | None = None


class ReferenceVerdict(TomlModel):
    """How a baseline compares with the reference, a model that shares no code with the library.

    Attributes:
        not_compared: why it could not be compared; empty where it was.
        tensors: how many tensors were compared.
    """

    not_compared: str = ""
    tensors: int = Field(default=0, ge=0)
    largest_relative_difference: ReferenceNumbers = ReferenceNumbers()
    tolerance: ReferenceNumbers = ReferenceNumbers()


class Reused(TomlModel):
    """The earlier run that a case's numbers are from, in certificates of versions that reused single verdicts."""

    model_config = ConfigDict(populate_by_name=True)

    # The key is a keyword of Python.
    from_: Moment = Field(alias="from", description="when that run measured them")
    run: str


class NotVouchedCase(TomlModel):
    """A case that is known to train wrongly: whether it ran, and what the first of its problems was."""

    id: str
    result: Literal["not run", "failed", "passed"]
    problem: str = ""


class NotVouched(TomlModel):
    """What the locked versions are known to train wrongly, whatever the cases that ran have shown."""

    name: str = Field(description="of the entry in envs/conflicts/")
    # Certificates of earlier versions have neither.
    digest: Digest | None = Field(default=None, description="of the entry as it was")
    is_shipped: bool | None = Field(default=None, description="envbuild shipped it; else the project's own")
    versions: str = Field(description="the locked packages that it is about")
    what: str = Field(description="the layout or setting, by fields of a case")
    why: str
    evidence: str
    fix: str
    fixed_in: str | None = Field(description="the first release that is known to have the fix")
    cases: tuple[NotVouchedCase, ...] = Field(description="of the matrix")


class CaseVerdict(TomlModel):
    """The judgement of one repeat of a case, with its numbers.

    A baseline has no ``baseline``, no differences and no tolerance; it has ``reference``, None in certificates of
    judges before 7, and ``spread``, None in those of judges before 8. ``tolerance`` has the widest bands, which are
    those of the last step; of gradients the difference and the band of the tensor that is nearest to its own.
    ``known_wrong`` has the entries of envs/conflicts/ that are about it. Over several nodes each of them has a repeat.
    """

    id: str
    baseline: str | None
    repeat: int = Field(default=1, ge=1)
    passed: bool
    problems: tuple[Problem, ...]
    largest_relative_difference: Numbers
    tolerance: Numbers = Numbers()
    seconds: float | None
    devices: tuple[str | int, ...] = ()
    nodes: tuple[int, ...] = (0,)
    steps: tuple[Step, ...]
    observed: dict[str, JsonValue] | None = None
    reused: Reused | None = Field(default=None, exclude=True)
    reference: ReferenceVerdict | None = None
    spread: Spread | None = None
    known_wrong: tuple[str, ...] = ()
