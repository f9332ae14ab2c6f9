"""What is going to be resolved: components decided, the as-of moment, what the compile phase declares."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import tomlkit
from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Selection
from envbuild.catalog.models import Component, Phase
from envbuild.catalog.site import Site
from envbuild.core.errors import ConfigurationError, ResolutionError, UsageError
from envbuild.core.files import machine_errors
from envbuild.core.progress import Reporter
from envbuild.lock import asof
from envbuild.lock.asof import AsOf
from envbuild.lock.components import Chosen, Repositories, choose, choose_anchor, parse_pins, upstream_overrides
from envbuild.lock.git import Commit, CommitKind
from envbuild.lock.metadata import CompileMetadata, build_requires, compile_metadata
from envbuild.lock.project import Project, cuda_major
from envbuild.lock.record import LockDirectory
from envbuild.lock.refs import GitRef, Ref, VersionRef, parse_ref
from envbuild.lock.resolve import resolve, seconds_of
from envbuild.lock.torch_builds import TorchSource, torch_source
from envbuild.lock.upstream import Companion
from envbuild.store.local import LocalStore

# Build requirements that the environment has anyway, at the version that the stack says.
_ALREADY_THERE = frozenset({"torch"})


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line adds to the stack's file.

    Attributes:
        pins: text after ``--pin COMPONENT=``, by component.
        as_of: text after ``--as-of``; None for the stack's own.
        torch_build: the build of torch instead of the base's.
        allow: codes of checks whose findings are let pass.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    as_of: str | None = None
    torch_build: str | None = None
    allow: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that uv is going to be asked, and where it comes from.

    Attributes:
        keep: versions of a lock made from the same inputs as of the same moment.
    """

    request: Request

    project: Project
    as_of: AsOf
    torch: TorchSource
    upstream_overrides: Mapping[str, Companion]
    keep: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Where planning works: a folder for throw-away projects, its log, the site and the store."""

    folder: Path
    log: Path
    site: Site
    store: LocalStore
    reporter: Reporter


def make_plan(
    selection: Selection,
    request: Request,
    repositories: Repositories,
    work: Workplace,
    previous: LockDirectory | None = None,
) -> Plan:
    """Decide every component and the as-of moment, and read what the compile phase declares.

    Args:
        previous: a lock made from the same inputs, whose versions are kept if it is as of the same moment.

    Raises:
        ConfigurationError: a ref does not exist, or cannot be used.
        UsageError: a pin or ``--as-of`` is wrong.
        NetworkError: a repository or an index cannot be reached.
    """
    stack, base = selection.stack, selection.base
    pins = parse_pins(selection.stack_name, stack, request.pins)
    bound = _bound(selection, request, pins, repositories)
    anchor = choose_anchor(stack, pins, repositories, bound)
    moment = _as_of(selection, request, pins, anchor, repositories, work)
    if bound is None and moment.asked != asof.NOW:
        bound = moment.moment
    chosen = choose(stack, pins, anchor, repositories, bound, work.reporter)
    build = request.torch_build or base.torch.build
    torch = TorchSource("package-index", None)
    if "torch" in chosen and "torch" not in base.provides:
        with work.reporter.step(f"find torch's build {build!r}"):
            torch = torch_source(work.site, chosen["torch"].specifier, build, base.python.version)
    forced = upstream_overrides(anchor, chosen, repositories)
    project = Project(
        name=selection.stack_name,
        base=base,
        torch_build=build,
        as_of=moment.text(),
        chosen=chosen,
        requirements={name: item.version for name, item in stack.requirements.items()},
        overrides={
            **{name: item.specifier or "" for name, item in forced.items()},
            **{name: item.version for name, item in stack.overrides.items()},
        },
    )
    keep: dict[str, str] = {}
    if previous is not None and previous.lock.inputs.as_of == moment.text():
        from_git = {name for name, item in chosen.items() if item.commit is not None}
        keep = {name: version for name, version in previous.packages().items() if name not in from_git}
    metadata = _metadata(project, keep, base_cuda=cuda_major(base), work=work)
    lines = dict.fromkeys(
        [*(line for item in metadata for line in item.build_requires), *git_build_requires(chosen, repositories)]
    )
    return Plan(
        request=request,
        project=_with_metadata(project, metadata, tuple(lines)),
        as_of=moment,
        torch=torch,
        upstream_overrides=forced,
        keep=keep,
    )


def git_build_requires(chosen: Mapping[str, Chosen], repositories: Repositories) -> list[str]:
    """What builds the components from git: they are installed without build isolation, so it must be there already."""
    lines: list[str] = []
    for item in chosen.values():
        if item.commit is None or item.git is None:
            continue
        text = repositories.at(item.git).read_file(item.commit, "pyproject.toml")
        try:
            lines += build_requires(text)
        except ValueError as error:
            raise ConfigurationError(
                f"cannot understand pyproject.toml of {item.git} at {item.commit.sha[:12]}",
                why=str(error),
                fix=f"Take another commit: --pin {item.name}=REF",
            ) from error
    return lines


def _with_metadata(project: Project, metadata: tuple[CompileMetadata, ...], lines: tuple[str, ...]) -> Project:
    named = {canonicalize_name(name) for name in (*project.chosen, *project.requirements)} | _ALREADY_THERE
    needed = tuple(line for line in lines if canonicalize_name(_name_of(line)) not in named)
    return Project(
        name=project.name,
        base=project.base,
        torch_build=project.torch_build,
        as_of=project.as_of,
        chosen=project.chosen,
        requirements=project.requirements,
        build_requires=needed,
        overrides=project.overrides,
        metadata=metadata,
    )


def _name_of(line: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(line).name
    except InvalidRequirement as error:
        raise ResolutionError(
            f"a build requirement of a component cannot be read: {line!r}",
            why=str(error),
            fix="It comes from the component's pyproject.toml; choose another version of it.",
        ) from error


def _bound(
    selection: Selection, request: Request, pins: Mapping[str, Ref], repositories: Repositories
) -> date | datetime | None:
    """Up to when branches count, as far as that is known before the anchor is; None: their tips, or not known yet."""
    stack = selection.stack
    text = request.as_of or (asof.NOW if stack.anchor in pins else stack.as_of)
    if text in (asof.NOW, asof.RELEASE):
        return None
    return asof.parse_date(text) or _as_of_commit(text, selection, repositories).committed_at


def _as_of_commit(text: str, selection: Selection, repositories: Repositories) -> Commit:
    """The commit of the anchor's repository that ``--as-of`` names."""
    ref, spec = parse_ref(text), _anchor_spec(text, selection)
    if not isinstance(ref, GitRef) or spec.git is None:
        raise UsageError(
            f"--as-of {text} is no date, and no commit of {selection.stack.anchor}",
            why="It takes a date (YYYY-MM-DD), 'now', 'release', or a commit of the anchor's repository.",
            fix="Correct it.",
        )
    return repositories.at(spec.git).resolve(ref)


def _anchor_spec(text: str, selection: Selection) -> Component:
    if selection.stack.anchor is None:
        raise UsageError(
            f"--as-of {text} needs an anchor, and stack {selection.stack_name} has none",
            why="'release' and commits count from the date of the stack's anchor.",
            fix="Name a date (YYYY-MM-DD) or 'now'.",
        )
    return selection.stack.components[selection.stack.anchor]


def _as_of(
    selection: Selection,
    request: Request,
    pins: Mapping[str, Ref],
    anchor: Chosen | None,
    repositories: Repositories,
    work: Workplace,
) -> AsOf:
    text = request.as_of or _default_as_of(selection, pins, anchor)
    if text == asof.NOW:
        return asof.now()
    if (day := asof.parse_date(text)) is not None:
        return asof.on_day(day)
    if anchor is None or text != asof.RELEASE:
        commit = _as_of_commit(text, selection, repositories)
        reason = f"the date of {selection.stack.anchor} {commit.sha[:12]}"
        return AsOf(asked=text, moment=commit.committed_at, reason=reason)
    title = f"{anchor.name} {anchor.commit.describe or anchor.commit.sha[:12]}" if anchor.commit else anchor.asked
    released = anchor.commit.committed_at if anchor.commit else _uploaded(anchor, selection, work)
    return asof.after_release(title, released, selection.stack.margin_days)


def _default_as_of(selection: Selection, pins: Mapping[str, Ref], anchor: Chosen | None) -> str:
    """``now`` for a branch; for a tag, a commit or a version that the user pinned, its release."""
    if anchor is None or anchor.name not in pins:
        return selection.stack.as_of
    ref = pins[anchor.name]
    if anchor.commit is not None:
        return asof.NOW if anchor.commit.kind is CommitKind.BRANCH else asof.RELEASE
    return asof.RELEASE if isinstance(ref, VersionRef) or anchor.specifier.startswith("==") else asof.NOW


def _uploaded(anchor: Chosen, selection: Selection, work: Workplace) -> datetime:
    """When the anchor's release was uploaded to the index."""
    with work.reporter.step(f"find the date of {anchor.name} {anchor.specifier}"):
        locked = _throw_away(
            {anchor.name: anchor.specifier}, selection.base.python.version, {}, f"find {anchor.name}", work
        )
    package = locked[canonicalize_name(anchor.name)]
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    times = [seconds_of(file["upload-time"]) for file in files if "upload-time" in file]
    if not times:
        raise ConfigurationError(
            f"the index does not say when {anchor.name} {package['version']} was uploaded",
            why="Its answers carry no upload times, so 'release' has no date to count from.",
            fix="Name the date yourself: --as-of YYYY-MM-DD",
        )
    return datetime.fromtimestamp(min(times), timezone.utc)


def _metadata(
    project: Project, keep: Mapping[str, str], *, base_cuda: str | None, work: Workplace
) -> tuple[CompileMetadata, ...]:
    compiled = [name for name, item in project.chosen.items() if item.phase is Phase.COMPILE and item.commit is None]
    if not compiled:
        return ()
    with work.reporter.step(f"read what {len(compiled)} packages of the compile phase declare"):
        locked = likely(project, compiled, keep, "find the sdists of the compile phase", work)
        return compile_metadata(compiled, locked, work.folder, base_cuda, work.site, work.store, work.reporter.update)


def likely(
    project: Project, names: Sequence[str], keep: Mapping[str, str], what: str, work: Workplace
) -> dict[str, Mapping[str, Any]]:
    """The releases of components that a lock takes if nothing else holds them back, as uv.lock's tables by name.

    Args:
        names: components from the index.
        keep: versions that are going to be kept.
    """
    wanted = {name: f"=={keep[name]}" if name in keep else project.chosen[name].specifier for name in names}
    dates = {
        name: asof.timestamp(asof.end_of(day))
        for name in names
        if (own := project.chosen[name].spec.as_of) and (day := asof.parse_date(own))
    }
    settings = {"exclude-newer": project.as_of, "exclude-newer-package": dates}
    return _throw_away(wanted, project.base.python.version, settings, what, work)


def _throw_away(
    packages: Mapping[str, str], python: str, settings: Mapping[str, object], what: str, work: Workplace
) -> dict[str, Mapping[str, Any]]:
    """Lock packages by themselves, as if they needed nothing: finds versions, files, dates. By package name."""
    with machine_errors(work.folder):
        folder = Path(tempfile.mkdtemp(dir=work.folder, prefix="throw-away."))
    tables = tomlkit.aot()
    for name in packages:
        table = tomlkit.table()
        table["name"], table["requires-dist"] = name, []
        tables.append(table)
    document = tomlkit.document()
    document["project"] = {
        "name": "envbuild-throw-away",
        "version": "0",
        "requires-python": f"=={python}.*",
        "dependencies": [f"{name}{specifier}" for name, specifier in packages.items()],
    }
    document["tool"] = {"uv": {"package": False, **settings, "dependency-metadata": tables}}
    with machine_errors(folder):
        (folder / "pyproject.toml").write_text(tomlkit.dumps(document))
    resolution = resolve(folder, TorchSource("package-index", None), what, work.log, work.reporter.update)
    return {canonicalize_name(package["name"]): package for package in resolution.uv_lock["package"]}
