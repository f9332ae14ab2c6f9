"""The step `checks`: refuses what does not belong together."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.catalog.stack import Driver
from envbuild.lock.checks.api_drift import check_api
from envbuild.lock.checks.declared_ranges import DeclaredRanges, Overridden
from envbuild.lock.checks.findings import CheckFinding, refuse
from envbuild.lock.checks.releases import check_releases
from envbuild.lock.checks.rules import CheckInput, check_cuda_mix, run_checks
from envbuild.lock.components.decide import release_without_llm
from envbuild.lock.context import LockContext
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.resolve.resolve import ResolvedPlan
from envbuild.lock.uv.resolution import Resolution


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What the checks found and nothing refuses.

    Attributes:
        allowed: the findings that the user let pass.
        warnings: what is recorded and refuses nothing.
        overridden: the declared ranges that overrides and pins go against.
    """

    allowed: tuple[CheckFinding, ...]
    warnings: tuple[CheckFinding, ...]
    overridden: tuple[Overridden, ...]


def check_lock(resolved: ResolvedPlan, context: LockContext) -> CheckResult:
    """Run all checks on what was resolved.

    Raises:
        CheckRefusedError: a check found something that the user did not allow.
    """
    plan, resolution = resolved.plan, resolved.resolution
    with context.reporter.step("check the lock"):
        ranges = DeclaredRanges(plan, resolution, context)
        overridden = ranges.overridden()
        findings = [
            *run_checks(_check_input(plan, resolution, context)),
            *ranges.against_provided(),
            *(override.finding() for override in overridden if not override.meant),
            *check_releases(plan, resolution, context),
            *check_api(plan.project, resolution.packages, context),
        ]
        allowed = refuse(findings, plan.inputs.request.allow, plan.inputs.title)
        warnings = tuple(finding for finding in findings if finding.warning)
        return CheckResult(allowed=allowed, warnings=warnings, overridden=overridden)


def refuse_at_once(resolved: ResolvedPlan, context: LockContext) -> None:
    """Refuse what a first resolution shows already, before more is asked of the index.

    Raises:
        CheckRefusedError: a placeholder, or packages of another CUDA than the base's.
    """
    plan, resolution = resolved.plan, resolved.resolution
    placeholders = [finding for finding in check_releases(plan, resolution, context) if finding.code == "placeholder"]
    findings = [*placeholders, *check_cuda_mix(_check_input(plan, resolution, context))]
    refuse(findings, plan.inputs.request.allow, plan.inputs.title)


def _check_input(plan: LockPlan, resolution: Resolution, context: LockContext) -> CheckInput:
    selection = plan.inputs.selection
    stack, catalog = selection.stack, selection.catalog
    driver = plan.effective.stack.driver
    return CheckInput(
        packages=resolution.uv_lock.locked,
        base=selection.base,
        targets={
            entry.target: catalog.target(entry.target) for entry in stack.builds if selection.base_name in entry.bases
        },
        variables=stack.variables_on(selection.base.cuda_major),
        conflicts=catalog.conflicts,
        matrix=None if driver is Driver.NONE else catalog.matrix(stack.matrix_for(selection.base.device, driver)),
        torch_build=plan.project.torch_build,
        asked=plan.project.asked,
        bases={base: catalog.base(base) for entry in stack.builds for base in entry.bases},
        driver_problem=plan.driver_problem or release_without_llm(resolution.packages, driver, context),
        ignored_settings=resolution.ignored_settings or _other_moment(plan, resolution),
    )


def _other_moment(plan: LockPlan, resolution: Resolution) -> str:
    """That uv resolved as of another moment than the project's; empty: it did not."""
    # Whatever the cause: with UV_NO_CONFIG, say, uv 0.13.8 reads no [tool.uv] and gives no warning.
    stated = resolution.uv_lock.options.exclude_newer
    if stated == plan.project.as_of:
        return ""
    return f"uv.lock is as of {stated or 'no moment'}, and the project of {plan.project.as_of or 'none'}"
