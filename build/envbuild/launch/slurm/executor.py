"""Runs the smoke runner as a job over nodes of a cluster: puts its files there, submits, follows, brings results back.

A job's state decides nothing: a run whose results are whole is judged, however Slurm says that it ended.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.cluster import Slurm
from envbuild.core import jsonread
from envbuild.core.errors import CertificationCannotRunError, ConfigurationError, InternalError, InterruptedByUserError
from envbuild.core.exit_status import ran_out_of_space, tail
from envbuild.core.files import machine_errors
from envbuild.core.interruptions import signals_wait
from envbuild.core.process import Finished
from envbuild.core.progress import Reporter
from envbuild.core.text import printable_lines
from envbuild.image.output import PlacedImage
from envbuild.launch.executors import LaunchRequest, OnCluster, Task
from envbuild.launch.results_file import RESULTS_FILE, is_whole
from envbuild.launch.slurm.commands import SlurmCommands
from envbuild.launch.slurm.follow import Following
from envbuild.launch.slurm.image_store import place_image
from envbuild.launch.slurm.job import LOG, OUT_OF_TIME, PLAN, RESULTS, RUNNER, NamedCluster, SlurmJob
from envbuild.launch.slurm.record import JobRecord, read_record, write_record
from envbuild.launch.slurm.render import render_sbatch
from envbuild.launch.slurm.run_folder import RunFolder
from envbuild.launch.slurm.run_log import RunLog
from envbuild.launch.slurm.states import JobState

# Of the runner; those that say that nothing could run are handed on, with what it printed.
COMPLETED, CANNOT_RUN, CANNOT_WRITE = 0, (2, 3, 4), 5


class JobGoesOnError(InterruptedByUserError):
    """Following a job was interrupted; the job goes on."""

    def __init__(self, what: str, *, fix: str = "", job: str = "", cancel: str = "") -> None:
        """``job``: its ID; ``cancel``: the command that ends it."""
        super().__init__(what, fix=fix)
        self.job = job
        self.cancel = cancel


@dataclass(frozen=True, kw_only=True)
class SlurmExecutor:
    """A job that outlives this process: the same run, started again, follows it.

    Attributes:
        folder: of the run here, where the job's record is.
    """

    image: PlacedImage
    where: OnCluster
    folder: Path
    commands: SlurmCommands
    reporter: Reporter

    @property
    def name(self) -> str:
        return f"slurm, {self._slurm.runtime}"

    @property
    def python(self) -> str:
        return self.image.record.python

    def joins(self) -> bool:
        """Whether a job of this run is alive, or has ended with results that nobody has judged yet.

        Raises:
            ConfigurationError: the job that is to be judged is not this run's; the run's job is on another cluster.
            MachineError: Slurm does not answer.
        """
        record = self._latest_record()
        wanted = self.where.job
        if wanted is not None and (record is None or record.job != wanted):
            known = f"its job is {record.job}" if record else "it has no job"
            raise ConfigurationError(
                f"job {wanted} on {self.where.name} is not of this certification",
                why=f"{self.folder} is where its run would be, and {known}.",
                fix="Give the options of the command that submitted the job, in the same project.",
            )
        if record is None or not (self.folder / PLAN).is_file():
            return False
        if wanted is not None or self._is_alive(record):
            return True
        # Whole before they are brought back: they were judged.
        if is_whole(self._results):
            return False
        self._folder_of(record).bring_back(self.folder)
        return is_whole(self._results)

    def forget(self) -> None:
        """Remove the folder of an interrupted run on the cluster's storage.

        Raises:
            ConfigurationError: the record of its job is damaged.
        """
        record = read_record(self.folder)
        if record is not None and record.cluster == self.where.name:
            self._folder_of(record).remove()

    def run(self, task: Task) -> Finished:
        """Follow the run's job, or submit one, and bring back what it left.

        Raises:
            CertificationCannotRunError: the job ended before its cases did, or never starts.
            ConfigurationError: Slurm refuses it.
            JobGoesOnError: interrupted while the job was followed.
            MachineError: the cluster's storage, Slurm or its login host cannot be reached.
        """
        started = time.monotonic()
        record = read_record(self.folder)
        if record is None or not task.joins:
            record = self._submit(task, record)
        name = LOG.replace("%j", record.job)
        log = RunLog(folder=self._folder_of(record), name=name, on_line=task.on_line or (lambda _line: None))
        state = self._follow(record, log.read)
        log.read()
        self._folder_of(record).bring_back(self.folder)
        output = printable_lines("\n".join(line for line in log.lines if not line.startswith("{")))
        if task.log is not None:
            with machine_errors(task.log):
                task.log.write_text("\n".join(log.lines) + "\n", encoding="utf-8")
        status = self._status(record, state, log, output, task)
        return Finished(status=status, output=output, seconds=time.monotonic() - started)

    def _submit(self, task: Task, before: JobRecord | None) -> JobRecord:
        nonce = _nonce_of(task.plan)
        path = before.folder if before is not None else self._path_of(nonce)
        folder = RunFolder(path=path, login=self.where.cluster.login)
        delivery = self.where.cluster.image
        if delivery.by == "importer":
            raise ConfigurationError(
                f"cluster {self.where.name} gets images by enroot's importer, and certifying needs the file",
                why="The runner hashes the .sqsh that it was started from, and an importer leaves none.",
                fix='Set by = "path" or "sbcast" in [image] of a cluster\'s file for certifying.',
            )
        shared = RunFolder(path=self._there.folder, login=self.where.cluster.login)
        if not shared.exists():
            raise ConfigurationError(
                f"cluster {self.where.name} has no folder {shared.path}",
                why="Runs and images lie below it, on storage that its nodes share, and it is not there.",
                fix=f"Make it, or correct folder in envs/clusters/{self.where.name}.toml.",
            )
        with self.reporter.step(f"bring the image to {self.where.name}"):
            sqsh_digest = self.image.record.sqsh_digest
            if sqsh_digest is None:
                raise InternalError("an image without a .sqsh is brought to a cluster")
            image = place_image(self.image.sqsh(), sqsh_digest, self._there.images, self.where.cluster.login)
        if not folder.exists():
            self._put(task, folder)
        job = SlurmJob(
            name=_name_of(nonce),
            cluster=self.where.cluster,
            nodes=self.where.nodes,
            folder=folder.path,
            image=image,
            python=self.python,
            # A job that Slurm starts again goes on: all have it.
            arguments=tuple(word for word in task.arguments if word != "--resume"),
            requeues=self.where.requeues,
        )
        with signals_wait():
            submitted = self.commands.submit(render_sbatch(job))
            record = JobRecord(job=submitted, cluster=self.where.name, folder=folder.path, nonce=nonce)
            write_record(record, self.folder)
        self.reporter.note(f"submitted job {submitted} to {self.where.name}; its files are in {folder.path}")
        return record

    def _latest_record(self) -> JobRecord | None:
        """The record of the run's last job; of one whose submitter was killed before it could write it, by its name."""
        record, plan = read_record(self.folder), self.folder / PLAN
        if record is not None and record.cluster != self.where.name:
            if is_whole(self._results):
                return None
            raise ConfigurationError(
                f"the run in {self.folder} is job {record.job} on {record.cluster}, not on {self.where.name}",
                why="It has not been judged, and may be running.",
                fix=f"Follow it with --on {record.cluster}; or cancel it there, and remove {self.folder}.",
            )
        if not plan.is_file() or (record is not None and self._is_alive(record)):
            return record
        nonce = _nonce_of(plan)
        job = self.commands.named(_name_of(nonce))
        if job is None or (record is not None and int(job) <= int(record.job)):
            return record
        folder = record.folder if record is not None else self._path_of(nonce)
        record = JobRecord(job=job, cluster=self.where.name, folder=folder, nonce=nonce)
        write_record(record, self.folder)
        return record

    @property
    def _results(self) -> Path:
        return self.folder / RESULTS / RESULTS_FILE

    @property
    def _there(self) -> NamedCluster:
        return NamedCluster(name=self.where.name, cluster=self.where.cluster)

    def _path_of(self, nonce: str) -> str:
        return f"{self._there.folder}/runs/{self.image.name}-{nonce[:12]}"

    def _put(self, task: Task, folder: RunFolder) -> None:
        with tempfile.TemporaryDirectory(prefix="envbuild-run-") as staging:
            shutil.copyfile(task.plan, Path(staging, PLAN))
            shutil.copyfile(task.runner, Path(staging, RUNNER))
            Path(staging, RESULTS).mkdir()
            folder.put(Path(staging))

    def _follow(self, record: JobRecord, look: Callable[[], None]) -> JobState | None:
        following = Following(
            commands=self.commands, query_seconds=self._slurm.query_seconds, tell=self.reporter.note, look=look
        )
        try:
            return following.to_the_end(record.job)
        except KeyboardInterrupt:
            cancel = self.commands.shown("scancel", record.job)
            raise JobGoesOnError(
                f"interrupted; job {record.job} on {record.cluster} goes on",
                fix=f"Run the same command again to follow it, or cancel it: {cancel}",
                job=record.job,
                cancel=cancel,
            ) from None

    def _status(self, record: JobRecord, state: JobState | None, log: RunLog, output: str, task: Task) -> int:
        """The status of a run whose results are whole, or of a runner that says why nothing could run."""
        if is_whole(self._results):
            self._folder_of(record).remove()
            return COMPLETED
        if log.status in CANNOT_RUN:
            return log.status
        job, cluster = record.job, record.cluster
        sentence = state.sentence if state is not None else "Slurm has forgotten it"
        last = f"\nThe end of its log:\n{tail(output)}" if output.strip() else "\nIt has no log."
        again = "Cases that had ended are kept: run the same command with --resume, and without --judge."
        if not self._folder_of(record).exists():
            again = "Its folder is gone, and with it the cases that had ended: run the same command, without --judge."
        if log.status == CANNOT_WRITE or ran_out_of_space(output, self.folder):
            again = f"Make room in {record.folder}, or on the disk that the log names. {again}"
        if log.status == OUT_OF_TIME:
            raise CertificationCannotRunError(
                f"the time limit of job {job} on {cluster} came before the last case",
                why=tail(output, lines=6),
                fix=f"{again} A larger time_limit_minutes in envs/clusters/{cluster}.toml, or --requeue N, avoids it.",
                log=task.log,
                reason="out-of-time",
            )
        raise CertificationCannotRunError(
            f"job {job} on {cluster} ended before its cases did: {sentence}",
            why=f"Its results in {record.folder} have no end." + last,
            fix=again,
            log=task.log,
            reason="job-ended",
        )

    def _is_alive(self, record: JobRecord) -> bool:
        state = self.commands.states([record.job]).get(record.job)
        return state is not None and not state.ended

    def _folder_of(self, record: JobRecord) -> RunFolder:
        return RunFolder(path=record.folder, login=self.where.cluster.login)

    @property
    def _slurm(self) -> Slurm:
        if self.where.cluster.slurm is None:
            raise InternalError("a job for Slurm on a cluster without it")
        return self.where.cluster.slurm


def _nonce_of(plan: Path) -> str:
    try:
        return str(jsonread.loads(plan.read_bytes())["nonce"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{plan} is damaged",
            why="The run's job is looked for by the nonce of its plan, and it has none.",
            fix=f"See `squeue --me` for a job of this run, cancel it, and remove {plan.parent}.",
        ) from error


def _name_of(nonce: str) -> str:
    """Of a run's jobs, as Slurm has it: a repeat of the command finds them by it."""
    return f"envbuild-{nonce[:12]}"


def open_executor(request: LaunchRequest) -> SlurmExecutor:
    """The executor of a job; Slurm is asked whether it is there.

    Raises:
        MachineError: there are no commands of Slurm here, or on the login host.
    """
    where = request.on_cluster
    if where is None:
        raise InternalError("a job for Slurm without a cluster")
    commands = SlurmCommands(login=where.cluster.login)
    commands.check(where.name)
    return SlurmExecutor(
        image=request.require_image(),
        where=where,
        folder=request.results.parent,
        commands=commands,
        reporter=request.reporter,
    )
