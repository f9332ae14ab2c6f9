"""What the drift check reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class FindingKind(str, Enum):
    """What does not fit."""

    MISSING_MODULE = "missing-module"
    MISSING_NAME = "missing-name"
    UNEXPECTED_KEYWORD = "unexpected-keyword"
    TOO_MANY_ARGUMENTS = "too-many-arguments"
    MISSING_ARGUMENT = "missing-argument"
    NOT_READ = "not-read"


class Severity(str, Enum):
    """Whether the code fails where it stands, or has provided for the failure."""

    BREAKS = "breaks"
    GUARDED = "guarded"


class Weight(str, Enum):
    """What a finding does to the stack that it is found in.

    ``REFUSES``: code that the stack reaches fails. ``WARNS``: the code fails and nothing reaches it, or a feature is
    off. ``PASSES``: the code has provided for what is missing.
    """

    REFUSES = "refuses"
    WARNS = "warns"
    PASSES = "passes"


class Moment(str, Enum):
    """When the line runs: while its module is imported, or when a function is called."""

    IMPORT = "import"
    FUNCTION = "function"


@dataclass(frozen=True)
class Finding:
    """One place where a consumer asks for what the provider does not have.

    Attributes:
        consumer: name and version, such as ``nemo-toolkit 2.7.3``.
        provider: the same, of the package that lacks something.
        file: path inside the consumer's package, as its wheel has it.
        name: the dotted name in the provider that is missing, or whose signature does not fit.
        detail: one sentence: what is asked, and what there is.
        why: the reason for the severity.
        at: whether importing the module is enough to run the line.
        within: the class and function it is in, such as ``Strategy.setup``; empty at module level.
        unreached: why the stack does not reach that function; empty where it may.
        optional: modules of other packages that the code asks for before it runs the line.
        lost: names that a guarded import leaves undefined or false: the features that go with it.
    """

    kind: FindingKind
    consumer: str
    provider: str
    file: str
    line: int
    name: str
    detail: str
    severity: Severity
    why: str
    at: Moment
    within: str = ""
    unreached: str = ""
    lost: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def weight(self) -> Weight:
        """Whether it refuses a stack, warns, or is of no consequence."""
        if self.severity is Severity.BREAKS:
            return Weight.WARNS if self.unreached else Weight.REFUSES
        return Weight.WARNS if self.lost or self.kind is FindingKind.NOT_READ else Weight.PASSES

    @property
    def reason(self) -> str:
        """The reason for the weight."""
        if self.lost:
            return f"{self.why}, without: {', '.join(self.lost)}"
        return self.unreached or self.why


def read_finding(fields: Mapping[str, Any]) -> Finding:
    """A finding from its fields as JSON has them."""
    typed = {
        "kind": FindingKind(fields["kind"]),
        "severity": Severity(fields["severity"]),
        "at": Moment(fields["at"]),
        "lost": tuple(fields["lost"]),
        "optional": tuple(fields["optional"]),
    }
    return Finding(**{**fields, **typed})
