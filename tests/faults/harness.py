"""Certifies environments with faults and without, through the command line, and returns what it found."""

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

from faults import corruptions
from faults.catalogue import FAULTS
from faults.environments import Environment
from faults.kinds import Corruption, Edit, Fault, Scenario, Switch
from faults.matrices import matrix_of

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import Device
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.expansion import expand

PASSED, FAILED, CANNOT_RUN, REFUSED = 0, 7, 8, 13
# Ranks that hang are given this long.
HANGING_SECONDS = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What ``envbuild certify --json`` printed."""

    status: int
    document: Mapping[str, Any]
    words: str
    seconds: float

    @property
    def error(self) -> Mapping[str, Any]:
        """The error; empty where there is none."""
        error: Mapping[str, Any] = self.document.get("error") or {}
        return error

    def problems(self, case: str | None) -> list[Mapping[str, str]]:
        """Those of a case, in all its repeats; of the run as a whole for None."""
        if case is None:
            return list(self.error.get("problems", []))
        return [problem for row in self.error.get("cases", []) if row["id"] == case for problem in row["problems"]]

    def finds(self, fault: Fault, case: str | None) -> bool:
        """Whether the check that must find the fault did."""
        if self.error.get("kind") == fault.check:
            return bool(self.error.get("reason") == fault.text)
        return any(problem["check"] == fault.check and fault.text in problem["text"] for problem in self.problems(case))

    def checks(self) -> list[str]:
        """All that was found, by code."""
        cases = self.error.get("cases", [])
        problems = [*self.problems(None), *(problem for case in cases for problem in case["problems"])]
        return sorted({problem["check"] for problem in problems}) or [str(self.error.get("kind"))]


@dataclass
class Harness:
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
        baseline, case = expand(matrix, name, Capabilities(device=Device.CPU))
        return case, baseline

    def matrix(self, name: str, faults: Iterable[Fault], **settings: Any) -> str:
        """Write a matrix into the project."""
        path = self.project / "envs" / "matrices" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(matrix_of(faults, **settings))
        return name

    def run(
        self, *arguments: str | Path, variables: Mapping[str, str] | None = None, before: Sequence[str] = ()
    ) -> Outcome:
        """``envbuild certify`` with these words."""
        words = ["certify", "--stack", "mcore", "--target", "cpu", "--json", *arguments]
        own = {"ENVBUILD_CACHE_DIR": str(self.cache), "NO_COLOR": "1", "ENVBUILD_FAULT": "", **(variables or {})}
        began = time.monotonic()
        command = [*before, sys.executable, "-m", "envbuild", *words]
        done = subprocess.run(command, cwd=self.project, env={**os.environ, **own}, capture_output=True, text=True)
        seconds = time.monotonic() - began
        document = json.loads(done.stdout) if done.stdout.strip() else {}
        return Outcome(status=done.returncode, document=document, words=done.stderr, seconds=seconds)

    def certify(
        self, environment: Environment, matrix: str, *more: str | Path, variables: Mapping[str, str] | None = None
    ) -> Outcome:
        """Certify an environment with a matrix of this project.

        As this shell's: of --in venv the files are compared with the lock's wheels, which finds any fault in a library
        whatever it computes.
        """
        path = f"{environment.python.parent}{os.pathsep}{os.environ['PATH']}"
        return self.run("--matrix", matrix, "--in", "here", *more, variables={**(variables or {}), "PATH": path})

    def planted(self, fault: Fault) -> Outcome:
        """Certify with the fault; those that a switch keeps apart share a run."""
        if isinstance(fault.plant, Switch):
            together = [fault] if fault.plant.always else peers(fault)
            requests = ",".join(
                other.plant.request(other.model) for other in together if isinstance(other.plant, Switch)
            )
            return self._once("planted", together, self.switched, {"ENVBUILD_FAULT": requests})
        environment = self.stack.copy(self.scratch / fault.id)
        try:
            return self._once("planted", [fault], environment, _plant(fault, environment))
        finally:
            environment.remove()

    def healthy(self, fault: Fault) -> Outcome:
        """Certify the same cases without it, with those of its peers."""
        return self._once("healthy", peers(fault), self.stack, {})

    def _once(
        self, kind: str, faults: Sequence[Fault], environment: Environment, variables: Mapping[str, str]
    ) -> Outcome:
        key = (kind, *(fault.id for fault in faults))
        if key not in self.done:
            limit = {"time_limit_seconds": HANGING_SECONDS} if faults[0].check == "timeout" else {}
            matrix = self.matrix(f"faults-{faults[0].id}", faults, **limit)
            self.done[key] = self.certify(environment, matrix, variables=variables)
        return self.done[key]

    @cached_property
    def switched(self) -> Environment:
        """The environment with the switch."""
        environment = self.stack.copy(self.scratch / "switched")
        environment.add_switch()
        return environment


def _plant(fault: Fault, environment: Environment) -> dict[str, str]:
    """Break an environment, and return the variables that belong to that."""
    if isinstance(fault.plant, Edit):
        environment.edit(fault.plant)
        return {}
    assert isinstance(fault.plant, Corruption)
    corrupt = getattr(corruptions, fault.plant.name)
    variables: dict[str, str] = corrupt(environment)
    return variables


def peers(fault: Fault) -> list[Fault]:
    """The faults that share a healthy run with it: as quick as it is, with the same time limit and kind of plant."""

    def kind(other: Fault) -> tuple[bool, ...]:
        with_own_model = isinstance(other.plant, Switch) and not other.plant.always
        return other.quick, other.check == "timeout", with_own_model

    return [other for other in FAULTS if not isinstance(other.plant, Scenario) and kind(other) == kind(fault)]
