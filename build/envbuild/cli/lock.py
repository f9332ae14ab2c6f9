"""``envbuild lock``."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Selection
from envbuild.cli.command import Command, command_line, flag_of, given_options
from envbuild.cli.common import PathArgument, Session, output_options, selection_options
from envbuild.cli.print_lock import print_lock
from envbuild.core.digests import short
from envbuild.core.errors import EnvbuildError, UsageError
from envbuild.core.progress import PlainReporter, Reporter, SilentReporter
from envbuild.core.text import shown
from envbuild.lock.checks.findings import CODES
from envbuild.lock.inputs.pins import foreign_pins, parse_pins, variant_name
from envbuild.lock.inputs.request import LockRequest, NoReleaseError, is_curable, leaves_open
from envbuild.lock.lock import LockOptions, lock_stack
from envbuild.lock.lockdir import lock_path, with_locked_base
from envbuild.lock.lockfile import LOCKFILES
from envbuild.lock.next_command import GoodLock, with_next_command
from envbuild.lock.project_locks import check_committed, lock_all

# What finds nothing to do imports neither sync nor the six steps: 0.5 s of processor time, and 0.9 s with them.
if TYPE_CHECKING:
    from envbuild.sync.verify import Verifier


def pin_texts(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:  # noqa: ARG001
    """``COMPONENT=REF`` words as a dictionary."""
    pins: dict[str, str] = {}
    for value in values:
        name, found, ref = value.partition("=")
        # megatron-core==0.16.1, as in a requirement; megatron-core===0.16.* is COMPONENT=REF with ==0.16.*.
        if ref.startswith("=") and not ref.startswith("=="):
            ref = f"={ref}"
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
    callback=pin_texts,
    metavar="COMPONENT=REF",
    help="Take this branch, tag, commit, version or specifier; may be repeated.",
)
@click.option("--as-of", metavar="WHEN", help="Take nothing newer: a date, a commit of the anchor, 'release' or 'now'.")
@click.option("--no-as-of", is_flag=True, help="Take what there is now: for an index without upload times.")
@click.option(
    "--name",
    metavar="NAME",
    help="Write to lockfiles/NAME/BASE; pins never overwrite the default lock.",
)
@click.option("--out", type=PathArgument(file_okay=False), help="Write the lock to this directory.")
@click.option(
    "--torch-build",
    metavar="BUILD",
    help="Take this build of torch instead of the base's; 'index' is the package index's own (CUDA, 10x the size).",
)
@click.option(
    "--allow",
    metavar="CODE[:ID]",
    multiple=True,
    help="Let the findings of this check pass, or one finding; the record lists them.",
)
@click.option("--upgrade", is_flag=True, help="Resolve anew as of now, even if nothing changed.")
@click.option("--check", is_flag=True, help="Write nothing; fail if a lock is out of date.")
@click.option("--online", is_flag=True, help="With --check: ask the index whether it still has every release.")
@click.option("--diff", is_flag=True, help="Write nothing; resolve anew and print what would change.")
@click.option(
    # None where neither was given: the stack's file decides.
    "--verify/--no-verify",
    default=None,
    help="Install the lock for a moment and import its modules; refuse if one fails. The default where the stack "
    "leaves releases open.",
)
@click.option("--exact", is_flag=True, help="Take upstream's pins at the branch's tip, or refuse.")
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
    no_as_of: bool,
    name: str | None,
    out: Path | None,
    torch_build: str | None,
    allow: tuple[str, ...],
    upgrade: bool,
    check: bool,
    online: bool,
    diff: bool,
    verify: bool | None,
    exact: bool,
    everything: bool,
) -> None:
    """Resolve a stack on a base into lockfiles/STACK/BASE/: every package pinned, with hashes.

    An existing lock is reused unless one of its inputs changed or a branch it follows moved.
    """
    _consistent(
        torch_build,
        as_of,
        no_as_of,
        out is not None and name is not None,
        check=check,
        diff=diff,
        everything=everything,
    )
    given = given_options(context) - {"as_json", "quiet"}
    if everything:
        _refuse_with(context, "--all", given - {"upgrade"})
        _lock_all(session, upgrade=upgrade)
        return
    if check:
        _refuse_with(context, "--check", given - {"stack", "base", "name", "online"})
        _check(session, stack if "stack" in given else None, base, name, online=online)
        return
    if online:
        raise UsageError(
            "--online goes with --check alone", why="It asks the index for an existing lock.", fix="Add --check."
        )
    _known_codes(session, allow)
    # Without anything that means one lock: every lock of the project.
    if diff and given <= {"diff", "base", "upgrade", "verify"}:
        _diff_all(session, base, upgrade=upgrade, verify=verify)
        return
    pins = _with_nemo(nemo, pins)
    selection = session.select_to_lock(stack, target, base)
    # With the whole stack, so that a pin of what is on other bases alone is refused as that.
    parse_pins(selection.stack_name, selection.stack, pins, session.catalog.stack(selection.stack_name))
    own_pins = foreign_pins(selection.stack, pins)
    request = LockRequest(
        pins=own_pins, as_of=as_of, no_as_of=no_as_of, torch_build=torch_build, allow=allow, exact=exact
    )
    # With --out the lock has its place, and pins need not name one.
    kept = variant_name(selection.stack_name, selection.stack, {} if out else request.pins, name)
    if diff:
        if base is None:
            selection = with_locked_base(selection, out or kept, session.project, session.reporter, target=target)
        _diff(session, selection, request, out or kept, upgrade=upgrade, verify=verify)
        return
    verifier = _verifier(session, selection, verify)
    options = LockOptions(
        path=out or session.project / LOCKFILES / kept,
        by_base=out is None,
        upgrade=upgrade,
        named=bool(name or out),
    )
    # Not for --diff, which looks at one base as if it were named; a lock may fall back to another.
    request = dataclasses.replace(request, base_named=base is not None)
    try:
        result = lock_stack(selection, request, options, session.context, verifier)
    except EnvbuildError as error:
        if not (is_curable(error) or isinstance(error, NoReleaseError)):
            raise
        place = ["--out", str(out)] if out else ["--name", name] if name else []
        more = [] if verify is None else ["--verify" if verify else "--no-verify"]
        good = _last_good_lock(session, selection.stack_name, kept)
        raise with_next_command(error, selection, request, place, session.context.clock(), more, good) from error
    print_lock(session, result)


def _last_good_lock(session: Session, stack: str, name: str) -> GoodLock | None:
    """The newest lock of a name that the ledger has; None also where it cannot be read: another error is reported."""
    from envbuild.catalog.fields import moment_of
    from envbuild.ledger.ledger import Ledger
    from envbuild.ledger.models import LockRow  # slow to import

    with contextlib.suppress(EnvbuildError, ValueError), Ledger.read(session.ledger_file) as ledger:
        rows = [row for row in ledger.rows(LockRow, stack=stack) if row.name == name and row.as_of]
        newest = max(rows, key=lambda row: row.as_of, default=None)
        return GoodLock(newest.digest, moment_of(newest.as_of)) if newest else None
    return None


def _with_nemo(nemo: str | None, pins: dict[str, str]) -> dict[str, str]:
    if nemo is None:
        return pins
    if any(canonicalize_name(name) == "nemo-toolkit" for name in pins):
        raise UsageError("nemo-toolkit is pinned twice", why="By --nemo and by --pin.", fix="Leave one out.")
    return {"nemo-toolkit": nemo, **pins}


def _consistent(
    torch_build: str | None,
    as_of: str | None,
    no_as_of: bool,
    two_places: bool,
    *,
    check: bool,
    diff: bool,
    everything: bool,
) -> None:
    if torch_build == "":
        raise UsageError(
            "--torch-build is empty",
            why="An empty word names no build.",
            fix="Name a build (cpu, cu130), or index, or leave the option out.",
        )
    if as_of and no_as_of:
        raise UsageError(
            "--as-of and --no-as-of exclude each other",
            why="The one holds packages to a moment, and the other to none.",
            fix="Leave one of them out.",
        )
    if check + diff + everything > 1:
        raise UsageError(
            "--check, --diff and --all exclude each other",
            why="--check looks at existing locks, --diff compares, and --all locks everything.",
            fix="Name one of them.",
        )
    if two_places:
        raise UsageError(
            "--out and --name exclude each other",
            why="Both say where the lock is written: to a directory, or to lockfiles/NAME/BASE.",
            fix="Leave one of them out.",
        )


# What a mode does with locks, so that other options have no effect.
_MODES = {
    "--all": "It makes the default lock of every stack on every base that it names; the option is for one lock.",
    "--check": "It compares existing locks with what they were made from: it resolves, installs and writes nothing.",
}


def _refuse_with(context: click.Context, mode: str, idle: set[str]) -> None:
    """Refuse options, by name, that have no effect with a mode."""
    options = [item for item in context.command.params if isinstance(item, click.Option) and mode not in item.opts]
    found = sorted(flag_of(item, context.params[str(item.name)]) for item in options if item.name in idle)
    if not found:
        return
    (own,) = (str(item.name) for item in context.command.params if mode in item.opts)
    without = (command_line(context, without=names) for names in (idle - {own}, {own}))
    raise UsageError(
        f"{mode} does not go with {', '.join(found)}",
        why=_MODES[mode],
        fix=f"Take one of them: {', or '.join(without)}",
    )


def _known_codes(session: Session, allow: tuple[str, ...]) -> None:
    known = sorted({*CODES, *session.catalog.conflicts()})
    if unknown := [word for word in allow if word not in known and not _is_id(word, known)]:
        if unknown[0].partition(":")[0] in known:
            raise UsageError(
                f"--allow {unknown[0]} has no ID of a finding",
                why="An ID is the check's code, a colon and 8 hexadecimal digits.",
                fix="Copy it from the brackets of a refused lock, or name the code alone: all findings of the check.",
            )
        raise UsageError(
            f"--allow {unknown[0]}: no check has that code",
            why=f"Codes: {', '.join(known)}.",
            fix="Name what a refused lock printed in brackets, CODE:ID, or its code alone.",
        )


def _is_id(word: str, codes: list[str]) -> bool:
    # The digits are of what stays the same between versions: the finding keeps its ID.
    match = re.fullmatch(r"(.+):[0-9a-f]{8}", word)
    return match is not None and match[1] in codes


def _verifier(session: Session, selection: Selection, verify: bool | None) -> Verifier | None:
    """What verifies a lock; None: it is not verified. By default locks are verified of which releases are open."""
    if not (leaves_open(selection.stack) if verify is None else verify):
        return None
    return session.verifier(command_line(click.get_current_context(), "--no-verify", without={"verify"}))


def _diff(
    session: Session,
    selection: Selection,
    request: LockRequest,
    where: Path | str,
    *,
    upgrade: bool,
    verify: bool | None,
) -> None:
    """Compare with the lock in a folder, or with the one of a name."""
    from envbuild.lock.diff import diff_lock, diff_own_or_shipped  # slow to import

    path = where if isinstance(where, Path) else lock_path(session.project, where, selection.base_name)
    verifier = _verifier(session, selection, verify)
    compare = diff_lock if isinstance(where, Path) else diff_own_or_shipped
    difference = compare(selection, request, path, session.context, verifier, upgrade=upgrade)
    session.done(difference.as_json(), *difference.lines())


def _diff_all(session: Session, base: str | None, *, upgrade: bool, verify: bool | None) -> None:
    from envbuild.lock.diff import diff_lock, locks_to_compare  # slow to import

    differences = [
        diff_lock(selection, request, path, session.context, _verifier(session, selection, verify), upgrade=upgrade)
        for selection, request, path in locks_to_compare(session.project, session.catalog, base)
    ]
    lines = [line for change in differences for line in (f"{shown(change.old.path)}:", *change.lines())]
    session.done({"locks": [change.as_json() for change in differences]}, *lines)


def _check(session: Session, stack: str | None, base: str | None, name: str | None, *, online: bool) -> None:
    paths = check_committed(session.project, session.catalog, session.context, stack=stack, base=base, name=name)
    if online:
        from envbuild.lock.online import refuse_gone  # slow to import

        refuse_gone(paths, session.context)
    session.done({"checked": [str(path) for path in paths]}, *[f"{shown(path)}: up to date" for path in paths])


def _lock_all(session: Session, *, upgrade: bool) -> None:
    def reporter_of(item: Selection) -> Reporter:
        # Steps of several locks run at once: only lines can show that.
        return SilentReporter() if session.quiet else PlainReporter(f"{item.stack_name} on {item.base_name}")

    results = lock_all(session.catalog, session.project, session.context, reporter_of, upgrade=upgrade)
    locks = [(result.directory.lock, result.built) for result in results]
    session.done(
        {
            "locks": [
                {"stack": lock.stack, "base": lock.base.name, "built": built, "digest": lock.digest}
                for lock, built in locks
            ]
        },
        *[
            f"{lock.stack} on {lock.base.name}: {'locked' if built else 'nothing to do'}, lock {short(lock.digest)}"
            for lock, built in locks
        ],
    )
