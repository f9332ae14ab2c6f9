"""``envbuild lock``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import click
from click.core import ParameterSource
from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Selection
from envbuild.cli.command import Command
from envbuild.cli.common import PathArgument, Session, output_options, selection_options, shown
from envbuild.core.digests import Json, short
from envbuild.core.errors import CheckRefusedError, ConfigurationError, UsageError
from envbuild.core.progress import PlainReporter, SilentReporter
from envbuild.lock.checks.rules import CODES
from envbuild.lock.committed import CommittedLock, committed, lock_all, stack_of
from envbuild.lock.committed import check as review
from envbuild.lock.components.select import parse_pins as parse_refs
from envbuild.lock.context import Repositories
from envbuild.lock.inputs.names import foreign_pins, variant_name
from envbuild.lock.inputs.request import LockRequest, request_of
from envbuild.lock.locate import lock_path, shipped_lock
from envbuild.lock.lock import LockResult, lock_stack, resolved
from envbuild.lock.lockfile import RECORD_FILE, read_lock
from envbuild.lock.project.pyproject import cuda_major
from envbuild.lock.record.difference import compare, summary
from envbuild.sync.imports import Imports
from envbuild.sync.verify import Verifier, require_machine


def parse_pins(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:  # noqa: ARG001
    """``COMPONENT=REF`` words as a dictionary."""
    pins: dict[str, str] = {}
    for value in values:
        name, found, ref = value.partition("=")
        if ref.startswith("="):
            ref = f"={ref}"  # megatron-core==0.16.1, as in a requirement
        if not found or not name or not ref:
            raise click.BadParameter(f"{value!r}: write COMPONENT=REF, such as megatron-core=core_v0.16.1")
        if canonicalize_name(name) in map(canonicalize_name, pins):
            raise click.BadParameter(f"{name} is pinned twice")
        pins[name] = ref
    return pins


@click.command("lock", cls=Command)
@selection_options
@click.option("--nemo", metavar="REF", help="The same as --pin nemo-toolkit=REF.")
@click.option(
    "--pin",
    "pins",
    multiple=True,
    callback=parse_pins,
    metavar="COMPONENT=REF",
    help="Take this branch, tag, commit, version or specifier; may be repeated.",
)
@click.option("--as-of", metavar="WHEN", help="Take nothing newer: a date, a commit of the anchor, 'release' or 'now'.")
@click.option(
    "--name",
    metavar="NAME",
    help="Write to lockfiles/NAME/BASE: no word of a command line replaces a lock that was made without it.",
)
@click.option("--out", type=PathArgument(file_okay=False), help="Write the lock to this directory.")
@click.option(
    "--torch-build",
    metavar="BUILD",
    help="Take this build of torch instead of the base's; 'index' is the package index's own (CUDA, 10x the size).",
)
@click.option("--allow", metavar="CODE", multiple=True, help="Let this check's findings pass; the record says so.")
@click.option("--upgrade", is_flag=True, help="Resolve anew as of now, even if nothing changed.")
@click.option("--check", is_flag=True, help="Write nothing; fail if a lock is not what its inputs give (for CI).")
@click.option("--diff", is_flag=True, help="Write nothing; resolve anew and say what would change.")
@click.option(
    "--verify", is_flag=True, help="Install phase main for a moment and import its modules; refuse if one fails."
)
@click.option("--all", "everything", is_flag=True, help="Lock every stack on every base that it names.")
@output_options
@click.pass_context
def command(
    context: click.Context,
    session: Session,
    stack: str,
    base: str | None,
    target: str | None,
    nemo: str | None,
    pins: dict[str, str],
    as_of: str | None,
    name: str | None,
    out: Path | None,
    torch_build: str | None,
    allow: tuple[str, ...],
    upgrade: bool,
    check: bool,
    diff: bool,
    verify: bool,
    everything: bool,
) -> None:
    """Resolve a stack on a base into lockfiles/STACK/BASE/: every package pinned, with hashes.

    Does nothing when the lock is there, neither the stack, the base, the targets nor the known conflicts changed, and
    no branch that it follows moved.
    """
    _consistent(torch_build, check=check, diff=diff, verify=verify, everything=everything)
    given = _given(context)
    if everything:
        _only(given, "--all", {"upgrade"})
        _lock_all(session, upgrade=upgrade)
        return
    if check:
        _only(given, "--check", {"stack", "base", "name"})
        _check(session, stack if "stack" in given else None, base, name)
        return
    _known_codes(session, allow)
    if diff and given <= {"diff", "base"}:
        _diff_every(session, base)
        return
    pins = _with_nemo(nemo, pins)
    selection = session.select_to_lock(stack, target, base)
    parse_refs(selection.stack_name, selection.stack, pins, session.catalog.stack(selection.stack_name))
    request = LockRequest(pins=foreign_pins(selection.stack, pins), as_of=as_of, torch_build=torch_build, allow=allow)
    kept = variant_name(selection.stack_name, selection.stack, {} if out else request.pins, name)
    if diff:
        path = out or _kept_or_shipped(session, lock_path(session.project, kept, selection.base_name))
        changes = _difference(session, selection, path, request)
        session.done(changes[0], *changes[1])
        return
    try:
        own = dataclasses.replace(request, base_named=base is not None or _of_another_cuda(selection) is None)
        _lock(session, selection, own, out or kept, named=bool(name or out), upgrade=upgrade, verify=verify)
    except CheckRefusedError as error:
        other = _of_another_cuda(selection) if base is None and error.codes == {"cuda-mixed"} else None
        if other is None:
            raise
        session.reporter.note(
            f"its packages are of another CUDA than base {selection.base_name} has: taking {other.base_name}, which "
            f"stack {other.stack_name} names too"
        )
        _lock(session, other, request, out or kept, named=bool(name or out), upgrade=upgrade, verify=verify)


def _with_nemo(nemo: str | None, pins: dict[str, str]) -> dict[str, str]:
    if nemo is None:
        return pins
    if any(canonicalize_name(name) == "nemo-toolkit" for name in pins):
        raise UsageError("nemo-toolkit is pinned twice", why="By --nemo and by --pin.", fix="Leave one out.")
    return {"nemo-toolkit": nemo, **pins}


def _consistent(torch_build: str | None, *, check: bool, diff: bool, verify: bool, everything: bool) -> None:
    if torch_build == "":
        raise UsageError(
            "--torch-build is empty",
            why="An empty word names no build.",
            fix="Name a build (cpu, cu130), or index, or leave the option out.",
        )
    if check + diff + everything > 1:
        raise UsageError(
            "--check, --diff and --all exclude each other",
            why="Each says what the command does: look at what is there, compare, or lock everything.",
            fix="Name one of them.",
        )
    if verify and (check or diff or everything):
        raise UsageError(
            "--verify goes with none of --check, --diff and --all",
            why="It installs one lock, which takes gigabytes.",
            fix="Verify lock by lock: envbuild lock --stack STACK --base BASE --verify",
        )


def _lock(
    session: Session,
    selection: Selection,
    request: LockRequest,
    where: Path | str,
    *,
    named: bool,
    upgrade: bool,
    verify: bool,
) -> None:
    """Lock, and say what came of it; ``where`` is a folder, or the name of a lock."""
    verifier = Verifier(selection, session.site, session.store, session.reporter) if verify else None
    if verifier is not None:
        require_machine(selection.base)
    result = lock_stack(
        selection,
        path=where if isinstance(where, Path) else lock_path(session.project, where, selection.base_name),
        request=request,
        site=session.site,
        store=session.store,
        reporter=session.reporter,
        upgrade=upgrade,
        accept=verifier,
        named=named,
    )
    _show(session, result, verifier.imports if verifier else None)


def _of_another_cuda(selection: Selection) -> Selection | None:
    """The selection on the next base that the stack names for the target and that has another CUDA."""
    builds = selection.stack.builds_for(selection.target_name)
    others = [
        Selection(selection.catalog, selection.stack_name, name, selection.target_name)
        for name in (builds.bases if builds else ())
    ]
    return next((item for item in others if cuda_major(item.base) != cuda_major(selection.base)), None)


def _given(context: click.Context) -> set[str]:
    """The options that the user gave, but those about output."""
    names = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    return names - {"json_output", "as_json", "json", "quiet"}


def _only(given: set[str], word: str, allowed: set[str]) -> None:
    words = {"everything": "--all", "as_of": "--as-of", "torch_build": "--torch-build", "pins": "--pin"}
    own = {"--all": "everything"}.get(word, word.removeprefix("--"))
    if idle := sorted(words.get(name, f"--{name}") for name in given - allowed - {own}):
        raise UsageError(
            f"{word} does not go with {', '.join(idle)}",
            why="They would do nothing.",
            fix=f"Leave them out; with {word} count: {', '.join(sorted(allowed))}.",
        )


def _known_codes(session: Session, allow: tuple[str, ...]) -> None:
    known = sorted({*CODES, *session.catalog.conflicts()})
    if unknown := [code for code in allow if code not in known]:
        raise UsageError(
            f"--allow {unknown[0]}: no check has that code",
            why=f"Codes: {', '.join(known)}.",
            fix="Name the code that a refused lock printed in brackets.",
        )


def _check(session: Session, stack: str | None, base: str | None, name: str | None) -> None:
    repositories = Repositories(session.store, session.reporter)
    paths = [
        path
        for path in committed(session.project)
        if (stack is None or stack in (path.parent.name, stack_of(path)))
        and (base is None or path.name == base)
        and (name is None or path.parent.name == name)
    ]
    if not paths:
        raise ConfigurationError(
            "there is no lock to check",
            why=f"{session.project / 'lockfiles'} holds none" + (f" of {stack}." if stack else ".") + "\n"
            "Locks that come with envbuild are meant for use and not checked here: whatever takes one refuses it where "
            "it was made from other definitions.",
            fix="Make one first: envbuild lock --stack STACK; what it would change, --diff says.",
        )
    results = [review(path, session.catalog, repositories, session.reporter) for path in paths]
    old = [result for result in results if result.problem]
    if old:
        raise CheckRefusedError(
            f"{len(old)} of {len(results)} locks are not what their inputs give",
            why="\n".join(f"{shown(result.path)}: {result.problem}" for result in old),
            fix="\n".join(_how_to_put_right(old)),
        )
    session.done(
        {"checked": [str(result.path) for result in results]},
        *[f"{shown(result.path)}: what its inputs give" for result in results],
    )


def _how_to_put_right(locks: list[CommittedLock]) -> Iterator[str]:
    if any(not item.changed for item in locks):
        yield "Lock them again (envbuild lock --stack STACK --base BASE), review the difference, and commit it."
    if changed := [shown(item.path) for item in locks if item.changed]:
        yield (
            f"Changed or damaged after it was made: {', '.join(changed)}. Restore it from version control, or make it "
            "anew: the `envbuild lock` command that it is from, with --upgrade (without it, it is refused)."
        )


def _kept_or_shipped(session: Session, path: Path) -> Path:
    """The project's own lock, else the one of that name that comes with envbuild, and says so."""
    shipped = shipped_lock(path.parent.name, path.name)
    if (path / RECORD_FILE).is_file() or shipped is None:
        return path
    session.reporter.note(f"note: {shown(path)} does not exist: compared with the lock that comes with envbuild")
    return shipped


def _diff_every(session: Session, base: str | None) -> None:
    """What would change in each lock of the project, by its own request."""
    paths = [path for path in committed(session.project) if base in (None, path.name)]
    if not paths:
        raise ConfigurationError(
            "there is no lock to compare with",
            why=f"{session.project / 'lockfiles'} holds none.",
            fix="Make one first: envbuild lock --stack STACK; or name a stack whose lock comes with envbuild.",
        )
    found = []
    for path in paths:
        lock = read_lock(path).lock
        selection = session.select_to_lock(lock.stack, None, lock.base.name)
        found.append(_difference(session, selection, path, request_of(lock)))
    session.done(
        {"locks": [value for value, _ in found]},
        *[line for path, (_, lines) in zip(paths, found, strict=True) for line in (f"{shown(path)}:", *lines)],
    )


def _difference(
    session: Session, selection: Selection, path: Path, request: LockRequest
) -> tuple[dict[str, Json], list[str]]:
    """What resolving anew would change in a lock: as an object, and for people."""
    old = read_lock(path)
    repositories = Repositories(session.store, session.reporter)
    with resolved(
        selection,
        request,
        repositories,
        site=session.site,
        store=session.store,
        reporter=session.reporter,
        previous=old,
    ) as folder:
        new = read_lock(folder)
        changes = compare(old, new)
        value: dict[str, Json] = {
            "path": str(old.path),
            "from": old.lock.digest,
            "to": new.lock.digest,
            "changes": [
                {"name": item.name, "from": item.old, "to": item.new, "why": item.why, "component": item.component}
                for item in changes
            ],
        }
        return value, [summary(old, new, changes), *[change.text() for change in changes]]


def _lock_all(session: Session, *, upgrade: bool) -> None:
    outcomes = lock_all(
        session.catalog,
        session.project,
        site=session.site,
        store=session.store,
        # Steps of several locks run at once: only lines can show that.
        reporter_of=lambda item: (
            SilentReporter() if session.quiet else PlainReporter(f"{item.stack_name} on {item.base_name}")
        ),
        upgrade=upgrade,
    )
    failed = [(item.selection, item.error) for item in outcomes if item.error]
    done = [(item.selection, item.result) for item in outcomes if item.result]
    lines = [
        f"{selection.stack_name} on {selection.base_name}: {'locked' if result.built else 'nothing to do'}, "
        f"lock {short(result.directory.lock.digest)}"
        for selection, result in done
    ]
    if failed:
        first = failed[0][1]
        raise first.with_context(
            what=f"{len(failed)} of {len(outcomes)} locks failed",
            why="\n".join(
                f"{selection.stack_name} on {selection.base_name}: {error.what}\n{error.why}"
                for selection, error in failed
            ),
        )
    session.done(
        {
            "locks": [
                {
                    "stack": selection.stack_name,
                    "base": selection.base_name,
                    "built": result.built,
                    "digest": result.directory.lock.digest,
                }
                for selection, result in done
            ]
        },
        *lines,
    )


def _show(session: Session, result: LockResult, imports: Imports | None) -> None:
    lock, path = result.directory.lock, result.directory.path
    count = sum(phase.packages for phase in lock.phases.values())
    found = {"find-links": "found in find-links", "torch-index": "found on the index of torch builds"}
    torch = (
        "no torch"
        if not lock.torch.version
        else f"torch {lock.torch.version} ({found.get(lock.torch.found_in, 'the package index has it')})"
    )
    state = "locked" if result.built else "nothing to do: already locked"
    title = f"{state} as of {lock.inputs.as_of}: {lock.stack} on {lock.base.name}"
    lines = [f"{title}, {count} packages, {torch}, lock {short(lock.digest)}"]
    lines += [f"  exempt from the as-of moment: {name} {why}" for name, why in lock.exempt.items()]
    for name, item in lock.components.items():
        at = f" at {item.commit[:12]}" if item.commit else ""
        lines.append(f"  {name} {item.version}{at}  [{item.because}]")
    session.done(
        {
            "built": result.built,
            "path": str(path),
            "stack": lock.stack,
            "base": lock.base.name,
            "digest": lock.digest,
            "as_of": lock.inputs.as_of,
            "exempt": dict(lock.exempt),
            "driver": lock.driver.value if lock.driver else None,
            "torch": lock.torch.model_dump(mode="json"),
            "components": {name: item.version for name, item in lock.components.items()},
            "packages": {name: phase.packages for name, phase in lock.phases.items()},
            "verified": _verified_json(imports) if imports else None,
        },
        *lines,
        *(_verified(imports) if imports else []),
        shown(path),
    )


def _verified(imports: Imports) -> list[str]:
    """For people: what `--verify` found."""
    return [
        f"imported: {', '.join(imports.imported) or 'nothing'}",
        *[f"not checked: {item.module} ({item.component}): {item.reason}" for item in imports.not_checked],
        *[f"let pass: {item.module} ({item.component}) does not import: {item.cause}" for item in imports.failed],
    ]


def _verified_json(imports: Imports) -> dict[str, Json]:
    return {
        "imported": list(imports.imported),
        "not_checked": [dataclasses.asdict(item) for item in imports.not_checked],
        "failed": [
            {"module": item.module, "component": item.component, "cause": item.cause} for item in imports.failed
        ],
    }
