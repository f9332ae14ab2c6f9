"""A ledger of made-up nights: two stacks, seven targets, and something of everything that goes wrong."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

from helpers.certificates import EVIL
from helpers.ledger_rows import digest

from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.ledger.models import (
    BisectRow,
    CaseRow,
    CertificateRow,
    ImageRow,
    LockedPart,
    LockRow,
    Moved,
    NightRow,
    PublicationRow,
    Row,
    StepError,
    StepRow,
)

AT = datetime(2026, 11, 23, 7, 30, tzinfo=timezone.utc)
REPOSITORY = "registry.example.org/training/envs"
TARGETS = {"nemo": ("h100", "h200", "b200", "gb200", "a100"), "mcore": ("cpu", "h200")}
SM = {"h100": "90", "h200": "90", "b200": "100", "gb200": "100", "a100": "80"}
CASES = (
    "gpt-bf16-baseline-gb8",
    "gpt-bf16-tp2",
    "gpt-bf16-pp2",
    "gpt-bf16-cp2",
    "moe-bf16-baseline-gb8",
    "moe-bf16-ep2",
)
ERROR = StepError(
    fault="training",
    kind="CertificationFailedError",
    exit_code=7,
    what="1 of 6 cases failed",
    why=f"gpt-bf16-cp2: parity-loss: step 4: 5.1e-03 from the baseline's, band 2.0e-05; {EVIL}",
    fix="No certificate was written. Plan, results and a log for each rank are in out/certificates.",
)


def text(moment: datetime) -> str:
    return moment.strftime(MOMENT_FORMAT)


def nights(builds: int = 100) -> list[Row]:
    """Rows of nights with this many certified builds, the last night two hours before :data:`AT`."""
    rows: list[Row] = []
    per_night = sum(map(len, TARGETS.values()))
    count = math.ceil(builds / per_night)
    for number in range(count):
        start = AT - timedelta(days=count - 1 - number, hours=5)
        for stack, targets in TARGETS.items():
            rows += _night(stack, targets, number, start, last=number == count - 1, first=number == 0)
    return rows


def _night(stack: str, targets: tuple[str, ...], number: int, start: datetime, *, last: bool, first: bool) -> list[Row]:
    name, lock = f"{stack}-{start:%Y%m%dT%H%M%SZ}-0a1b2c", digest(f"{stack} {number}")
    moved = [] if first else [Moved(package="megatron-core", before=f"0.17.0rc{number}", after=f"0.17.0rc{number + 1}")]
    moved += [Moved(package=f"nvidia-part-{index}", before="1.0", after="1.1") for index in range(18 if last else 0)]
    rows: list[Row] = [
        LockRow(
            stack=stack,
            digest=lock,
            name=stack,
            base="ubuntu2404-cu130",
            as_of=text(start),
            driver="mcore",
            components={
                "torch": LockedPart(version="2.13.0+cu130", asked="==2.13.0"),
                "megatron-core": LockedPart(
                    version=f"0.17.0rc{number + 1}",
                    asked="main",
                    git="https://github.com/NVIDIA/Megatron-LM.git",
                    commit=f"{number + 10:040x}",
                    committed_at=text(start - timedelta(hours=6)),
                    follows=True,
                ),
            },
            packages={f"package-{index}": f"{index}.{number}" for index in range(271)},
            seen_at=text(start),
        ),
    ]
    steps: list[StepRow] = [_step(stack, name, "", "lock", start, seconds=41.2, digest=lock)]
    for place, target in enumerate(targets):
        rows += _target(stack, target, place, number, start, name, last=last, steps=steps)
    failed = any(step.state == "failed" for step in steps)
    waiting = any(step.state == "waiting" for step in steps)
    rows.append(
        NightRow(
            stack=stack,
            id=name,
            targets=targets,
            repository=REPOSITORY,
            host="builder-3",
            envbuild="0.1.0",
            started_at=text(start),
            finished_at=text(start + timedelta(minutes=97)),
            exit_code=7 if failed else 8 if waiting else 0,
            lock_name=stack,
            lock_digest=lock,
            previous_lock_digest="" if first else digest(f"{stack} {number - 1}"),
            moved=tuple(moved),
        )
    )
    return [*rows, *steps]


def _step(stack: str, night: str, target: str, name: str, start: datetime, **more: object) -> StepRow:
    values = {
        "stack": stack,
        "night": night,
        "target": target,
        "name": name,
        "state": "done",
        "started_at": text(start),
    }
    return StepRow.model_validate(values | more)


def _target(
    stack: str,
    target: str,
    place: int,
    number: int,
    start: datetime,
    night: str,
    *,
    last: bool,
    steps: list[StepRow],
) -> list[Row]:
    word = f"{stack} {number} {target}"
    lock, image, certificate = digest(f"{stack} {number}"), digest(word), digest(f"certificate {word}")
    common = {"stack": stack, "target": target, "base": "ubuntu2404-cu130", "lock_digest": lock}
    size = int((7.1 + 0.4 * place + 0.03 * number + (0.4 if number > 8 else 0)) * 1e9)
    built, certified = start + timedelta(minutes=22), start + timedelta(minutes=71)
    step = 0.11 / (1 + place) * (1.0 if number < 9 else 0.93) + 0.0006 * (number % 3)
    fails = (stack, target) == ("nemo", "b200") and last
    waits = target == "gb200" and number > 1
    steps += [
        _step(stack, night, target, "wheels", start, seconds=612.0, lock_digest=lock, state="nothing"),
        _step(stack, night, target, "image", start, seconds=93.5, lock_digest=lock, digest=image),
    ]
    cases = [_case(common, certificate, name, step, certified, index, failed="") for index, name in enumerate(CASES)]
    rows: list[Row] = [ImageRow(**common, oci_digest=image, size_bytes=size, built_at=text(built))]
    if waits:
        steps += [
            _step(stack, night, target, "certify", built, state="waiting", lock_digest=lock, plan="out/plans/1"),
            _step(stack, night, target, "publish", built, state="skipped", lock_digest=lock),
        ]
        return rows
    if fails:
        failed = _case(common, night, CASES[3], step, certified, 3, failed="parity-loss")
        rows += [failed, *(case.model_copy(update={"run": night}) for case in cases if case.case != failed.case)]
        rows.append(
            BisectRow(
                stack=stack,
                night=night,
                target=target,
                good=digest(f"{stack} {number - 1}"),
                bad=lock,
                component="megatron-core",
                before=f"0.17.0rc{number}",
                after=f"0.17.0rc{number + 1}",
                commit=f"{number + 10:040x}",
                tests=6,
                text=f"broken by megatron-core 0.17.0rc{number} -> 0.17.0rc{number + 1}",
                ended_at=text(certified),
            )
        )
        steps += [
            _step(stack, night, target, "certify", built, state="failed", lock_digest=lock, attempts=2, error=ERROR),
            _step(stack, night, target, "publish", built, state="skipped", lock_digest=lock),
        ]
        return rows
    steps += [
        _step(stack, night, target, "certify", built, seconds=2940.0, lock_digest=lock, digest=certificate),
        _step(stack, night, target, "publish", built, seconds=31.0, bytes_sent=143_000_000, digest=image),
    ]
    return [*rows, *cases, *_certified(common, word, number, place, certified, size)]


def _certified(
    common: dict[str, str], word: str, number: int, place: int, at: datetime, size: int
) -> tuple[CertificateRow, PublicationRow]:
    stack, target, lock = common["stack"], common["target"], common["lock_digest"]
    certificate, image = digest(f"certificate {word}"), digest(word)
    measured = {
        "measured_at": text(at),
        "keyid": "ab" * 32,
        "certificate_digest": certificate,
        "certified_at": text(at),
    }
    return (
        CertificateRow(
            **common,
            digest=certificate,
            certificate_key=digest(f"key {word}"),
            oci_digest=image,
            keyid="ab" * 32,
            matrix="certify-quick",
            matrix_digest=digest("matrix"),
            matrix_is_shipped=True,
            whole_matrix=True,
            cases=len(CASES),
            gpus=(f"8x NVIDIA {target.upper()}",) if target in SM else (),
            seconds=2900.0 + 40 * (number % 5) - 200 * place,
            measured_at=text(at),
            issued_at=text(at),
        ),
        PublicationRow(
            **common,
            **measured,
            repository=REPOSITORY,
            tag=f"{stack}-main-{lock[7:19]}-{target}",
            moving_tag=f"{stack}-main-{target}",
            lock_name=stack,
            oci_digest=image,
            size_bytes=size,
            sqsh_digest=digest(f"sqsh {word}"),
            sqsh_size_bytes=int(size * 0.97),
            published_at=text(at),
            gpus=(SM[target],) if target in SM else (),
            envbuild="0.1.0",
        ),
    )


def _case(
    common: dict[str, str], run: str, name: str, step: float, at: datetime, index: int, *, failed: str
) -> CaseRow:
    model = name.partition("-")[0]
    off = 0.02 * index if failed else 1e-6 * index
    losses = [10.4 - 0.35 * number + (0.2 if model == "moe" else 0) + off * number for number in range(10)]
    return CaseRow(
        **common,
        run=run,
        case=name,
        baseline=None if "baseline" in name else f"{model}-bf16-baseline-gb8",
        passed=not failed,
        problem=failed,
        seconds=41.0,
        step_seconds=step * (1 + 0.05 * index),
        loss=tuple(losses),
        grad_norm=tuple(1 + number / 10 for number in range(10)),
        measured_at=text(at),
    )
