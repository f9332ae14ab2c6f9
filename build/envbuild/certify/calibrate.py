"""``envbuild certify --calibrate N``: proposes tolerances from the differences of healthy repeats from their baselines.

It writes a proposal with its evidence, and changes no matrix: a band is widened by a person, who has read why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from annotated_types import Le

from envbuild.catalog.context import Context
from envbuild.catalog.matrix import AXES_WITH_BANDS, Band
from envbuild.certify.cases.case import Case
from envbuild.certify.certify import CertifyOptions
from envbuild.certify.judge.judge import judge, run_problems
from envbuild.certify.judge.results import Results
from envbuild.certify.models import CaseVerdict
from envbuild.certify.report.console import failure
from envbuild.certify.run.executors import open_executor
from envbuild.certify.run.job import CertifyJob, CertifyRequest, make_job
from envbuild.certify.run.run import FinishedRun, hold_folder, remove_working_files, run_cases
from envbuild.core.files import write_atomic
from envbuild.image.output import verify

PROPOSAL = "tolerance.toml"
# Bands are of one matrix: healthy layouts of one model differed by at most 1.5e-3 in grad norm in bf16, those of
# another by 6.8e-3 (4 H200, Transformer Engine 2.11).
MARGIN = 10
# Where all digits agree there is still rounding, on other hardware: some units in the last place of the numbers.
LEAST = {"fp32": 1e-6, "bf16": 1e-4, "fp8": 1e-3}
NUMBERS = ("loss_relative", "grad_norm_relative", "weights_relative")
# A healthy case may fail these checks: calibration measures how far it is from its baseline.
MEASURED = ("parity-loss", "parity-grad-norm", "parity-weights")
_LEAST_WORDS = ", ".join(f"{value:g} ({name})" for name, value in LEAST.items())
REASON = f"""\
# band = {MARGIN} x the largest relative difference of all repeats and steps, rounded up to one digit, and at least
# {_LEAST_WORDS}. Healthy layouts differ from their baseline by the order in
# which sums are made; other GPUs and libraries change that by small factors. Wrong training is off by orders of
# magnitude: the wrong interleaved pipeline's loss 2000 times as far as a healthy case's. {MARGIN} keeps both apart.
"""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, and what is proposed.

    Attributes:
        proposal: the file.
        spreads: the largest difference of each case from its baseline, by number; in the cases' order.
        bands: what is proposed, by ``precision`` or ``precision.axis``, and number.
        refused: what cannot be proposed, and why.
    """

    proposal: Path
    spreads: Mapping[str, Mapping[str, float]]
    bands: Mapping[str, Mapping[str, float]]
    refused: tuple[str, ...]


def calibrate(request: CertifyRequest, context: Context, options: CertifyOptions) -> Calibration:
    """Train a matrix ``request.repeats`` times, and propose tolerances.

    Raises:
        CertificationFailedError: a case is wrong in another way than by being too far from its baseline.
    """
    job = make_job(request, context.store)
    job = replace(job, folder=request.out_dir / "calibrations" / request.name / job.folder.name)
    with hold_folder(job, context.reporter):
        return _calibrate(job, context, options)


def _calibrate(job: CertifyJob, context: Context, options: CertifyOptions) -> Calibration:
    executor = open_executor(job, options.machine, context.reporter)
    if job.request.image is not None:
        with context.reporter.step("check the image against its digests"):
            verify(job.request.image)
    run = run_cases(job, job.cases, executor, options.machine, context, resume=options.resume)
    verdicts = judge(job.cases, job.matrix, run.results, run.plan)
    remove_working_files(run)
    problems = run_problems(run.plan, run.results)
    wrong = [item for item in verdicts if any(problem.check not in MEASURED for problem in item.problems)]
    if wrong or problems:
        raise failure(wrong, problems, run.results, run.folder)
    spreads = spreads_of(verdicts)
    bands, refused = propose(job.cases, spreads)
    proposal = job.folder / PROPOSAL
    write_atomic(proposal, _text(job, run, spreads, bands, refused))
    return Calibration(proposal=proposal, spreads=spreads, bands=bands, refused=tuple(refused))


def spreads_of(verdicts: Iterable[CaseVerdict]) -> dict[str, dict[str, float]]:
    """The largest difference of each case from its baseline, over all its repeats."""
    found: dict[str, dict[str, float]] = {}
    for verdict in verdicts:
        if verdict.baseline is None:
            continue
        differences = verdict.largest_relative_difference
        failed = {problem.check for problem in verdict.problems}
        numbers = (differences.loss, differences.grad_norm, differences.weights)
        largest = found.setdefault(verdict.id, {})
        for name, check, value in zip(NUMBERS, MEASURED, numbers, strict=True):
            # A difference that is not finite is None too.
            found_here = math.inf if value is None and check in failed else value
            if found_here is not None:
                largest[name] = max(largest.get(name, 0.0), found_here)
    return found


def propose(
    cases: Sequence[Case], spreads: Mapping[str, Mapping[str, float]]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Bands by precision and by axis, and what cannot be proposed.

    The band of an axis is from the cases that use it alone. A case of several axes has the widest of their bands; where
    that is too narrow for it, the widest is made wide enough.
    """
    measured = [case for case in cases if case.id in spreads]
    bands: dict[str, dict[str, float]] = {}
    for name in NUMBERS:
        # Cases of one axis first: their bands decide which axis of a later case has the widest.
        for case in sorted(measured, key=lambda case: len(_axes(case))):
            if name not in spreads[case.id]:
                continue
            precision, axes = case.precision.value, _axes(case)
            needed = band_of(precision, spreads[case.id][name])
            whole = bands.setdefault(precision, {})
            whole[name] = max(whole.get(name, 0.0), needed)
            own = {axis: bands.get(f"{precision}.{axis}", {}).get(name) for axis in axes}
            if any(value is not None and value >= needed for value in own.values()) or not axes:
                continue
            widest = max(axes, key=lambda axis: own[axis] or 0.0)
            bands.setdefault(f"{precision}.{widest}", {})[name] = needed
    return _within_bounds(bands)


def _axes(case: Case) -> tuple[str, ...]:
    return tuple(axis for axis in case.axes if axis in AXES_WITH_BANDS)


def band_of(precision: str, spread: float) -> float:
    """The band for the largest difference that was seen: rounded up to one digit."""
    wanted = max(MARGIN * spread, LEAST[precision])
    if not math.isfinite(wanted):
        return math.inf
    exponent = math.floor(math.log10(wanted))
    # Of 3.0000000000000004e-05 rounding up would make 4.
    digit = math.ceil(round(wanted / 10**exponent, 9))
    return float(f"{digit}e{exponent}")


def bound_of(number: str) -> float:
    """The widest band that a matrix may have."""
    (bound,) = (item.le for item in Band.model_fields[number].metadata if isinstance(item, Le))
    return float(str(bound))


def _within_bounds(bands: Mapping[str, Mapping[str, float]]) -> tuple[dict[str, dict[str, float]], list[str]]:
    kept: dict[str, dict[str, float]] = {}
    refused = []
    for place, numbers in sorted(bands.items()):
        kept[place] = {}
        for name, value in numbers.items():
            if value <= bound_of(name):
                kept[place][name] = value
            else:
                refused.append(
                    f"{place}: {name} would be {value:g}, above the widest that a matrix may have, {bound_of(name):g}: "
                    "no band is proposed. A healthy case is not so far from its baseline: find out what is different"
                )
    return kept, refused


def _text(
    job: CertifyJob,
    run: FinishedRun,
    spreads: Mapping[str, Mapping[str, float]],
    bands: Mapping[str, Mapping[str, float]],
    refused: Sequence[str],
) -> str:
    """The proposal: its evidence as comments, and tables that fit into a matrix."""
    subject = job.subject
    results, repeats = run.results, job.request.repeats
    lines = [
        f"# Proposed tolerances for matrix {job.request.matrix_name}. Nothing uses this file: compare, and change the",
        "# matrix by hand, with the reason.",
        "#",
        f"# {subject.stack} on {subject.base} for {subject.target}, lock {subject.lock_digest}",
        *(f"# {form} {digest}" for form, digest in subject.image_digests.items()),
        f"# {_machine(results)}",
        f"# {repeats} repeats, from {results.started_at} to {results.finished_at}",
        f"# plan {run.plan_digest}",
        f"# runner {job.smoke_digest}",
        "#",
        "# The largest differences from the baseline, relative to it:",
        *(f"#   {case}: {_shown(numbers)}" for case, numbers in spreads.items()),
        "#",
        *REASON.rstrip().splitlines(),
        *(line for text in refused for line in ("#", f"# NOT PROPOSED: {text}.")),
    ]
    for place, numbers in bands.items():
        if numbers:
            lines += ["", f"[tolerance.{place}]", *(f"{name} = {value:g}" for name, value in numbers.items())]
    return "\n".join(lines) + "\n"


def _machine(results: Results) -> str:
    machine = results.machine or {}
    gpus = [f"{gpu['name']} (driver {gpu['driver']})" for gpu in machine.get("gpus", ())]
    return ", ".join(gpus) or f"CPU: {machine.get('cpu_model') or 'unknown'}"


def _shown(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_relative')} {value:.1e}" for name, value in numbers.items())
