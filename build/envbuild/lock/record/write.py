"""Resolves a plan with uv and writes the files of the lock."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Selection, definition_digest
from envbuild.core.background import interruptible
from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.errors import EnvbuildError, ResolutionError
from envbuild.core.files import machine_errors
from envbuild.git.repository import CommitKind
from envbuild.lock import lockfile
from envbuild.lock.checks.api_drift import check_api
from envbuild.lock.checks.base_packages import against_provided
from envbuild.lock.checks.overridden import Overridden, against_declarations, against_ranges
from envbuild.lock.checks.rules import CheckFinding, CheckInput, refuse, run_checks
from envbuild.lock.components.driver import release_without_llm
from envbuild.lock.components.git_sources import settled
from envbuild.lock.components.models import Chosen
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs import as_of
from envbuild.lock.lockfile import PHASE_FILES, Inputs, Lock, LockedBase, LockedComponent, LockedPhase, LockedTorch
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import render_project, with_takings
from envbuild.lock.uv.program import uv_version
from envbuild.lock.uv.resolution import Resolution, export, resolve, with_local_hashes

# uv's words for what only the project itself may take from elsewhere than the index.
_URL_REFUSED = re.compile(r"Package `([^`]+)`\s+was\s+included\s+as\s+a\s+URL\s+dependency")
INSTALLS = {
    "main": "uv pip install --no-deps --require-hashes -r main.txt",
    "compile": "uv pip install --no-deps --require-hashes --no-build-isolation -r compile.txt",
    "git": "uv pip install --no-deps --no-build-isolation -r git.txt",
}


def write_lock(
    selection: Selection, plan: LockPlan, inputs: str, work: LockContext, repositories: Repositories
) -> None:
    """Resolve ``plan`` and write all files of the lock into the workplace's folder.

    Raises:
        ResolutionError: the stack does not resolve.
        NetworkError: an index cannot be reached.
    """
    what = f"resolve stack {selection.stack_name} on {selection.base_name}"

    with work.reporter.step(f"resolve {selection.stack_name} on {selection.base_name}"):
        plan, resolution = _resolve(plan, what, work)
    with contextlib.suppress(EnvbuildError):
        plan.api_read.result()
    with work.reporter.step("check the lock"):
        overridden = (
            *against_declarations(plan, resolution, work),
            *against_ranges(plan, resolution, work, repositories),
        )
        allowed = _check(selection, plan, resolution, overridden, work, repositories)
    with work.reporter.step("write the lock"):
        phases = _write_phases(plan, resolution, what, work)
        _write(render_project(plan.project, pins=_pins(plan, resolution)), work)
        lock = _record(selection, plan, resolution, inputs, phases, allowed, overridden)
        with machine_errors(work.folder):
            pyproject = sha256_file(work.folder / lockfile.PROJECT_FILE)
            lock = lockfile.sealed(lock.model_copy(update={"pyproject_digest": pyproject}))
            (work.folder / lockfile.RECORD_FILE).write_text(lockfile.render(lock))


def _resolve(plan: LockPlan, what: str, work: LockContext) -> tuple[LockPlan, Resolution]:
    """Resolve, and once more with every version pinned, as the project that the lock holds.

    Returns the plan too, without what its components would take from git and nothing asks for.
    """
    try:
        found = _first(plan, what, work)
    except ResolutionError as error:
        try:
            plan, found = _with_what_is_asked_for(plan, error, what, work)
        except ResolutionError as last:
            raise _explain_refused(last) from error
    # 2.13.0 takes 2.13.0+cpu too, and rather, where the site's find-links have it.
    while plan.torch.kind == "package-index" and "+" in (build := found.pins.get("torch", "")):
        work.reporter.note(f"  torch {build}, which this site has, is not the package index's build: without it")
        plan = replace(plan, torch=replace(plan.torch, not_these=(*plan.torch.not_these, build)))
        found = _once(plan, plan.keep, what, work)
    while (takings := settled(plan.project.takings, found.uv_lock["package"])) != plan.project.takings:
        before = plan.project.takings.in_force
        plan = replace(plan, project=with_takings(plan.project, takings))
        if takings.in_force != before:
            found = _once(plan, plan.keep, what, work)
    for name in sorted(plan.request.pins.keys() - plan.led.stack.every_component().keys()):
        if canonicalize_name(name) not in plan.project.takings.in_force:
            work.reporter.note(f"note: nothing in the lock takes {name} from git, so its pin decides nothing")
    _refuse_other_sdists(plan, found)
    pins = _pins(plan, found)
    if _text(plan, pins) == _text(plan, plan.keep):
        return plan, found  # every version was kept: this is what was resolved
    return plan, _once(plan, pins, what, work, from_cache=True)


def _text(plan: LockPlan, pins: Mapping[str, str]) -> str:
    return render_project(plan.project, pins=pins, source=plan.torch)


def _first(plan: LockPlan, what: str, work: LockContext) -> Resolution:
    """Resolve; what was begun ahead is taken if it is the very same project."""
    text = _text(plan, plan.keep)
    if plan.begun is not None and plan.begun.text == text:
        _write(text, work)
        return plan.begun.into(work.folder)
    if plan.begun is not None:
        plan.begun.answer.stop()
    return _once(plan, plan.keep, what, work)


def _explain_refused(error: ResolutionError) -> ResolutionError:
    """The error with what to do about a package that uv refuses to take from elsewhere."""
    names = ", ".join(dict.fromkeys(_URL_REFUSED.findall(error.why)))
    if not names:
        return error
    return error.with_context(
        fix=f"Its authors take {names} from elsewhere ([tool.uv.sources]) in a way that is not followed: a path, a "
        "member of a workspace, or what a note above says could not be had. Reach its repository, or make it a "
        "component of the stack: [components.NAME] with git and ref, or with a version."
    )


def _once(
    plan: LockPlan, pins: Mapping[str, str], what: str, work: LockContext, *, from_cache: bool = False
) -> Resolution:
    _write(_text(plan, pins), work)
    return resolve(
        work.folder,
        plan.torch,
        what,
        work.log,
        work.reporter.update,
        # They are for a check to refuse, or the user to allow.
        settings_may_be_ignored=True,
        from_cache=from_cache,
    )


def _with_what_is_asked_for(
    plan: LockPlan, error: ResolutionError, what: str, work: LockContext
) -> tuple[LockPlan, Resolution]:
    """Resolve with what components need from git for sure, and with what uv then asks for.

    What an extra takes from git that nothing asks for would be in the way of a release of it that something needs.

    Args:
        error: why it does not resolve with all that may be taken.
    """
    every = plan.project.takings
    asked = {item.name for item in every.candidates if item.required}
    while (some := every.only(asked)).in_force != every.in_force:
        trial = replace(plan, project=with_takings(plan.project, some))
        try:
            return trial, _once(trial, trial.keep, what, work)
        except ResolutionError as other:
            refused = {canonicalize_name(name) for name in _URL_REFUSED.findall(other.why)} & every.in_force.keys()
            if refused <= asked:
                raise
            asked |= refused
    raise error


def _refuse_other_sdists(plan: LockPlan, resolution: Resolution) -> None:
    """What was read of an sdist holds for the one that is locked."""
    locked = {(package["name"], package.get("version")): package for package in resolution.uv_lock["package"]}
    for item in plan.project.metadata:
        digest = locked.get((item.name, item.version), {}).get("sdist", {}).get("hash", item.sdist_digest)
        if digest != item.sdist_digest:
            raise ResolutionError(
                f"the index has another sdist of {item.name} {item.version} than a moment ago, or than the lock",
                why=f"What it declares was read from {item.sdist_digest}; now the index states {digest}.",
                fix="Run again. If it stays, the index replaces files of a release, which no lock can hold.",
            )


def _write(text: str, work: LockContext) -> None:
    with machine_errors(work.folder):
        (work.folder / lockfile.PROJECT_FILE).write_text(text)


def _check(
    selection: Selection,
    plan: LockPlan,
    resolution: Resolution,
    overridden: tuple[Overridden, ...],
    work: LockContext,
    repositories: Repositories,
) -> tuple[CheckFinding, ...]:
    """Refuse what does not belong together; returns the findings that were allowed."""
    packages = {str(package["name"]): package for package in resolution.uv_lock["package"]}
    targets = {entry.target: selection.catalog.target(entry.target) for entry in selection.stack.builds}
    checked = CheckInput(
        packages=tuple(package for package in resolution.uv_lock["package"] if "virtual" not in package["source"]),
        compiled=frozenset(plan.project.compiled()),
        base=selection.base,
        targets=targets,
        conflicts=selection.catalog.conflicts(),
        torch_build=plan.project.torch_build,
        asked={
            **{name: item.specifier for name, item in plan.project.chosen.items()},
            **plan.project.requirements,
        },
        bases={base: selection.catalog.base(base) for entry in selection.stack.builds for base in entry.bases},
        driver_problem=plan.driver_problem or release_without_llm(packages, plan.led.driver, work),
        ignored_settings=resolution.ignored_settings or _other_moment(plan, resolution),
    )
    drift = check_api(plan.project.chosen, packages, selection.base, work, repositories)
    findings = [
        *run_checks(checked),
        *against_provided(plan, resolution, work),
        *(item.finding() for item in overridden if not item.meant),
        *drift,
    ]
    return refuse(findings, plan.request.allow, f"stack {selection.stack_name} on {selection.base_name}")


def _other_moment(plan: LockPlan, resolution: Resolution) -> str:
    """In words, that uv resolved as of another moment than it was told; empty: it did not."""
    stated = resolution.uv_lock.get("options", {}).get("exclude-newer")
    if stated == plan.as_of.text():
        return ""
    return f"uv.lock is as of {stated or 'no moment'}, and the project of {plan.as_of.text()}"


def _pins(plan: LockPlan, resolution: Resolution) -> dict[str, str]:
    """Every version, but those of packages that a commit pins already."""
    direct = plan.project.pinned_directly()
    return {name: version for name, version in resolution.pins.items() if name not in direct}


def _write_phases(plan: LockPlan, resolution: Resolution, what: str, work: LockContext) -> dict[str, LockedPhase]:
    # A component of the compile phase is built there, also where one of phase main depends on it.
    late = {canonicalize_name(name) for name in plan.project.compiled()}
    with interruptible(ThreadPoolExecutor(2)) as pool:
        exported = pool.submit(export, work.folder, None, what, work.log)
        with_compile = export(work.folder, "compile", what, work.log)
    main = [block for block in exported.result() if _key(block) not in late]
    in_main = {_key(block) for block in main}
    compiled = [block for block in with_compile if _key(block) not in in_main]
    blocks = {
        "main": with_local_hashes([block for block in main if not _from_git(block)], resolution, plan.torch),
        "compile": with_local_hashes([block for block in compiled if not _from_git(block)], resolution, plan.torch),
        "git": [block for block in (*main, *compiled) if _from_git(block)],
    }
    phases = {}
    for phase, lines in blocks.items():
        text = f"# Written by `envbuild lock`. Phase {phase}: {len(lines)} packages.\n# {INSTALLS[phase]}\n"
        text += "".join(f"{line}\n" for line in lines)
        with machine_errors(work.folder):
            (work.folder / PHASE_FILES[phase]).write_text(text)
        phases[phase] = LockedPhase(file=PHASE_FILES[phase], packages=len(lines), digest=sha256_bytes(text.encode()))
    return phases


def _from_git(block: str) -> bool:
    return " @ git+" in block.split("\n", 1)[0]


def _key(block: str) -> str:
    return re.split(r"==| @ |\[", block, maxsplit=1)[0].strip()


def _record(
    selection: Selection,
    plan: LockPlan,
    resolution: Resolution,
    inputs: str,
    phases: dict[str, LockedPhase],
    allowed: tuple[CheckFinding, ...],
    overridden: tuple[Overridden, ...],
) -> Lock:
    base, project = selection.base, plan.project
    version = resolution.pins.get("torch") or base.provides.get("torch", "")
    torch = LockedTorch(version=version, build=project.torch_build, found_in=plan.torch.kind)
    components = {
        name: _component(item, resolution.pins.get(name) or base.provides.get(name, ""), plan)
        for name, item in project.chosen.items()
    }
    for name, taken in project.takings.in_force.items():
        found = _component(taken.chosen, resolution.pins.get(name, ""), plan)
        components[name] = found.model_copy(update={"transitive": True})
    base_digest = definition_digest(base)
    environment = {name: item.value for name, item in selection.stack.environment.items()}
    return Lock(
        schema=lockfile.SCHEMA,
        stack=selection.stack_name,
        digest=lockfile.content_digest(base_digest, torch, components, phases, environment),
        source_date_epoch=resolution.newest_upload,
        inputs=Inputs(
            digest=inputs,
            stack_digest=definition_digest(selection.stack),
            base_digest=base_digest,
            torch_build=project.torch_build,
            uv=uv_version(),
            as_of=plan.as_of.text(),
            as_of_asked=plan.as_of.asked,
            as_of_reason=plan.as_of.reason,
            pins=dict(plan.request.pins),
            as_of_request=plan.request.as_of,
            torch_build_request=plan.request.torch_build,
            allow=tuple(sorted(set(plan.request.allow))),
        ),
        base=LockedBase(
            name=selection.base_name,
            definition_digest=base_digest,
            distribution=base.distribution,
            release=base.release,
            platform=base.platform,
            glibc=base.glibc,
            python=base.python.version,
            python_source=base.python.source,
            cuda=base.cuda,
            provides=base.provides,
        ),
        torch=torch,
        components=components,
        phases=phases,
        environment=environment,
        overrides=_overrides(plan),
        overridden=tuple(item.text() for item in overridden),
        driver=plan.led.driver,
        driver_because=plan.led.because,
        allowed=tuple(f"{finding.code}: {finding.what}" for finding in allowed),
        left_out=plan.left_out,
        exempt={name: item.text() for name, item in plan.exempt.items() if name in resolution.pins},
        rewritten=tuple(line for item in project.metadata for line in item.rewritten),
    )


def _override(name: str, texts: tuple[str, ...], plan: LockPlan) -> str:
    forced, text = plan.upstream_overrides.get(name), ", ".join(texts)
    return f"{text} ({forced.where})" if forced is not None and forced.texts == texts else text


def _overrides(plan: LockPlan) -> dict[str, str]:
    """What is put over declarations, for the record: over all, and over those of single packages."""
    found = {name: [_override(name, texts, plan)] for name, texts in plan.project.overrides.items()}
    for declared_by, specifiers in sorted(plan.project.scoped_overrides.items()):
        for name, text in specifiers.items():
            found.setdefault(name, []).append(f"{text} for what {declared_by} declares")
    return {name: ", ".join(texts) for name, texts in found.items()}


def _component(item: Chosen, version: str, plan: LockPlan) -> LockedComponent:
    metadata = next((entry for entry in plan.project.metadata if entry.name == item.name), None)
    bare = LockedComponent(
        asked=item.asked,
        version=version,
        phase=item.phase,
        because=item.because,
        modules=item.spec.modules,
        sdist=(metadata.sdist_digest or None) if metadata else None,
    )
    if item.url:
        return bare.model_copy(update={"url": item.url})
    if item.commit is None:
        return bare
    return bare.model_copy(
        update={
            "git": item.git,
            "commit": item.commit.sha,
            "subdirectory": item.subdirectory or None,
            "committed_at": as_of.timestamp(item.commit.committed_at),
            "ref_kind": item.commit.kind.value,
            "follows": item.commit.kind is CommitKind.BRANCH and plan.as_of.asked == as_of.NOW,
        }
    )
