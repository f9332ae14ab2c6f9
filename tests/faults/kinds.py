"""What a planted fault is: where it lives, how it gets there, and which check has to find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Where = Literal["library", "wheel", "process", "file", "network", "run"]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Lines of an installed package are other ones; its RECORD has their digest, as that of a wheel built with the bug.

    Attributes:
        changes: the old text, which must occur exactly once, and the new one.
    """

    file: str
    changes: tuple[tuple[str, str], ...]


def edit(file: str, *texts: str) -> Edit:
    """An edit of a file; ``texts`` are the old and the new text of each change, in turn."""
    return Edit(file=file, changes=tuple(zip(texts[::2], texts[1::2], strict=True)))


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A plant of :mod:`envbuild_fault`, which an environment of the tests imports when its interpreter starts.

    It is in force while the fault's own model is trained, or, ``always``, in every process of the run.
    """

    name: str
    always: bool = False

    def request(self, model: str) -> str:
        """What the variable of the switch holds."""
        return self.name if self.always else f"{self.name}@{model}"


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """An installed environment is changed, and its RECORDs are not: a function of :mod:`faults.corruptions`."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is wrong is between plan, run and judge: the test of this fault sets it up itself."""


Plant = Edit | Switch | Corruption | Scenario


@dataclass(frozen=True, kw_only=True)
class Case:
    """The case in which a fault shows, as a row of a matrix has it; ``kind`` names a model of ``matrix.toml``."""

    kind: Literal[
        "gpt",
        "engine",
        "norms",
        "llama3",
        "qwen3",
        "gpt-oss",
        "deepseek-v3",
        "capacity",
        "documents",
        "experts",
        "router-losses",
    ] = "gpt"
    row: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of the catalogue.

    Attributes:
        broken: what is broken, in a sentence.
        check: the code of the check that must find it, or the name of the error that refuses the results.
        text: what the problem's text, or the reason of the refusal, must have in it.
        at: whose problem it is: of the case, of its baseline, or of the run as a whole.
        quick: in ``./dev test --all``; the others run in ``./dev soak`` alone.
    """

    id: str
    broken: str
    where: Where
    plant: Plant = Scenario()
    check: str
    case: Case = field(default_factory=Case)
    text: str = ""
    at: Literal["case", "baseline", "run"] = "case"
    quick: bool = False

    @property
    def model(self) -> str:
        """The model that is trained with it: of its own where the switch must know when to act."""
        return self.id if isinstance(self.plant, Switch) and not self.plant.always else self.case.kind
