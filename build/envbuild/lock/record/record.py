"""The step `record`: writes the files of a lock, with `stack.lock.toml` that states what it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from packaging.version import Version

from envbuild.catalog.base import Base
from envbuild.catalog.catalog import definition_digest
from envbuild.core.background import interruptible
from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.files import machine_errors
from envbuild.git.refs import CommitKind
from envbuild.lock import lockfile
from envbuild.lock.checks.check import CheckResult
from envbuild.lock.components.decide import STACKS_FILE
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.releases import EXACT
from envbuild.lock.context import LockContext
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.deviation import texts
from envbuild.lock.lockfile import BUILDS_FILE, PHASE_FILES, WHEELS, git_build_options
from envbuild.lock.models import (
    SCHEMA,
    Inputs,
    Lock,
    LockedBase,
    LockedComponent,
    LockedPhase,
    LockedTorch,
)
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import render_project
from envbuild.lock.resolve.resolve import PhaseLines, ResolvedPlan
from envbuild.lock.uv.program import uv_version
from envbuild.lock.uv.resolution import export, with_local_hashes


def record_of(resolved: ResolvedPlan, checked: CheckResult, phases: dict[str, LockedPhase], pyproject: str) -> Lock:
    """The sealed record.

    Args:
        pyproject: the digest of the generated pyproject.toml.
    """
    plan, pins = resolved.plan, resolved.resolution.pins
    selection, project = plan.inputs.selection, plan.project
    base = selection.base
    # What a base brings is excluded from the resolution, so uv has no version of it.
    version = pins.get("torch") or base.provides.get("torch", "")
    torch = LockedTorch(version=version, build=project.torch_build, found_in=plan.torch.kind)
    components = {
        name: _component(component, pins.get(name) or base.provides.get(name, ""), plan)
        for name, component in project.chosen.items()
    }
    for name, source in project.git_sources.in_force.items():
        component = _component(source.chosen, pins.get(name, ""), plan)
        components[name] = component.model_copy(update={"transitive": True})
    base_digest = definition_digest(base)
    environment = selection.stack.variables_on(base.cuda_major)
    files = {path: file.text for path, file in selection.stack.files.items()}
    lock = Lock(
        schema=SCHEMA,
        stack=selection.stack_name,
        digest=lockfile.content_digest(base_digest, torch, components, phases, environment, files),
        # Not the moment of locking: the same files locked again give the same image.
        source_date_epoch=resolved.resolution.newest_upload,
        inputs=_inputs(plan, base_digest, pins),
        base=_base(selection.base_name, base, base_digest),
        torch=torch,
        components=components,
        phases=phases,
        environment=environment,
        files=files,
        overrides=_overrides(plan),
        overridden=tuple(override.text() for override in checked.overridden),
        driver=plan.effective.stack.driver,
        driver_because=plan.effective.because,
        project=resolved.tree,
        wheels=dict(resolved.wheels),
        allowed=tuple(finding.line() for finding in checked.allowed),
        warnings=tuple(finding.line() for finding in checked.warnings),
        left_out=plan.left_out,
        exempt={name: exemption.text() for name, exemption in plan.exempt.items() if name in pins},
        rewritten=tuple(line for declared in project.metadata for line in declared.rewritten),
        pyproject_digest=pyproject,
        deviations=texts(plan.inputs.deviations),
        deviating=plan.inputs.deviations,
        fallback_from=plan.inputs.request.fallback_from,
        preferred=_preferred(plan, pins),
    )
    return lockfile.sealed(lock)


def _inputs(plan: LockPlan, base_digest: str, pins: Mapping[str, str]) -> Inputs:
    request = plan.inputs.request
    return Inputs(
        digest=plan.inputs.digest,
        stack_digest=definition_digest(plan.inputs.selection.stack),
        base_digest=base_digest,
        torch_build=plan.project.torch_build,
        uv=uv_version(),
        as_of=plan.as_of.text(),
        as_of_asked=plan.as_of.asked,
        as_of_reason=plan.as_of.reason,
        pins=dict(request.pins),
        as_of_held=plan.as_of.held,
        not_held=tuple(sorted(plan.as_of.undated & pins.keys())),
        no_as_of=request.no_as_of,
        as_of_request=request.as_of,
        torch_build_request=request.torch_build,
        allow=tuple(sorted(set(request.allow))),
        exact=request.exact,
    )


def _base(name: str, base: Base, digest: str) -> LockedBase:
    return LockedBase(
        name=name,
        definition_digest=digest,
        distribution=base.distribution,
        release=base.release,
        platform=base.platform,
        glibc=base.glibc,
        python=base.python.version,
        python_source=base.python.source,
        cuda=base.cuda,
        provides=base.provides,
    )


def _component(component: Chosen, version: str, plan: LockPlan) -> LockedComponent:
    metadata = next((entry for entry in plan.project.metadata if entry.name == component.name), None)
    bare = LockedComponent(
        asked=component.asked,
        version=version,
        phase=component.phase,
        because=_because(component, version, plan),
        modules=component.spec.modules,
        sdist=(metadata.sdist_digest or None) if metadata else None,
        url=component.url or None,
        index=component.index or None,
    )
    if component.commit is None:
        return bare
    return bare.model_copy(
        update={
            "git": component.git,
            "commit": component.commit.sha,
            "subdirectory": component.subdirectory or None,
            "committed_at": as_of.timestamp(component.commit.committed_at) if component.commit.is_read else None,
            "ref_kind": component.commit.kind.value,
            "follows": component.commit.kind is CommitKind.BRANCH and plan.as_of.asked == as_of.NOW,
        }
    )


def _because(component: Chosen, version: str, plan: LockPlan) -> str:
    """Where a component's version comes from; where nothing decided it, the preference that was followed."""
    preference = plan.preferences.get(component.name)
    # 2.13.0+cpu is a build of 2.13.0 (PEP 440, "Local version identifiers"); preferences name no build.
    followed = preference is not None and preference.version == Version(version).public if version else False
    if preference is None or not followed or component.is_direct or EXACT.match(component.specifier):
        return component.because
    return preference.because if component.because == STACKS_FILE else f"{component.because}; {preference.because}"


def _preferred(plan: LockPlan, pins: Mapping[str, str]) -> tuple[str, ...]:
    """For each file of upstream's with versions: how many of its packages have them, and which do not."""
    listed: dict[str, list[tuple[str, str]]] = {}
    for name, preference in plan.preferences.items():
        if name in pins:
            listed.setdefault(preference.because, []).append((name, preference.version))
    lines = []
    for because, preferred in listed.items():
        others = [(name, version) for name, version in preferred if Version(pins[name]).public != version]
        shown = ", ".join(f"{name} {pins[name]} ({version})" for name, version in sorted(others))
        lines.append(
            f"{because}: {len(preferred) - len(others)} of {len(preferred)} versions"
            + (f"; not {shown}" if shown else "")
        )
    return tuple(lines)


def _overrides(plan: LockPlan) -> dict[str, str]:
    """What is put over declarations, for the record: over all, and over those of single packages."""
    by_name = {name: [_override(name, texts, plan)] for name, texts in plan.project.overrides.items()}
    for declared_by, specifiers in sorted(plan.project.scoped_overrides.items()):
        for name, text in specifiers.items():
            by_name.setdefault(name, []).append(f"{text} for what {declared_by} declares")
    return {name: ", ".join(texts) for name, texts in by_name.items()}


def _override(name: str, texts: tuple[str, ...], plan: LockPlan) -> str:
    forced, text = plan.upstream_overrides.get(name), ", ".join(texts)
    return f"{text} ({forced.where})" if forced is not None and forced.texts == texts else text


def write_lock(resolved: ResolvedPlan, checked: CheckResult, context: LockContext) -> None:
    """Write all files of the lock into the context's folder."""
    with context.reporter.step("write the lock"):
        phases = _write_phases(resolved, context)
        project = context.folder / lockfile.PROJECT_FILE
        with machine_errors(context.folder):
            project.write_text(render_project(resolved.plan.project, pins=resolved.pins))
            record = record_of(resolved, checked, phases, sha256_file(project))
            (context.folder / lockfile.RECORD_FILE).write_text(lockfile.render(record))


def _write_phases(resolved: ResolvedPlan, context: LockContext) -> dict[str, LockedPhase]:
    plan, resolution = resolved.plan, resolved.resolution
    # A component of the compile phase is built there, also where one of phase main depends on it.
    # Moved from phase main, fast-hadamard-transform of stack bridge-0.6 is built in isolation, where there is no torch,
    # and fails.
    late = set(plan.project.compiled())
    installed = resolved.lines or _exported(plan, late, context)
    main, compiled = installed.main, installed.compiled
    # Where hashes are required, every line must have one, and a commit has none: so a file of their own.
    # uv's --require-hashes has no Git dependencies either (astral-sh/uv#2824).
    from_git = [pinned for pinned in (*main, *compiled) if pinned.commit]
    blocks = {
        "main": with_local_hashes((pinned for pinned in main if not pinned.commit), resolution, plan.torch),
        "compile": with_local_hashes((pinned for pinned in compiled if not pinned.commit), resolution, plan.torch),
        "git": [pinned.text for pinned in from_git],
    }
    shared = sorted(late.intersection(pinned.name for pinned in from_git))
    # `uv sync` builds what is from git in isolation, also where nothing holds it.
    isolated = resolved.lines is not None and {pinned.name for pinned in from_git} - late
    builds = BUILDS_FILE if resolved.build_constraints or isolated else ""
    links = ["--find-links", WHEELS] if resolved.wheels else []
    options = {
        "main": ["--require-hashes", *links],
        "compile": ["--require-hashes", "--no-build-isolation"],
        "git": git_build_options(builds, shared),
    }
    phases = {}
    for phase, lines in blocks.items():
        title = f"Phase {phase}: {len(lines)} packages."
        command = f"uv pip install --no-deps {' '.join(options[phase])} -r {PHASE_FILES[phase]}"
        digest = _write(context.folder / PHASE_FILES[phase], title, command, lines)
        phases[phase] = LockedPhase(file=PHASE_FILES[phase], packages=len(lines), digest=digest)
    if builds:
        title = "What the isolated builds of phase git are held to."
        command = f"uv pip install --no-deps {' '.join(options['git'])} -r {PHASE_FILES['git']}"
        digest = _write(context.folder / BUILDS_FILE, title, command, resolved.build_constraints)
        phases["git"] = phases["git"].model_copy(update={"builds": digest})
    return phases


def _exported(plan: LockPlan, late: Collection[str], context: LockContext) -> PhaseLines:
    with interruptible(2) as pool:
        exported = pool.submit(export, context.folder, None, plan.what, context.log)
        with_compile = export(context.folder, "compile", plan.what, context.log) if late else []
    main = tuple(pinned for pinned in exported.result() if pinned.name not in late)
    # The extra `compile` comes with all that phase main has, too.
    in_main = {pinned.name for pinned in main}
    return PhaseLines(main=main, compiled=tuple(pinned for pinned in with_compile if pinned.name not in in_main))


def _write(file: Path, title: str, command: str, lines: Iterable[str]) -> str:
    """Write a file of the lock with the command that it is for; its digest."""
    text = f"# Written by `envbuild lock`. {title}\n# {command}\n" + "".join(f"{line}\n" for line in lines)
    with machine_errors(file):
        file.write_text(text)
    return sha256_bytes(text.encode())
