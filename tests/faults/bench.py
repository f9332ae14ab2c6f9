"""Certifies environments with faults and without, through the command line, and says what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from faults import spoils
from faults.catalogue import FAULTS
from faults.environments import Environment
from faults.kinds import Edit, Fault, Scenario, Spoil, Switch
from faults.matrices import matrix_of

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.models import Device
from envbuild.certify.cases import Case, expand
from envbuild.certify.ground import Ground

PASSED, FAILED, REFUSED = 0, 7, 13
# Ranks that hang are given this long.
HANGING_SECONDS = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What ``envbuild certify --json`` said."""

    status: int
    document: Mapping[str, Any]
    words: str
    seconds: float

    @property
    def error(self) -> Mapping[str, Any]:
        """The error; empty where there is none."""
        found: Mapping[str, Any] = self.document.get("error") or {}
        return found

    def problems(self, case: str | None) -> list[Mapping[str, str]]:
        """Those of a case, in all its repeats; of the run as a whole for None."""
        if case is None:
            return list(self.error.get("problems", []))
        return [problem for item in self.error.get("cases", []) if item["id"] == case for problem in item["problems"]]

    def finds(self, fault: Fault, case: str | None) -> bool:
        """Whether the check that must find the fault did."""
        if self.error.get("kind") == fault.check:
            return bool(self.error.get("reason") == fault.says)
        return any(item["check"] == fault.check and fault.says in item["text"] for item in self.problems(case))

    def checks(self) -> list[str]:
        """All that was found, by code."""
        items = [*self.problems(None), *(item for case in self.error.get("cases", []) for item in case["problems"])]
        return sorted({item["check"] for item in items}) or [str(self.error.get("kind"))]


@dataclass
class Bench:
    """Where faults are planted and looked for. What was healthy is certified once for all faults that share it."""

    project: Path
    cache: Path
    stack: Environment
    scratch: Path
    done: dict[tuple[object, ...], Outcome] = field(default_factory=dict)

    def cases_of(self, fault: Fault) -> tuple[Case, Case]:
        """The case in which a fault shows, and its baseline."""
        name = self.matrix("one-fault", [fault])
        matrix = Catalog.open(self.project).matrix(name)
        baseline, case = expand(matrix, name, Ground(device=Device.CPU))
        return case, baseline

    def matrix(self, name: str, faults: Iterable[Fault], **settings: Any) -> str:
        """Write a matrix into the project."""
        path = self.project / "envs" / "matrices" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(matrix_of(faults, **settings))
        return name

    def run(self, *arguments: str | Path, variables: Mapping[str, str] | None = None, before: Sequence[str] = ()) -> Outcome:
        """``envbuild certify`` with these words."""
        command = [*before, sys.executable, "-m", "envbuild", "certify", "--stack", "mcore", "--target", "cpu", "--json"]
        own = {"ENVBUILD_CACHE_DIR": str(self.cache), "NO_COLOR": "1", "ENVBUILD_FAULT": "", **(variables or {})}
        began = time.monotonic()
        done = subprocess.run(
            [*command, *arguments], cwd=self.project, env={**os.environ, **own}, capture_output=True, text=True
        )
        seconds = time.monotonic() - began
        document = json.loads(done.stdout) if done.stdout.strip() else {}
        return Outcome(status=done.returncode, document=document, words=done.stderr, seconds=seconds)

    def certify(
        self, environment: Environment, matrix: str, *more: str | Path, variables: Mapping[str, str] | None = None
    ) -> Outcome:
        """Certify an environment with a matrix of this project."""
        words = ("--matrix", matrix, "--in", "venv", "--venv", environment.folder)
        return self.run(*words, *more, variables=variables)

    def planted(self, fault: Fault) -> Outcome:
        """Certify with the fault; those that a switch keeps apart share a run."""
        if isinstance(fault.plant, Switch):
            return self._switched(fault)
        folder = self.scratch / fault.id
        environment = self.stack.copy(folder)
        try:
            variables = _plant(fault, environment)
            return self.certify(environment, self._matrix(fault), "--only", self.cases_of(fault)[0].id, variables=variables)
        finally:
            environment.remove()

    def healthy(self, fault: Fault) -> Outcome:
        """Certify the same cases without it."""
        peers = _peers(fault)
        key = ("healthy", *(peer.id for peer in peers))
        if key not in self.done:
            only = sorted({self.cases_of(peer)[0].id for peer in peers})
            words = [word for name in only for word in ("--only", name)]
            self.done[key] = self.certify(self.stack, self._matrix(fault), *words)
        return self.done[key]

    def _switched(self, fault: Fault) -> Outcome:
        assert isinstance(fault.plant, Switch)
        together = [fault] if fault.plant.always else _peers(fault)
        key = ("planted", *(peer.id for peer in together))
        if key not in self.done:
            asked = [
                peer.plant.name if peer.plant.always else f"{peer.plant.name}@{peer.model}"
                for peer in together
                if isinstance(peer.plant, Switch)
            ]
            only = sorted({self.cases_of(peer)[0].id for peer in together})
            words = [word for name in only for word in ("--only", name)]
            variables = {"ENVBUILD_FAULT": ",".join(asked)}
            self.done[key] = self.certify(self.switched, self._matrix(fault), *words, variables=variables)
        return self.done[key]

    @cached_property
    def switched(self) -> Environment:
        """The environment with the switch."""
        environment = self.stack.copy(self.scratch / "switched")
        environment.add_switch()
        return environment

    def _matrix(self, fault: Fault) -> str:
        group = _group(fault)
        limit = {"time_limit_seconds": HANGING_SECONDS} if group == "hanging" else {}
        return self.matrix(f"faults-{group}", [other for other in FAULTS if _group(other) == group], **limit)


def _plant(fault: Fault, environment: Environment) -> dict[str, str]:
    """Break an environment, and return the variables that belong to that."""
    if isinstance(fault.plant, Edit):
        environment.edit(fault.plant)
        return {}
    assert isinstance(fault.plant, Spoil)
    spoil = getattr(spoils, fault.plant.name)
    variables: dict[str, str] = spoil(environment)
    return variables


def _group(fault: Fault) -> str:
    """Faults of a group have a matrix in common."""
    if fault.check == "timeout":
        return "hanging"
    return "process" if isinstance(fault.plant, Switch) and not fault.plant.always else "library"


def _peers(fault: Fault) -> list[Fault]:
    """The faults that it shares healthy runs with: of its group, and as quick as it is."""
    return [
        other
        for other in FAULTS
        if not isinstance(other.plant, Scenario) and (_group(other), other.quick) == (_group(fault), fault.quick)
    ]
