"""A placed image of a few bytes and a runner that can be made to fail: all of `certify` but the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.fake_runner import results_of, write
from helpers.notes import Notes

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.certify.cases.selection import WantedCases
from envbuild.certify.certificate.envelope import SignedBytes, decode, encode
from envbuild.certify.certificate.statement import CERTIFICATE_FILE, seal_of
from envbuild.certify.certify import CertifyOptions, certify
from envbuild.certify.issue import Certification
from envbuild.certify.run.executors import MachineOptions
from envbuild.certify.run.job import CertifyJob, CertifyRequest
from envbuild.core.digests import canonical_json, sha256_file
from envbuild.core.process import Finished
from envbuild.core.progress import Reporter, SilentReporter
from envbuild.image.output import PlacedImage
from envbuild.launch.executors import Task
from envbuild.launch.launchers import Placement
from envbuild.lock.lockfile import LockDirectory
from envbuild.store.local import LocalStore


@dataclass
class World:
    """A project with a lock and an image, where `certify` can be called; ``faults`` go to the fake runner."""

    project: Path
    selection: Selection
    lock: LockDirectory
    image: PlacedImage
    # A baseline and one case; () for the whole matrix, which takes four times as long.
    only: tuple[str, ...] = ("gpt-fp32-tp2",)
    faults: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    spoil: Callable[[Path], None] = lambda results: None
    status: int = 0
    output: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    reporter: Notes = field(default_factory=Notes)

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.project / "cache", SilentReporter())

    @property
    def context(self) -> Context:
        return Context(store=self.store, site=load_site(), reporter=self.reporter)

    def request(self, **options: Any) -> CertifyRequest:
        """A request; ``options`` are its fields, and those of the wanted cases."""
        wanted = WantedCases(only=options.pop("only", self.only))
        if "place" in options:
            options["place"] = Placement.parse(options["place"])
        fields: dict[str, Any] = {
            "selection": self.selection,
            "lock": self.lock,
            "image": self.image,
            "matrix_name": "certify-quick",
            "wanted": wanted,
            "out_dir": self.project / "out",
        }
        return CertifyRequest(**(fields | options))

    def certify(self, **options: Any) -> Certification:
        """Certify; ``options`` are fields of the request, of the certify options and of the machine options."""
        machine = {name: options.pop(name) for name in ("runtime", "venv", "gpus", "isolation") if name in options}
        own = {name: options.pop(name) for name in ("fresh", "resume", "signer") if name in options}
        chosen = CertifyOptions(machine=MachineOptions(**machine), **own)
        return certify(self.request(**options), self.context, chosen)

    def certificates(self) -> list[Path]:
        return list((self.project / "out" / "certificates").rglob(CERTIFICATE_FILE))

    def open_executor(self, job: CertifyJob, machine: MachineOptions, reporter: Reporter) -> FakeExecutor:
        """In the place of a real executor."""
        return FakeExecutor(self, machine.runtime or "loop")


@dataclass
class FakeExecutor:
    """Runs no image: writes what the runner would have written there."""

    world: World
    name: str
    python: str = "/usr/bin/python3"

    def joins(self) -> bool:
        return False

    def forget(self) -> None:
        pass

    def run(self, task: Task) -> Finished:
        plan = task.plan.read_bytes()
        self.world.calls.append(
            {"runtime": self.name, "plan": json.loads(plan), "arguments": task.arguments, "task": task}
        )
        for line in self.world.output:
            if task.on_line:
                task.on_line(line)
        results = task.results / "results.jsonl"
        if self.world.status in (0, 1):
            facts = {"variables": self.world.variables, "smoke_digest": sha256_file(task.runner), **self.world.faults}
            write(results, results_of(plan, **facts))
            self.world.spoil(results)
        return Finished(status=self.world.status, output="\n".join(self.world.output), seconds=1.0)


def statement_of(path: Path) -> dict[str, Any]:
    """The statement of a certificate, unchecked."""
    payload: dict[str, Any] = json.loads(decode(path.read_bytes()).payload)
    return payload


def edit(path: Path, change: Callable[[dict[str, Any]], None], *, reseal: bool = False) -> None:
    """Change a certificate, and keep its signature; ``reseal``: as somebody would who knows of the seal."""
    statement = statement_of(path)
    change(statement)
    if reseal:
        statement["predicate"]["seal"] = seal_of(statement)
    path.write_bytes(encode(SignedBytes(canonical_json(statement), decode(path.read_bytes()).signed)))
