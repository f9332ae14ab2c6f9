"""Slurm's own commands, here or on a login host by the user's own ssh."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envbuild.core.errors import CertificationCannotRunError, EnvbuildError, MachineError
from envbuild.core.process import Finished
from envbuild.launch.slurm.login import LoginShell
from envbuild.launch.slurm.states import JobState

# A controller that is busy answers late; one that is gone is given up by Slurm's commands after MessageTimeout.
LIMIT_SECONDS = 120.0
# Of a user, wherever they are: sbatch(1).
_NOT_A_JOBS = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})
# Variables that change what Slurm's commands list, cancel, wait for or print.
_OF_COMMANDS = ("SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_", "SBATCH_WAIT", "SBATCH_ARRAY", "SLURM_TIME_FORMAT")
_FIELDS = ("%i", "%T", "%r", "%S", "%N")


@dataclass(frozen=True, kw_only=True)
class SlurmCommands:
    """The commands on one cluster.

    Attributes:
        login: the host of the user's ssh configuration; None: this machine.
    """

    login: str | None = None

    def check(self, cluster: str) -> None:
        """See that there is Slurm, before anything is copied.

        Raises:
            MachineError: there is none, or the login host cannot be reached.
        """
        try:
            done = self._run(["sbatch", "--version"], what=f"submit a job to {cluster}")
        except MachineError as error:
            why = f"sbatch cannot be run: {error.why}."
            raise self._without_slurm(cluster, why) if self.login is None else error from error
        if done.status != 0:
            raise self._without_slurm(cluster, _answer(done))

    def _without_slurm(self, cluster: str, why: str) -> MachineError:
        where = self.login or "this machine"
        return MachineError(
            f"cannot submit a job to {cluster}: {where} has no Slurm",
            why=why,
            fix=f"`sbatch --version` has to work on a login node. Run this command there, or name one: login in "
            f"envs/clusters/{cluster}.toml.",
        )

    def shown(self, *words: str) -> str:
        """A command of Slurm, for people to run here."""
        return self._shell.shown(*words)

    def submit(self, script: str) -> str:
        """Submit a batch script, and return the job's ID.

        Raises:
            CertificationCannotRunError: Slurm refuses it; an unknown partition names those that there are.
            MachineError: there is no Slurm, or the login host cannot be reached.
        """
        # Of a user's SBATCH_* variables those count that the script says nothing about: they win over its lines, and
        # the command line wins over them.
        lines = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
        options = [word for line in lines for word in shlex.split(line, comments=True)]
        done = self._run(["sbatch", "--parsable", *options], what="submit the job", stdin=script.encode())
        # "ID" or "ID;CLUSTER", after what a site's plugins print.
        answer = re.search(r"^(\d+)(;\S+)?$", done.output, re.MULTILINE)
        if done.status != 0 or answer is None:
            raise self._refusal(done)
        return answer[1]

    def states(self, jobs: Sequence[str]) -> dict[str, JobState]:
        """The states of jobs, by ID, with one query for all; those that Slurm has forgotten are left out.

        Its controller forgets a job minutes after its end (MinJobAge); a site's accounting has how it ended.

        Raises:
            MachineError: Slurm does not answer.
        """
        words = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", f"--format={'|'.join(_FIELDS)}"]
        done = self._run(words, what="ask for the job's state")
        if done.status != 0 and "Invalid job id" not in done.output:
            raise self._failure(done, "ask for the job's state")
        states = {
            job: JobState(job=job, state=state, reason=_text(reason), start=_text(start), nodes=nodes)
            for job, state, reason, start, nodes in _rows(done, len(_FIELDS))
        }
        return {**states, **self._accounted([job for job in jobs if job not in states])}

    def named(self, name: str) -> str | None:
        """The last job of a name that Slurm knows; None without one.

        Raises:
            MachineError: Slurm does not answer.
        """
        what = "look for the run's job"
        done = self._run(["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i|%j"], what=what)
        if done.status != 0:
            raise self._failure(done, what)
        jobs = [job for job, other in _rows(done, 2) if other == name and job.isdigit()]
        return max(jobs, key=int, default=None)

    def cancel(self, job: str) -> None:
        """Cancel a job.

        Raises:
            MachineError: Slurm does not answer.
        """
        done = self._run(["scancel", job], what="cancel the job")
        if done.status != 0:
            raise self._failure(done, "cancel the job")

    def partitions(self) -> list[str]:
        """The partitions that there are; empty where Slurm does not say."""
        done = self._run(["sinfo", "--noheader", "--format=%R"], what="list the partitions")
        return sorted(set(done.output.split())) if done.status == 0 else []

    def accounts(self) -> list[str]:
        """The user's accounts; empty where Slurm keeps none."""
        words = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", "format=user,account"]
        done = self._run(words, what="list the accounts")
        user = self._run(["id", "-un"], what="ask for the user's name").output.strip()
        return sorted({account for name, account in _rows(done, 2) if name == user}) if done.status == 0 else []

    def _accounted(self, jobs: Sequence[str]) -> dict[str, JobState]:
        """How jobs ended, by ID, where the site keeps accounts: sacct(1)."""
        if not jobs:
            return {}
        words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(jobs)}"]
        try:
            done = self._run([*words, "--format=JobIDRaw,State,NodeList"], what="ask for how the job ended")
        except MachineError:
            return {}
        # "CANCELLED by 1000". One that runs there for ever was lost by the controller.
        states = [JobState(job=job, state=state.split()[0], nodes=nodes) for job, state, nodes in _rows(done, 3)]
        return {state.job: state for state in states if done.status == 0 and state.ended}

    def _refusal(self, done: Finished) -> EnvbuildError:
        if self._run(["scontrol", "ping"], what="ask for Slurm's controller").status != 0:
            return self._failure(done, "submit the job")
        # "Invalid account or account/partition combination specified".
        if "account" in done.output and (accounts := self.accounts()):
            fix = f"Your accounts there are {', '.join(accounts)}: set one in the cluster's file."
        elif "partition" in done.output and (partitions := self.partitions()):
            fix = f"The cluster has the partitions {', '.join(partitions)}: set one in the cluster's file."
        else:
            fix = "Correct the cluster's file, or ask who runs the cluster."
        return CertificationCannotRunError("Slurm refuses the job", why=_answer(done), fix=fix, reason="job-refused")

    def _failure(self, done: Finished, what: str) -> EnvbuildError:
        return MachineError(f"cannot {what}: Slurm does not answer", why=_answer(done), fix="Try again later.")

    def _run(self, words: Sequence[str], *, what: str, stdin: bytes | None = None) -> Finished:
        """Run a command there.

        Raises:
            MachineError: it does not answer in time, or the login host cannot be reached, or has no Slurm.
        """
        return self._shell.run(words, what=what, seconds=LIMIT_SECONDS, stdin=stdin, check=False)

    @property
    def _shell(self) -> LoginShell:
        return LoginShell(host=self.login, environment=outside_jobs(os.environ), unset=_OF_COMMANDS)


def outside_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process without those of a job that it is in, and those that change Slurm's commands.

    A job that is submitted from a job gets them too, and its srun takes them for options: srun(1), INPUT ENVIRONMENT
    VARIABLES.
    """
    own = {name: value for name, value in environ.items() if not name.startswith(_OF_COMMANDS)}
    if "SLURM_JOB_ID" not in own:
        return own
    return {name: value for name, value in own.items() if not name.startswith("SLURM_") or name in _NOT_A_JOBS}


def _rows(done: Finished, fields: int) -> list[list[str]]:
    """The lines of a table; a site's plugins print others."""
    return [line.split("|") for line in done.output.splitlines() if line.count("|") == fields - 1]


def _answer(done: Finished) -> str:
    return done.output.strip() or f"It printed nothing and ended with {done.status}."


def _text(value: str) -> str:
    return "" if value in ("None", "N/A", "(null)", "Unknown") else value
