"""A plan for another machine: written here, run there by a person or a scheduler, judged anywhere."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.certify.certificate.sign import Signer
from envbuild.certify.issue import Certification, evidence_of, issue_certificate, judge_run, read_certification
from envbuild.certify.readme import readme
from envbuild.certify.run.executors import RESULTS_DIR
from envbuild.certify.run.job import MOST_REPEATS, CertifyJob, CertifyRequest, make_job, subject_of
from envbuild.certify.run.plan import Subject, deciding
from envbuild.certify.run.run import PLAN_FILE, FinishedRun, hold_folder, read_run
from envbuild.core.digests import Json, digest_of, is_digest
from envbuild.core.errors import CertificationFailedError, ConfigurationError, ResultsRefusedError, UsageError
from envbuild.core.files import NotPlainFileError, machine_errors, read_plain, write_atomic
from envbuild.launch.bwrap import manifest_of
from envbuild.launch.launchers import LAUNCHERS, Placement
from envbuild.launch.results_file import RESULTS_FILE
from envbuild.store import entry_index
from envbuild.store.local import LocalStore
from envbuild.sync.zipapp import FILE_NAME
from envbuild_smoke.plan.json_reader import PlanError
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.plan.reader import parse_plan

README, MANIFEST = "README.md", "manifest.json"
# The runtime in certificates of runs that envbuild did not start.
BY_HAND = "by hand"
# A plan of a thousand cases has some 700 kB.
LARGEST_PLAN_BYTES = 64 << 20
NONCES, NONCE_FILE = "nonces", "judged.json"


def write_plan(request: CertifyRequest, folder: Path, store: LocalStore) -> CertifyJob:
    """Write all that another machine needs to run a job, and how to run it there.

    Raises:
        ConfigurationError: the folder is not empty.
    """
    job = make_job(request, store)
    with machine_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if names := sorted(path.name for path in folder.iterdir()):
            raise ConfigurationError(
                f"{folder} is not empty",
                why=f"It has {', '.join(names[:3])}; its results would be taken for those of the new plan.",
                fix="Name a new folder.",
            )
        # copyfile leaves the mode behind: a file of the store is read-only.
        shutil.copyfile(job.smoke, folder / FILE_NAME)
        (folder / RESULTS_DIR).mkdir()
        # Layers are no single file to hash: the runner hashes the manifest, which has their digests.
        if request.place.form == "oci" and request.image is not None:
            shutil.copyfile(manifest_of(request.image), folder / MANIFEST)
    write_atomic(folder / README, readme(job))
    # Last: a folder without it is not that of a plan.
    write_atomic(folder / PLAN_FILE, json.dumps(job.plan, indent=2) + "\n")
    return job


@dataclass(frozen=True, kw_only=True)
class ExplicitOptions:
    """Options of the command line that the plan states too; None where they were left out."""

    place: Placement | None = None
    repeats: int | None = None


def judge_folder(
    request: CertifyRequest, folder: Path, context: Context, signer: Signer | None, explicit: ExplicitOptions
) -> Certification:
    """Judge the results that were brought back to the folder of a plan, and write the certificate.

    Args:
        request: what this envbuild would certify; its plan must be the folder's.
        explicit: must be what the plan states.

    Raises:
        UsageError: an explicit option is not what the plan states.
        ResultsRefusedError: the plan is not the one that would be made here, or the results are incomplete, of another
            image, or were judged before as something else.
        CertificationFailedError: a case did not pass.
    """
    plan, place = _read_plan(folder)
    _check_explicit(explicit, place, plan.repeats)
    image = request.image if place.has_image else None
    wanted = replace(request.wanted, nodes=plan.nodes)
    request = replace(request, place=place, repeats=plan.repeats, image=image, wanted=wanted)
    job = make_job(request, context.store, _subject(request, plan))
    _check_same(plan, job, folder)
    results = folder / RESULTS_DIR / RESULTS_FILE
    if not results.is_file() and (folder / RESULTS_FILE).is_file():
        # Someone may have copied back this one file, next to the plan.
        results = folder / RESULTS_FILE
    run = read_run(folder, plan, results, job.smoke_digest)
    with hold_folder(job, context.reporter):
        _check_nonce(run, context.store)
        evidence = evidence_of(job, run, BY_HAND)
        try:
            verdicts = judge_run(job, run, evidence, context)
        except CertificationFailedError:
            # As in certify: what was measured last counts.
            job.certificate.unlink(missing_ok=True)
            raise
        # Before the certificate is written: were the nonce lost in a crash between the two, other results could be
        # certified with it. The same results may be judged again.
        context.store.get_or_build(NONCES, _nonce_key(run), entry_index.json_writer(NONCE_FILE, _use(run)))
        issue_certificate(job, evidence, verdicts, signer, context)
        return read_certification(job, folder=folder)


def _check_explicit(explicit: ExplicitOptions, place: Placement, repeats: int) -> None:
    options = (("--in", explicit.place, place), ("--repeat", explicit.repeats, repeats))
    for option, value, planned in options:
        if value not in (None, planned):
            raise UsageError(
                f"{option} {value} is not what the plan has",
                why=f"The plan was written with {option} {planned}.",
                fix=f"Give {option} {planned}, or leave {option} out.",
            )


def _refused(folder: Path, why: str, fix: str, reason: str) -> ResultsRefusedError:
    return ResultsRefusedError(f"the results in {folder} cannot be judged", why=why, fix=fix, reason=reason)


def _read_plan(folder: Path) -> tuple[Plan, Placement]:
    """The plan of a folder, and where its cases train."""
    file = folder / PLAN_FILE
    fix = "Bring back the whole folder that --plan-out wrote, unchanged."
    try:
        plan = parse_plan(read_plain(file, LARGEST_PLAN_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise _refused(folder, f"There is no plan: {file} does not exist.", fix, "plan") from None
    except NotPlainFileError as error:
        raise _refused(folder, f"{error}.", fix, "plan") from error
    except OSError as error:
        raise _refused(folder, f"{file} cannot be read: {error.strerror}.", fix, "plan") from error
    except PlanError as error:
        raise _refused(folder, f"{file} is not a plan: {error}", fix, "plan") from error
    # Where the image is not on this machine its digests are taken from the plan into the certificate.
    digests = [value for name, value in plan.subject.items() if name.endswith("_digest")]
    form, launcher = plan.subject.get("form"), plan.subject.get("launcher", "")
    forms = [known for known in LAUNCHERS.get(launcher, ()) if known == form]
    if plan.repeats > MOST_REPEATS or not forms or not all(map(is_digest, digests)):
        why = f"{file} is not a plan: its repeats or its subject is invalid."
        raise _refused(folder, why, fix, "plan")
    return plan, Placement(form=forms[0], launcher=launcher)


def _subject(request: CertifyRequest, plan: Plan) -> Subject | None:
    """What the plan is about, where the image itself is not on this machine; its other fields are compared."""
    if request.image is not None or not request.place.has_image:
        return None
    oci_digest, sqsh_digest = plan.subject.get("oci_digest"), plan.subject.get("sqsh_digest")
    return replace(subject_of(request), oci_digest=oci_digest, sqsh_digest=sqsh_digest)


def _check_same(plan: Plan, job: CertifyJob, folder: Path) -> None:
    """Refuse a plan that this envbuild would not make of the lock, the matrix and the image."""
    if differences := _differences(deciding(json.loads(plan.content)), deciding(job.plan)):
        raise _refused(
            folder,
            "Its plan is not the one that this envbuild makes:\n" + "\n".join(differences[:8]),
            "Judge with the options, the lock and the envbuild that wrote the plan, or write a new one (--plan-out).",
            "plan",
        )


def _differences(theirs: Json, ours: Json, place: str = "") -> list[str]:
    """Describe where two JSON values differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        names = [*ours, *(name for name in theirs if name not in ours)]
        return [
            line
            for name in names
            for line in _differences(theirs.get(name), ours.get(name), f"{place}.{name}" if place else str(name))
        ]
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(theirs) != len(ours):
            return [f"{place}: {len(theirs)} in the folder, {len(ours)} here"]
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [line for index, pair in pairs for line in _differences(*pair, f"{place}[{index}]")]
    # Not ==: to Python 1, 1.0 and True are equal, and in canonical JSON they differ.
    if digest_of({"value": theirs}) == digest_of({"value": ours}):
        return []
    return [f"{place}: {_shown(theirs)} in the folder, {_shown(ours)} here"]


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _check_nonce(run: FinishedRun, store: LocalStore) -> None:
    """Reject results whose plan nonce was already used for other results."""
    path = store.path_of(NONCES, _nonce_key(run))
    if not path.exists():
        return
    try:
        before = entry_index.read_json(path, NONCE_FILE)
    except ValueError as error:
        raise _refused(
            run.folder,
            f"The plan's nonce {run.plan.nonce} was used before, and the record of that, {path}, is damaged ({error}).",
            "Write a new plan (--plan-out) and run that. If you know that nothing else was certified with this one, "
            f"remove {path} and judge again.",
            "nonce",
        ) from error
    if before != _use(run):
        raise _refused(
            run.folder,
            f"With the plan's nonce {run.plan.nonce} other results were certified before: {path} is the record of it.",
            "A plan is run and judged once: write a new one (--plan-out) and run that.",
            "nonce",
        )


def _use(run: FinishedRun) -> dict[str, str]:
    return {"plan": run.plan.digest, "results": run.results_digest}


def _nonce_key(run: FinishedRun) -> str:
    return digest_of({"nonce": run.plan.nonce})
