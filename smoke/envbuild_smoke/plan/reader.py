"""Reads `plan.json` into a Plan.

envbuild checks what a layout needs when it writes the plan (`certify/cases`), and the results carry the plan's digest.
Here only the form is checked, and the references that the runner follows.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

from envbuild_smoke.plan.json_reader import PlanError, load_json, names, read_object
from envbuild_smoke.plan.models import Plan


def read_plan(path: Path) -> Plan:
    """Read and check the plan in the file `path`; raises PlanError."""
    try:
        return parse_plan(path.read_bytes())
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror or error}") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def parse_plan(content: bytes) -> Plan:
    """Check the bytes of a `plan.json`; raises PlanError."""
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    plan = read_object(Plan, load_json(content), "plan", digest=digest, content=content)
    _check_device(plan)
    _check_references(plan)
    # Stable: baselines come first, and otherwise the plan's order stays.
    return replace(plan, cases=tuple(sorted(plan.cases, key=lambda case: case.baseline is not None)))


def _check_device(plan: Plan) -> None:
    if (plan.device == "cuda") == (plan.gpu is None):
        kind = "null" if plan.gpu is None else "an object"
        raise PlanError(f"plan.gpu: found {kind} with device {plan.device!r}; it is null on the CPU, and only there")


def _check_references(plan: Plan) -> None:
    """Refuse repeated ids, and models and baselines that the plan does not have."""
    ids: set[str] = set()
    baselines = [case.id for case in plan.cases if case.baseline is None]
    for case in plan.cases:
        if case.id in ids:
            raise PlanError(f"plan.cases: the id {case.id!r} occurs twice; ids must differ")
        # The id names a directory: two cases of one id would overwrite each other's logs and checkpoints.
        ids.add(case.id)
        for part in case.parts:
            ranks = part.layout.world_size
            if part.nodes > plan.nodes or ranks % part.nodes:
                problem = f"found {part.nodes}; the run has {plan.nodes}, and each has as many of the {ranks} ranks"
                raise PlanError(f"case {case.id}: nodes: {problem}")
        if case.model not in plan.models:
            raise PlanError(f"case {case.id}: model: found {case.model!r}; plan.models has {names(plan.models)}")
        # Only a case without a baseline saves initial weights, so a chain of baselines could never start.
        if case.baseline is not None and case.baseline not in baselines:
            problem = f"found {case.baseline!r}; the plan's baselines: {names(baselines)}"
            raise PlanError(f"case {case.id}: baseline: {problem}")
    for case in plan.cases:
        baseline = plan.case(case.baseline or case.id)
        # On a node without its baseline a case would wait for ever.
        if (case.home_node or 0) >= plan.nodes or baseline.home_node not in (None, case.home_node):
            problem = f"found {case.home_node}; the run has {plan.nodes} nodes, and {baseline.id} has to run there, too"
            raise PlanError(f"case {case.id}: home_node: {problem}")
