"""What `bench_history.py` finds out about each case, read from what `envbuild lock` printed, and its record."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERIFIED_LIMIT = 0.95
DEVIATIONS_MEDIAN_LIMIT = 2
# The modules that a user of the driver begins with.
ENTRY_POINTS = {
    "nemo": ("nemo.collections.llm", "nemo.collections.llm.recipes"),
    "bridge": ("megatron.bridge.recipes", "megatron.bridge.training.pretrain"),
}
# Steps of the command, as its log names them: their seconds are added up.
STEPS = {
    "resolve": re.compile(r"resolve \S+ on \S+"),
    "check": re.compile(r"check the lock"),
    "install": re.compile(r"install phase .*"),
    "import": re.compile(r"import \d+ modules"),
}
_STEP_END = re.compile(r"^  (?P<title>.*): (?:done in|stopped after) (?P<seconds>[0-9.]+) s$")
# What the search prints before it tries something else.
_ANOTHER_TRY = re.compile(r"trying |.*: taking \S+, which stack \S+ names too")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a case.

    Attributes:
        attempts: how many locks the search made, the last one included.
        driver: ``nemo`` or ``bridge``; empty where there is no lock.
        commit: of the leading component; empty for a release.
        verified: the command succeeded, and the driver's entry point was imported.
        verified_in: the base, or the machine, that it was imported in.
        stubbed: packages of which a stub was there, since their wheels were not built.
        step_seconds: of all attempts together, by kind of step.
        envbuild: the commit of envbuild.
    """

    name: str
    exit_code: int
    seconds: float
    attempts: int
    envbuild: str
    driver: str = ""
    base: str = ""
    digest: str = ""
    version: str = ""
    commit: str = ""
    verified: bool = False
    verified_in: str = ""
    stubbed: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    failure: str = ""
    step_seconds: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "deviation_count": len(self.deviations)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Result:
        known = {key: value[key] for key in cls.__dataclass_fields__ if key in value}
        return cls(**{**known, **{key: tuple(known.get(key, ())) for key in ("deviations", "stubbed")}})


def branch(ref: str, results: Iterable[Result]) -> str:
    """The branch that the days are of: Megatron-Bridge's where it drives every lock."""
    drivers = {item.driver for item in results if item.driver}
    return "Megatron-Bridge main" if drivers == {"bridge"} else f"NeMo {ref}"


def attempts(log: str) -> int:
    """How many locks were tried: one more than the times that the search turned to something else."""
    turns, turning = 0, False
    for line in log.splitlines():
        now = _ANOTHER_TRY.match(line) is not None
        turns += now and not turning
        turning = now
    return turns + 1


def step_seconds(log: str) -> dict[str, float]:
    """The seconds of all steps of a kind."""
    found = dict.fromkeys(STEPS, 0.0)
    for line in log.splitlines():
        if end := _STEP_END.match(line):
            for name, title in STEPS.items():
                if title.fullmatch(end["title"]):
                    found[name] += float(end["seconds"])
    return {name: round(seconds, 1) for name, seconds in found.items()}


def failure(log: str) -> str:
    """The first line of a failure, and of its cause."""
    lines = log.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("error: ")), None)
    if start is None:
        return lines[-1].strip() if lines else "nothing was printed"
    cause = next((line.strip() for line in lines[start + 1 :] if line.startswith("  cause: ")), "")
    return "; ".join(filter(None, (lines[start].removeprefix("error: "), cause.removeprefix("cause: "))))


def not_imported(driver: str, verified: Mapping[str, Any] | None) -> list[str]:
    """The modules of the driver's entry point that were not imported; one that was with stubs counts as imported."""
    imported = set((verified or {}).get("imported", ()))
    return [module for module in ENTRY_POINTS[driver] if module not in imported]


@dataclass(frozen=True)
class Spread:
    median: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = [*values]
        return cls(statistics.median(values), max(values)) if values else cls(0, 0)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The numbers that the benchmark is about; of deviations, those of verified locks."""
    good = [item for item in results if item.verified]
    return {
        "cases": len(results),
        "verified": len(good),
        "share_verified": round(len(good) / len(results), 3) if results else 0.0,
        "deviations": asdict(Spread.of(len(item.deviations) for item in good)),
        "attempts": asdict(Spread.of(item.attempts for item in results)),
        "seconds": asdict(Spread.of(item.seconds for item in results)),
    }


def misses(numbers: Mapping[str, Any]) -> list[str]:
    """What of a summary is not as it should be."""
    missed = []
    if numbers["share_verified"] < VERIFIED_LIMIT:
        missed.append(f"verified: {numbers['share_verified']:.0%} (at least {VERIFIED_LIMIT:.0%})")
    if (median := numbers["deviations"]["median"]) > DEVIATIONS_MEDIAN_LIMIT:
        missed.append(f"deviations, median: {median:g} (at most {DEVIATIONS_MEDIAN_LIMIT})")
    return missed


def line(numbers: Mapping[str, Any]) -> str:
    """A summary for people."""
    deviations, seconds = numbers["deviations"], numbers["seconds"]
    return (
        f"{numbers['verified']} of {numbers['cases']} verified ({numbers['share_verified']:.0%}); "
        f"deviations: median {deviations['median']:g}, at most {deviations['largest']:g}; "
        f"seconds: median {seconds['median']:.0f}, at most {seconds['largest']:.0f}"
    )


def table(title: str, results: Sequence[Result], numbers: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    head = (
        "case",
        "verified in",
        "stubs",
        "base",
        "version",
        "deviations",
        "attempts",
        "seconds",
        "failure",
    )
    rows = [
        (
            item.name,
            item.verified_in if item.verified else "**failed**",
            ", ".join(item.stubbed),
            item.base,
            f"{item.version} {item.commit[:12]}".strip(),
            str(len(item.deviations)) if item.digest else "",
            str(item.attempts),
            f"{item.seconds:.0f}",
            item.failure.replace("|", "\\|"),
        )
        for item in results
    ]
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    taken = [f"- {item.name}: {text}" for item in results for text in item.deviations]
    parts = [f"# {title}", line(numbers), "\n".join(lines)]
    if taken:
        parts += ["## Deviations", "\n".join(taken)]
    return "\n\n".join(parts) + "\n"


def write_record(path: Path, title: str, results: Sequence[Result]) -> None:
    numbers = summary(results)
    value = {"about": title, "summary": numbers, "cases": [item.as_json() for item in results]}
    path.write_text(json.dumps(value, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(title, results, numbers))
