"""``envbuild certify``."""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.catalog.catalog import Selection
from envbuild.catalog.fields import Device
from envbuild.certify.cases.selection import WantedCases, driver_of
from envbuild.certify.certificate.sign import UNSIGNED
from envbuild.certify.certify import CertifyOptions, certify
from envbuild.certify.issue import Certification
from envbuild.certify.models import NotVouched
from envbuild.certify.offline import ExplicitOptions, judge_folder, write_plan
from envbuild.certify.readme import judge_command
from envbuild.certify.report.describe import describe_matrix, projects_own
from envbuild.certify.run.executors import DEFAULT_VENV, MachineOptions, parse_gpus
from envbuild.certify.run.job import MOST_REPEATS, CertifyJob, CertifyRequest
from envbuild.cli.against import show_against
from envbuild.cli.command import command_line, given_options
from envbuild.cli.common import FILE, FOLDER, LockedOptions, Session, as_command, out_dir
from envbuild.cli.options import flag, include, no_effect, option
from envbuild.cli.print_cases import print_cases as show_cases
from envbuild.cli.signing import KeyOptions, signer_of
from envbuild.core.digests import short
from envbuild.core.errors import ConfigurationError, InterruptedByUserError
from envbuild.core.text import shown
from envbuild.image.output import PlacedImage, find_image
from envbuild.launch.launchers import ON_CLUSTER, WORDS, Placement, place_on
from envbuild.launch.runtimes import RUNTIMES
from envbuild.launch.slurm.executor import JobGoesOnError
from envbuild.lock.lockdir import find_lock

MACHINE = ("gpus", "isolation", "runtime", "venv", "fresh", "resume")
KEY = ("key", "key_password")
# By option: the reason, and the options that have no effect with it.
CONFLICTS = {
    "plan_out": ("It writes a plan, and runs nothing.", (*MACHINE, "judge", *KEY)),
    "judge": ("It judges results that exist already.", MACHINE),
    "against": (
        "It compares a recipe with a certificate that exists, and runs nothing.",
        (*MACHINE, "repeat", "requeue", "plan_out", "judge", "print_cases", *KEY),
    ),
    "print_cases": (
        "It prints the cases of the matrix, and runs nothing.",
        (*MACHINE, "place", "repeat", "on", "nodes", "requeue", "plan_out", "judge", *KEY),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    locked: LockedOptions = include(LockedOptions)
    matrix: str | None = option("--matrix NAME", "The set of cases (`envbuild list matrices`); default: the stack's.")
    only: tuple[str, ...] = option("--only ID", "Run only this case and its baseline; may be repeated.", multiple=True)
    max_gpus: int | None = option("--max-gpus N", "Skip cases that need more than N GPUs.", type=click.IntRange(1))
    on: str | None = option(
        "--on NAME",
        "The cluster (envs/clusters/): with Slurm, submit a job there and follow it; bandwidth must reach its floors.",
    )
    nodes: int | None = option(
        "--nodes N", "With --on: the cases may take this many nodes; default: 1.", type=click.IntRange(1, 1024)
    )
    requeue: int = option(
        "--requeue N",
        "With --on: queue the job again this often if its time limit comes before the last case.",
        type=click.IntRange(0),
        default=0,
    )
    run_known_wrong: bool = flag("--run-known-wrong", "Also run cases that the locked versions train wrongly.")
    print_cases: bool = flag("--print-cases", "Print the cases and run nothing.")
    place: str = option(
        "--in",
        "Where cases train: in the image (sqsh, oci, docker) or, to certify only the lock, in --venv or this shell's "
        "Python (here).",
        type=click.Choice(WORDS),
        default="sqsh",
    )
    venv: Path = option("--venv", "The environment of --in venv.", type=FOLDER, default=DEFAULT_VENV)
    runtime: str | None = option(
        "--runtime", "How --in sqsh opens the file; default: the first that works.", type=click.Choice(list(RUNTIMES))
    )
    gpus: str | None = option("--gpus LIST", "Use only these GPUs, by nvidia-smi's index: 0,1.")
    isolation: str | None = option(
        "--isolation",
        "Keep rank processes alive (default), or start new ones for every case.",
        type=click.Choice(["live", "process"]),
    )
    repeat: int = option("--repeat N", "Train every case N times.", type=click.IntRange(1, MOST_REPEATS), default=1)
    fresh: bool = flag("--fresh", "Run again even if a certificate exists.")
    resume: bool = flag("--resume", "Resume an interrupted run.")
    plan_out: Path | None = option(
        "--plan-out DIR", "Run nothing; write a plan that another machine can run.", type=FOLDER
    )
    judge: str | None = option("--judge DIR|JOB", "Judge the results of the plan in DIR or, with --on, of a job.")
    against: str | None = option(
        "--against RECIPE",
        "Run nothing; print which fields this recipe of Megatron-Bridge sets that no case of the certificate covers.",
    )
    hf_config: Path | None = option(
        "--hf-config FILE", "With --against: the config.json of the recipe's model on its hub.", type=FILE
    )
    keys: KeyOptions = include(KeyOptions)
    out_dir: Path = out_dir()

    @property
    def wanted(self) -> WantedCases:
        return WantedCases(only=self.only, max_gpus=self.max_gpus, nodes=self.nodes or 1)


@as_command("certify", Options)
def command(session: Session, options: Options) -> None:
    """Train in every parallel layout; pass only if each reproduces the single-process baseline.

    Every step's loss and gradient norm must agree with the baseline's, within tolerances that the run measures. Cases
    that run in an image have no network. A certificate is written if every case passes.
    """
    context = click.get_current_context()
    _refuse_conflicts(context)
    selection = session.select_locked(options.locked)
    if options.print_cases:
        names = options.matrix, options.wanted, options.locked.name
        show_cases(session, selection, *names, run_known_wrong=options.run_known_wrong)
        return
    if options.against is not None:
        show_against(session, _request(session, selection, options), options.against, options.hf_config)
        return
    how = _certify_options(session, selection, options)
    request = _request(session, selection, options)
    if options.plan_out is not None:
        _print_plan(session, write_plan(request, options.plan_out, session.store), options.plan_out)
    elif options.judge is not None and how.machine.job is None:
        given = given_options(context)
        # A default is no word of the user's: the plan says where it ran, and how often.
        explicit = ExplicitOptions(
            place=Placement.parse(options.place) if "place" in given else None,
            repeats=options.repeat if "repeat" in given else None,
        )
        _print(session, judge_folder(request, Path(options.judge), session.context, how.signer, explicit))
    else:
        with _resume_help(context):
            _print(session, certify(request, session.context, how))


def _certify_options(session: Session, selection: Selection, options: Options) -> CertifyOptions:
    """Build the options of the run from those of the command line.

    Raises:
        UsageError: an option has no effect.
    """
    gpus = parse_gpus(options.gpus) if options.gpus is not None else ()
    if gpus and selection.target.device is Device.CPU:
        instead = "Name a target with GPUs (`envbuild list targets`)"
        raise no_effect("--gpus", f"with target {selection.target_name}", "The target is the CPU.", instead)
    # Refuses a stack for which there are no cases before keys are read or a lock is looked for.
    driver_of(selection, options.matrix or selection.matrix_for())
    signer = signer_of(session, options.keys)
    if options.keys.key_password is not None and signer is None:
        why = "No --key is given, or it is off, and the configuration names none (signing.key)."
        raise no_effect("--key-password", "without a key", why, "Name the key too (--key FILE)")
    machine = MachineOptions(
        runtime=options.runtime,
        venv=options.venv,
        gpus=gpus,
        isolation=options.isolation,
        requeues=options.requeue,
        job=options.judge if _on_slurm(session, options) and (options.judge or "").isdecimal() else None,
    )
    return CertifyOptions(machine=machine, fresh=options.fresh, resume=options.resume, signer=signer)


def _request(session: Session, selection: Selection, options: Options) -> CertifyRequest:
    lock = find_lock(session.project, selection, options.locked.name)
    place = Placement.parse(options.place)
    if options.on is not None:
        place = place_on(session.catalog.cluster(options.on), place)
    # Again, with the lock: its record has the driver of the commit that was locked.
    matrix_name = options.matrix or selection.matrix_for(lock.lock.driver)
    driver_of(selection, matrix_name, lock.lock)
    return CertifyRequest(
        selection=selection,
        lock=lock,
        matrix_name=matrix_name,
        out_dir=options.out_dir,
        wanted=options.wanted,
        place=place,
        image=_image(selection, options),
        lock_name=options.locked.name,
        repeats=options.repeat,
        run_known_wrong=options.run_known_wrong,
        cluster=options.on,
    )


def _on_slurm(session: Session, options: Options) -> bool:
    """Whether cases run as a job of Slurm.

    Raises:
        UsageError: an option is for the other kind of cluster.
    """
    given = given_options(click.get_current_context())
    if options.on is None or session.catalog.cluster(options.on).launcher not in ON_CLUSTER:
        condition = "without --on" if options.on is None else f"with --on {options.on}"
        for name in sorted({"nodes", "requeue"} & given):
            why = 'It is for a cluster that runs jobs (launcher = "slurm").'
            raise no_effect(_flag(name), condition, why, "`envbuild list clusters` shows them: name one")
        return False
    why = "Its job opens the .sqsh on the cluster's nodes, as the cluster's file says."
    for name in sorted({"gpus", "runtime", "venv"} & given):
        raise no_effect(_flag(name), f"with --on {options.on}", why)
    if options.place != "sqsh":
        raise no_effect(f"--in {options.place}", f"with --on {options.on}", why)
    return True


@contextlib.contextmanager
def _resume_help(context: click.Context) -> Iterator[None]:
    """Add the command that resumes, or follows the job again, to the error of an interrupted run."""
    try:
        yield
    except JobGoesOnError as error:
        again = command_line(context, "--judge", error.job, without=("fresh", "resume", "requeue", "isolation"))
        raise error.with_context(fix=f"Follow it again: {again}. Cancel it: {error.cancel}") from None
    # A signal may come to this process, or to the runner, which ends with status 130 then.
    except (KeyboardInterrupt, InterruptedByUserError):
        again = command_line(context, "--resume")
        raise InterruptedByUserError("interrupted; cases that had ended are kept", fix=f"Resume: {again}") from None


def _image(selection: Selection, options: Options) -> PlacedImage | None:
    """The image to certify; None for a lock, and where results are judged on a machine without it."""
    if not Placement.parse(options.place).has_image:
        return None
    names = (selection.stack_name, selection.base_name, selection.target_name)
    try:
        return find_image(options.out_dir, *names, options.locked.name)
    except ConfigurationError:
        if options.judge is None:
            raise
        return None


def _refuse_conflicts(context: click.Context) -> None:
    """Refuse options that have no effect next to others.

    Raises:
        UsageError: there is one.
    """
    given = given_options(context)
    for mode, (why, others) in CONFLICTS.items():
        for other in others:
            if {mode, other} <= given:
                raise no_effect(_flag(other), f"with {_flag(mode)}", why)
    if "hf_config" in given and "against" not in given:
        raise no_effect("--hf-config", "without --against", "It is for the recipe that --against names.")
    place = context.params["place"]
    for name, wanted in (("venv", "venv"), ("runtime", "sqsh")):
        if name in given and place != wanted:
            raise no_effect(_flag(name), f"with --in {place}", f"It is for --in {wanted}.")


def _flag(name: str) -> str:
    return "--in" if name == "place" else f"--{name.replace('_', '-')}"


def _print(session: Session, result: Certification) -> None:
    predicate = result.statement.predicate
    # Of a whole matrix nothing was left out but by shipped conflicts.
    own = "" if predicate.whole_matrix else ", ".join(projects_own(predicate.not_vouched))
    state = "certified" if result.written else "nothing to do: already certified"
    runs = Counter(case.id for case in predicate.cases)
    repeats = min(runs.values())
    count = f"{len(runs)} cases" + (f", {repeats} times each," if repeats > 1 else "")
    session.done(
        {
            "ran": result.ran,
            "written": result.written,
            "certificate": str(result.certificate.resolve()),
            "reports": {"junit": str(result.reports.junit.resolve()), "page": str(result.reports.page.resolve())},
            "key": predicate.key,
            "matrix": predicate.matrix,
            "matrix_digest": predicate.matrix_digest,
            "matrix_is_shipped": predicate.matrix_is_shipped,
            "signed": result.keyid is not None,
            "keyid": result.keyid,
            "lock_is_current": result.lock_is_current,
            "not_counted": result.not_counted or None,
            "cases": [case.model_dump(mode="json", by_alias=True) for case in predicate.cases],
            "not_vouched": [entry.model_dump(mode="json") for entry in predicate.not_vouched],
        },
        f"{state}: {count} agree with their baseline, key {short(predicate.key)}",
        *([] if predicate.whole_matrix else [f"a part of matrix {predicate.matrix}, which publishing wants whole"]),
        *([f"left out by the project's own envs/conflicts/: {own}"] if own else []),
        *([] if predicate.matrix_is_shipped else [f"the cases are those of {describe_matrix(predicate)}"]),
        *([_not_vouched(predicate.not_vouched, result.certificate)] if predicate.not_vouched else []),
        f"signed by key {result.keyid}" if result.keyid else UNSIGNED,
        shown(result.certificate),
        shown(result.reports.page),
        shown(result.reports.junit),
    )


def _not_vouched(entries: Sequence[NotVouched], certificate: Path) -> str:
    command = f"envbuild certificate show {shlex.quote(shown(certificate))}"
    return f"not vouched for: {len(entries)} known faults of the locked versions; {command} lists them"


def _print_plan(session: Session, job: CertifyJob, folder: Path) -> None:
    session.done(
        {
            "plan": str(folder.resolve()),
            "nonce": job.plan["nonce"],
            "subject": job.plan["subject"],
            "cases": [case.id for case in job.cases],
        },
        f"{shown(folder)}: a plan of {len(job.cases)} cases, the runner, and README.md with the commands to run it",
        f"judge the results with: {judge_command(job, shlex.quote(shown(folder)))}",
    )
