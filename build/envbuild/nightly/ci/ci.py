"""Renders the files from which GitHub Actions, systemd or Slurm call ``envbuild nightly``, and nothing else."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from envbuild.core.errors import UsageError
from envbuild.core.files import machine_errors, write_atomic

if TYPE_CHECKING:
    import jinja2

System = Literal["github", "systemd", "slurm"]
# What stands in a shell, in YAML and in a unit as it is.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@=,+~-]*|/[A-Za-z0-9._:/@=,+~-]*")
GITHUB_RUNNER = "ubuntu-24.04"


@dataclass(frozen=True, kw_only=True)
class CiTarget:
    """A target, and whether its cases need GPUs."""

    name: str
    on_gpus: bool

    @property
    def runners(self) -> tuple[str, ...]:
        """The labels of its runner on GitHub."""
        return ("self-hosted", f"envbuild-{self.name}") if self.on_gpus else (GITHUB_RUNNER,)


@dataclass(frozen=True, kw_only=True)
class CiJob:
    """A nightly that something calls every day.

    Attributes:
        to: the registry, HOST/REPO.
        sqsh_to: the .sqsh store; empty: the registry.
        state: where the ledger is shared; empty: it stays on the machine.
        at: when, HH:MM.
        project: the folder with envs/ and lockfiles/.
        program: envbuild, as it is called there.
        on: the cluster that has the GPUs; empty: the machine has them, or a plan is prepared.
    """

    stack: str
    targets: tuple[CiTarget, ...]
    to: str
    sqsh_to: str = ""
    state: str = ""
    at: str = "02:00"
    project: Path
    program: str = "envbuild"
    on: str = ""

    @property
    def hour(self) -> int:
        return int(self.at.partition(":")[0])

    @property
    def minute(self) -> int:
        return int(self.at.partition(":")[2])

    @property
    def gpu_targets(self) -> tuple[str, ...]:
        return tuple(target.name for target in self.targets if target.on_gpus)

    def words(self, targets: str) -> list[str]:
        """The command as words, with these ``--targets``."""
        words = [self.program, "nightly", "--stack", self.stack, "--targets", targets, "--to", self.to]
        words += ["--sqsh-to", self.sqsh_to] if self.sqsh_to else []
        words += ["--state", self.state] if self.state else []
        return words + (["--on", self.on] if self.on else [])

    def command_for(self, variable: str) -> str:
        """The command for a shell, with the targets from a variable (``$TARGET``)."""
        # Put in after the quoting, within which a shell would not read the variable.
        return shlex.join(self.words("TARGETS")).replace("TARGETS", f'"{variable}"')

    @property
    def command(self) -> str:
        """The command for a shell."""
        return shlex.join(self.words(",".join(target.name for target in self.targets)))

    @property
    def systemd_command(self) -> str:
        """The command for ExecStart=."""
        return " ".join(map(self.systemd, self.words(",".join(target.name for target in self.targets))))

    def systemd(self, word: str | Path) -> str:
        """A word of a unit: in quotes where it has spaces, ``%`` and ``$`` doubled (systemd.service(5))."""
        text = str(word).replace("%", "%%").replace("$", "$$")
        # In quotes systemd reads C's escapes, as JSON writes them (systemd.service(5), "Command Lines").
        return text if re.fullmatch(r"[^\s\"'\\;]+", text) else json.dumps(text)


def render(system: System, job: CiJob) -> dict[Path, str]:
    """The files for a system, by their paths in a project.

    Raises:
        UsageError: an address or a folder has characters that are read as something else somewhere.
    """
    _refuse_strange(job)
    if system == "github":
        if not job.state:
            raise UsageError(
                "--for github needs --state",
                why="A runner's disk does not last, and a nightly without its ledger does everything again.",
                fix="Name a place that lasts: --state s3://BUCKET/PREFIX, gs://, or oci://HOST/REPO",
            )
        files = {f".github/workflows/envbuild-nightly-{job.stack}.yml": "github.yml.j2"}
        if job.gpu_targets:
            files["gpu-runner.sbatch"] = "gpu-runner.sbatch.j2"
    elif system == "systemd":
        unit = f"envbuild-nightly-{job.stack}"
        files = {f"{unit}.service": "systemd.service.j2", f"{unit}.timer": "systemd.timer.j2"}
    else:
        files = {f"envbuild-nightly-{job.stack}.scrontab": "scrontab.j2"}
        if job.gpu_targets and not job.on:
            raise UsageError(
                "--for slurm needs --on",
                why=f"{', '.join(job.gpu_targets)} needs GPUs, and a cluster's file says how its nodes are asked for.",
                fix="Name the cluster: --on NAME, of envs/clusters/",
            )
    return {Path(name): _templates().get_template(template).render(job=job) for name, template in files.items()}


def _refuse_strange(job: CiJob) -> None:
    texts = {"--to": job.to, "--sqsh-to": job.sqsh_to, "--state": job.state}
    for option, text in texts.items():
        if text and not _PLAIN.fullmatch(text):
            raise UsageError(
                f"{option} has characters that a CI file cannot hold: {text!r}",
                why="Shells, YAML, cron and systemd give some characters a special meaning.",
                fix="Use letters, digits and . _ : / @ = , + ~ - alone.",
            )
    # In a crontab a `%` is a line end, in quotes, too (crontab(5)).
    if not re.fullmatch(r"[^\s%\"'\\]+", str(job.project)):
        raise UsageError(
            f"the project's folder has characters that a CI file cannot hold: {str(job.project)!r}",
            why="It has white space, a quote, a backslash or a percent sign in it.",
            fix="Run this in a folder without them.",
        )


def write(files: Mapping[Path, str], into: Path) -> tuple[Path, ...]:
    """Write files; those that are there as they would be stay.

    Raises:
        UsageError: one is there and is another; nothing is written then.
    """
    for name, text in files.items():
        with machine_errors(into / name, "read"):
            if (into / name).exists() and (into / name).read_text(errors="replace") != text:
                raise UsageError(
                    f"{into / name} exists and is another file",
                    why="It may have been edited by hand.",
                    fix="Remove it first, or name another folder: --into DIR",
                )
    for name, text in files.items():
        with machine_errors(into / name):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(into / name, text, 0o755 if text.startswith("#!") else 0o644)
    return tuple(into / name for name in files)


@cache
def _templates() -> jinja2.Environment:
    import jinja2  # slow, and most commands need none

    return jinja2.Environment(  # noqa: S701 - not HTML
        loader=jinja2.PackageLoader("envbuild.nightly.ci", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Jinja drops a template's last line end otherwise.
        keep_trailing_newline=True,
    )
