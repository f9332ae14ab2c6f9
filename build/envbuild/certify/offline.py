"""A plan for another machine: written here, run there by hand or by a scheduler, judged anywhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.certify.certify import Certification, CertifyOptions, certification, passed, proof_of, write_proven
from envbuild.certify.run.job import MOST_REPEATS, CertifyJob, CertifyRequest, make_job
from envbuild.certify.run.plan import Subject, deciding
from envbuild.certify.run.run import PLAN_FILE, RESULTS_DIR, RESULTS_FILE, FinishedRun, held, read_run
from envbuild.certify.run.zipapp import FILE_NAME
from envbuild.core import jsonread
from envbuild.core.digests import digest_of, short
from envbuild.core.errors import CertificationFailedError, ConfigurationError, ResultsRefusedError, UsageError
from envbuild.core.files import NotPlainFileError, machine_errors, read_plain, write_atomic
from envbuild.core.progress import Reporter
from envbuild.image.output import OUT_DIR
from envbuild.launch.bwrap import manifest_of
from envbuild.launch.executors import WITHOUT_IMAGE, Where
from envbuild.store import entry_index
from envbuild.store.local import LocalStore

README, MANIFEST = "README.md", "manifest.json"
# Every image has it, empty.
MOUNT_POINT = "/envbuild"
# Not in the folder of the plan: a mount leaves an empty file of mode 0000 there, which cp and tar then fail on.
SEEN_SQSH = "/mnt/image.sqsh"
# What certificates call runs that nobody of us started.
BY_HAND = "by hand"
# A plan of a thousand cases has some 700 kB.
LARGEST_PLAN_BYTES = 64 << 20
NONCES, NONCE_FILE = "nonces", "judged.json"
_NONCE, _DIGEST = re.compile(r"[0-9a-f]{32}"), re.compile(r"sha256:[0-9a-f]{64}")


def write_plan(asked: CertifyRequest, folder: Path, store: LocalStore) -> CertifyJob:
    """Write all that another machine needs to run a job, and how to run it there.

    Raises:
        ConfigurationError: there is something in the folder already.
    """
    job = make_job(asked, store)
    with machine_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if found := sorted(path.name for path in folder.iterdir()):
            raise ConfigurationError(
                f"{folder} is not empty",
                why=f"It has {', '.join(found[:3])}; results that lie there would be taken for those of the new plan.",
                fix="Name a new folder.",
            )
        shutil.copyfile(job.smoke, folder / FILE_NAME)
        (folder / RESULTS_DIR).mkdir()
    if asked.place in ("oci", "docker") and asked.image is not None:
        with machine_errors(folder):
            shutil.copyfile(manifest_of(asked.image), folder / MANIFEST)
    write_atomic(folder / README, _readme(job))
    # Last: a folder without it is none of a plan.
    write_atomic(folder / PLAN_FILE, json.dumps(job.plan, indent=2) + "\n")
    return job


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What was said of a plan that says it itself; None for what was not."""

    place: Where | None = None
    repeats: int | None = None


def judge_folder(
    asked: CertifyRequest,
    folder: Path,
    store: LocalStore,
    reporter: Reporter,
    how: CertifyOptions,
    stated: Stated | None = None,
) -> Certification:
    """Judge the results that were brought back to the folder of a plan, and write the certificate.

    Args:
        asked: what this envbuild would certify; the plan must be the one that it makes of it.
        stated: must be what the plan says.

    Raises:
        UsageError: it is not.
        ResultsRefusedError: the plan is not the one that would be made here, or the results are not whole, of another
            image, or were judged before as something else.
        CertificationFailedError: a case did not pass.
    """
    data, plan = _read_plan(folder)
    place = plan["subject"]["in"]
    _check_stated(stated or Stated(), plan)
    asked = replace(asked, place=place, repeats=plan["repeats"], image=None if place in WITHOUT_IMAGE else asked.image)
    job = make_job(asked, store, _subject(asked, plan))
    _check_same(plan, job, folder)
    results = folder / RESULTS_DIR / RESULTS_FILE
    if not results.is_file() and (folder / RESULTS_FILE).is_file():
        results = folder / RESULTS_FILE
    run = read_run(folder, data, results, job.smoke_digest)
    certificate = job.folder / CERTIFICATE_FILE
    with held(job, reporter):
        _check_nonce(run, store)
        try:
            verdicts = passed(job, job.cases, run, {}, reporter, BY_HAND)
        except CertificationFailedError:
            certificate.unlink(missing_ok=True)
            raise
        _use_nonce(run, store)
        write_proven(job, certificate, BY_HAND, proof_of(job, run), verdicts, how.signer, reporter)
        return certification(certificate, job, cases_run=0, ran=folder)


def _check_stated(stated: Stated, plan: Mapping[str, Any]) -> None:
    said = (("--in", stated.place, plan["subject"]["in"]), ("--repeat", stated.repeats, plan["repeats"]))
    for option, value, planned in said:
        if value not in (None, planned):
            raise UsageError(
                f"{option} {value} is not what the plan has",
                why=f"It was written with {option} {planned}, and what is judged is what ran.",
                fix=f"Give {option} {planned}, or leave {option} out: the plan says it.",
            )


def _refused(folder: Path, why: str, fix: str, reason: str) -> ResultsRefusedError:
    return ResultsRefusedError(f"what is in {folder} cannot be judged", why=why, fix=fix, reason=reason)


def _read_plan(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The plan of a folder: its bytes, and what is in them."""
    file = folder / PLAN_FILE
    fix = "Bring the whole folder back that --plan-out wrote, as it was."
    try:
        data = read_plain(file, LARGEST_PLAN_BYTES)
        plan = jsonread.loads(data)
        known = (
            type(repeats := plan["repeats"]) is int  # True is no number of repeats
            and 1 <= repeats <= MOST_REPEATS
            and _NONCE.fullmatch(plan["nonce"])
            and plan["subject"]["in"] in get_args(Where)
            and all(_DIGEST.fullmatch(value) for name, value in plan["subject"].items() if name.endswith("_digest"))
        )
    except (FileNotFoundError, NotADirectoryError):
        raise _refused(folder, f"There is no plan: {file} does not exist.", fix, "plan") from None
    except NotPlainFileError as error:
        raise _refused(folder, f"{error}.", fix, "plan") from error
    except OSError as error:
        raise _refused(folder, f"{file} cannot be read: {error.strerror}.", fix, "plan") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _refused(folder, f"{file} is no plan: {error!r}", fix, "plan") from error
    if not known:
        why = f"{file} is no plan: its repeats, its nonce or its subject is none."
        raise _refused(folder, why, fix, "plan")
    return data, plan


def _subject(asked: CertifyRequest, plan: Mapping[str, Any]) -> Subject | None:
    """What the plan is about, where the image itself is not here to say it; its other fields are compared."""
    if asked.image is not None or asked.place in WITHOUT_IMAGE:
        return None
    selection, stated = asked.selection, plan["subject"]
    return Subject(
        name=asked.name,
        stack=selection.stack_name,
        base=selection.base_name,
        target=selection.target_name,
        lock_digest=asked.lock.lock.digest,
        oci_digest=stated.get("oci_digest"),
        sqsh_digest=stated.get("sqsh_digest"),
        place=asked.place,
    )


def _check_same(plan: Mapping[str, Any], job: CertifyJob, folder: Path) -> None:
    """The plan must be what this envbuild makes of the lock, the matrix and the image."""
    ours: Mapping[str, Any] = deciding(job.plan)
    try:
        theirs: Mapping[str, Any] = deciding(dict(plan))
    except (TypeError, AttributeError) as error:
        raise _refused(folder, f"Its plan is none: {error!r}", "Make a new plan (--plan-out).", "plan") from error
    differences = _differences(theirs, ours)
    if differences:
        raise _refused(
            folder,
            "Its plan is not the one that is made here:\n" + "\n".join(differences[:8]),
            "Judge with the options, the lock and the envbuild that wrote the plan, or write a new one (--plan-out).",
            "plan",
        )


def _differences(theirs: Any, ours: Any, place: str = "") -> list[str]:
    """Where two JSON values differ, in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        names = [*ours, *(name for name in theirs if name not in ours)]
        return [
            line
            for name in names
            for line in _differences(theirs.get(name), ours.get(name), f"{place}.{name}" if place else str(name))
        ]
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)) and len(theirs) == len(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [line for index, pair in pairs for line in _differences(*pair, f"{place}[{index}]")]
    if digest_of({"value": theirs}) == digest_of({"value": ours}):
        return []
    return [f"{place}: {_shown(theirs)} there, {_shown(ours)} here"]


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _check_nonce(run: FinishedRun, store: LocalStore) -> None:
    """A plan is run once: what was certified by its nonce is not certified by it as something else."""
    nonce = str(run.plan["nonce"])
    path = store.path_of(NONCES, digest_of({"nonce": nonce}))
    if not path.exists():
        return
    try:
        before = _read_use(path)
    except ValueError as error:
        raise _refused(
            run.folder,
            f"The plan's nonce {nonce} was used before; for which results cannot be read any more: the record in "
            f"{path} is damaged ({error}).",
            "Write a new plan (--plan-out) and run that. If you know that nothing else was certified by this one, "
            f"remove {path} and judge again.",
            "nonce",
        ) from error
    if before != _use(run):
        raise _refused(
            run.folder,
            f"By the plan's nonce {nonce} other {'results' if before['plan'] == run.plan_digest else 'plans'} were "
            f"certified before ({short(before['results'])} of plan {short(before['plan'])}).",
            "A plan is run and judged once: write a new one (--plan-out) and run that.",
            "nonce",
        )


def _read_use(path: Path) -> dict[str, str]:
    """What a nonce was used for; a ValueError where nobody can say."""
    found = entry_index.read_json(path, NONCE_FILE)
    try:
        known = found.keys() == {"plan", "results"} and all(_DIGEST.fullmatch(value) for value in found.values())
    except (AttributeError, TypeError):
        known = False
    if not known:
        raise ValueError(f"{NONCE_FILE} is no record of a plan and its results")
    return dict(found)


def _use(run: FinishedRun) -> dict[str, str]:
    return {"plan": run.plan_digest, "results": run.results_digest}


def _use_nonce(run: FinishedRun, store: LocalStore) -> None:
    text = json.dumps(_use(run)) + "\n"
    store.get_or_build(
        NONCES, digest_of({"nonce": str(run.plan["nonce"])}), lambda entry: _write_nonce(entry / NONCE_FILE, text)
    )


def _write_nonce(path: Path, text: str) -> None:
    path.write_text(text)


def judge_command(job: CertifyJob, folder: str) -> str:
    """The command that judges a plan's results."""
    asked = job.asked
    selection = asked.selection
    words = ["envbuild", "certify", "--stack", selection.stack_name, "--base", selection.base_name]
    words += ["--target", selection.target_name, "--matrix", asked.matrix_name]
    words += ["--name", asked.lock_name] if asked.lock_name else []
    words += [word for case in asked.only for word in ("--only", case)]
    words += ["--out-dir", str(asked.out_dir)] if asked.out_dir != OUT_DIR else []
    return f"{shlex.join(words)} --judge {folder}"


def _readme(job: CertifyJob) -> str:
    """How to run the plan, and what to bring back."""
    asked, subject = job.asked, job.subject
    what = f"{subject.stack} on {subject.base} for {subject.target}, lock {subject.lock_digest}"
    digests = {"OCI image": subject.oci_digest, ".sqsh": subject.sqsh_digest}
    lines = [f"- {name}: `{digest}`" for name, digest in digests.items() if digest]
    needs = max(int(job.planned(case.id)["world_size"]) for case in job.cases)
    device = f"{needs} GPUs of the target" if job.on_gpus else "a CPU"
    return _README.format(
        what=what,
        digests="\n".join(["", *lines]) if lines else "",
        device=device,
        cases=len(job.cases),
        commands=_COMMANDS[asked.place].format(
            python=asked.image.record.python if asked.image else "python",
            folder=MOUNT_POINT,
            seen=SEEN_SQSH,
            request=f", --gpus-per-node={needs}" if job.on_gpus else "",
            gpus=" --gpus all --ulimit memlock=-1" if job.on_gpus else "",
            digest=subject.oci_digest,
        ),
        judge=judge_command(job, "DIR"),
    )


_README = """\
# A certification plan

For {what}.{digests}

It trains {cases} cases and needs {device}. Nothing but this folder and what is certified is needed there: `smoke.pyz`
runs with the standard library and with what is under test. Results go to `results/`.

```sh
cd DIR        # this folder, where the cases run
{commands}```

More words may follow: `--gpus 0,1` for some of the GPUs, `--isolation process` for a new process for every case, and
`--resume` to go on with a run that was interrupted. The exit status is 0 when all cases completed and 1 when some did
not; both leave results, and only the judge says whether they agree. 2: the plan is damaged. 3: the environment cannot
run it. 4: the GPUs are not as the plan wants.

Bring back the whole folder, or at least `plan.json` and `results/results.jsonl`, as they are. Then, anywhere:

```sh
{judge}
```

The plan has a nonce: its results are certified once. For another run write another plan.
"""
_ENROOT = """\
SQSH=/path/to/image.sqsh
# With enroot:
enroot start --mount "$PWD:{folder}" --mount "$SQSH:{seen}" "$SQSH" \\
    {python} {folder}/smoke.pyz run --plan {folder}/plan.json --out {folder}/results --image {seen}
# Or under Slurm with pyxis; add what the partition asks for (--partition, --time{request}):
srun --nodes=1 --ntasks=1 --no-container-mount-home --container-image="$SQSH" \\
    --container-mounts="$PWD:{folder},$SQSH:{seen}" \\
    {python} {folder}/smoke.pyz run --plan {folder}/plan.json --out {folder}/results --image {seen}
"""
_DOCKER = """\
# The image by its digest, as its registry has it
docker run --rm{gpus} --network none --ipc host -v "$PWD:{folder}" --entrypoint {python} REGISTRY/NAME@{digest} \\
    {folder}/smoke.pyz run --plan {folder}/plan.json --out {folder}/results --image {folder}/manifest.json
"""
_PYTHON = """\
# With the Python of the environment that is certified
python smoke.pyz run --plan plan.json --out results
"""
_COMMANDS = {"sqsh": _ENROOT, "oci": _DOCKER, "docker": _DOCKER, "venv": _PYTHON, "here": _PYTHON}
