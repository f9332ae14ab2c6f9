"""``envbuild lock``."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Selection
from envbuild.cli.command import command_line, flag_of, given_options
from envbuild.cli.common import FOLDER, SelectionOptions, Session, as_command
from envbuild.cli.options import flag, no_effect, option
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
        name, _, ref = value.partition("=")
        # megatron-core==0.16.1, as in a requirement; megatron-core===0.16.* is COMPONENT=REF with ==0.16.*.
        if ref.startswith("=") and not ref.startswith("=="):
            ref = f"={ref}"
        if not name or not ref:
            raise click.BadParameter(f"{value!r}: write COMPONENT=REF, such as megatron-core=core_v0.16.1")
        if canonicalize_name(name) in map(canonicalize_name, pins):
            raise click.BadParameter(f"{name} is pinned twice")
        pins[name] = ref
    return pins


@dataclass(frozen=True, kw_only=True)
class _Asked(SelectionOptions):
    """The options of one call, by their names."""

    project: str | None = option(
        "--project PATH|URL@REF",
        "Lock a uv project: its uv.lock decides every package. Writes envs/stacks/NAME.toml, by which other commands "
        "know it.",
    )
    extras: tuple[str, ...] = option("--extra NAME", "With --project: install this extra.", multiple=True)
    groups: tuple[str, ...] = option("--group NAME", "With --project: install this dependency group.", multiple=True)
    nemo: str | None = option("--nemo REF", "The same as --pin nemo-toolkit=REF.")
    pins: dict[str, str] = option(
        "--pin COMPONENT=REF",
        "Use this branch, tag, commit, version or specifier; may be repeated.",
        multiple=True,
        callback=pin_texts,
    )
    as_of: str | None = option(
        "--as-of WHEN",
        "Use nothing uploaded after WHEN: a date, a commit of the stack's anchor, 'release' or 'now'.",
    )
    no_as_of: bool = flag("--no-as-of", "Do not limit packages by upload time; for an index that states none.")
    name: str | None = option("--name NAME", "Write to lockfiles/NAME/BASE; pins never overwrite the default lock.")
    out: Path | None = option("--out DIRECTORY", "Write the lock to this directory.", type=FOLDER)
    torch_build: str | None = option(
        "--torch-build BUILD",
        "The build of torch (cpu, cu130) instead of the base's; 'index': the package index's CUDA build.",
    )
    allow: tuple[str, ...] = option(
        "--allow CODE[:ID]",
        "Accept all findings of a check, or one (CODE:ID, as printed); the record lists them.",
        multiple=True,
    )
    upgrade: bool = flag("--upgrade", "Resolve again even if nothing changed, to the newest versions allowed.")
    check: bool = flag("--check", "Fail if a lock is out of date; write nothing.")
    online: bool = flag("--online", "With --check: also fail if the index no longer has a locked file.")
    diff: bool = flag("--diff", "Resolve again and print what would change; write nothing.")
    # None where neither was given: the stack's file decides.
    verify: bool | None = option(
        "--verify/--no-verify",
        "Install the lock in a temporary environment and import its modules; refuse the lock if one fails. Default: "
        "verify, unless the stack pins everything.",
        default=None,
    )
    exact: bool = flag(
        "--exact", "Use upstream's pins at the branch's tip as they are; if they fail, try no other versions."
    )
    everything: bool = flag("--all", "Lock every stack on each of its bases.")

    def refuse_contradictions(self) -> None:
        """Refuse options of which one takes the other's meaning away.

        Raises:
            UsageError: there are such.
        """
        modes = [self.check, self.diff, self.everything]
        for wrong, what, why, fix in (
            (
                self.torch_build == "",
                "--torch-build is empty",
                "An empty word names no build.",
                "Name a build (cpu, cu130), or index, or leave the option out.",
            ),
            (
                self.as_of and self.no_as_of,
                "--as-of and --no-as-of exclude each other",
                "The one holds packages to a moment, and the other to none.",
                "Leave one of them out.",
            ),
            (
                sum(modes) > 1,
                "--check, --diff and --all exclude each other",
                "--check looks at existing locks, --diff compares, and --all locks everything.",
                "Name one of them.",
            ),
            (
                self.out and self.name,
                "--out and --name exclude each other",
                "Both say where the lock is written: to a directory, or to lockfiles/NAME/BASE.",
                "Leave one of them out.",
            ),
            (
                self.online and not self.check and not self.everything,
                "--online goes with --check alone",
                "It asks the index for an existing lock.",
                "Add --check.",
            ),
            (
                bool(self.extras or self.groups) and self.project is None,
                "--extra and --group go with --project alone",
                "They are those of a uv project.",
                "Add --project, or write them under [project] of the stack.",
            ),
            (
                self.nemo is not None and any(canonicalize_name(name) == "nemo-toolkit" for name in self.pins),
                "nemo-toolkit is pinned twice",
                "By --nemo and by --pin.",
                "Leave one out.",
            ),
        ):
            if wrong:
                raise UsageError(what, why=why, fix=fix)

    def all_pins(self) -> dict[str, str]:
        """The pins, that of --nemo too."""
        return self.pins if self.nemo is None else {"nemo-toolkit": self.nemo, **self.pins}

    def place(self) -> list[str]:
        """The options that say where the lock is written."""
        return ["--out", str(self.out)] if self.out else ["--name", self.name] if self.name else []


@as_command("lock", _Asked)
def command(session: Session, asked: _Asked) -> None:
    """Resolve a stack on a base into lockfiles/STACK/BASE/: every package pinned, with hashes.

    An existing lock is reused unless one of its inputs changed or a branch that it tracks moved.
    """
    context = click.get_current_context()
    asked.refuse_contradictions()
    given = given_options(context) - {"as_json", "quiet"}
    if asked.everything:
        _refuse_with(context, "--all", given - {"upgrade"})
        _lock_all(session, upgrade=asked.upgrade)
    elif asked.check:
        _refuse_with(context, "--check", given - {"stack", "base", "name", "online"})
        _check(session, asked, asked.stack if "stack" in given else None)
    else:
        if asked.project is not None:
            _refuse_with(context, "--project", given & _OF_STACKS)
            # Before the catalog is opened, which sees the file that this writes.
            asked = replace(asked, stack=_project_stack(session, asked), name=None)
        _known_codes(session, asked.allow)
        # Without anything that means one lock: every lock of the project.
        if asked.diff and given <= {"diff", "base", "upgrade", "verify"}:
            _diff_all(session, asked)
        else:
            _one_lock(session, asked)


def _one_lock(session: Session, asked: _Asked) -> None:
    """Make or compare the lock of a stack."""
    selection, pins = session.select_to_lock(asked.stack, asked.target, asked.base), asked.all_pins()
    if asked.upgrade and selection.stack.project is not None:
        instead = "Upgrade it there (`uv lock --upgrade`), commit that, and lock again"
        raise no_effect("--upgrade", f"with the uv project of stack {asked.stack}", _MODES["--project"], instead)
    # With the whole stack, so that a pin of what is on other bases alone is refused as that.
    parse_pins(selection.stack_name, selection.stack, pins, session.catalog.stack(selection.stack_name))
    request = LockRequest(
        pins=foreign_pins(selection.stack, pins),
        as_of=asked.as_of,
        no_as_of=asked.no_as_of,
        torch_build=asked.torch_build,
        allow=asked.allow,
        exact=asked.exact,
    )
    # With --out the lock has its place, and pins need not name one.
    name = variant_name(selection.stack_name, selection.stack, {} if asked.out else request.pins, asked.name)
    if asked.diff:
        _diff(session, selection, request, asked, name)
        return
    options = LockOptions(
        path=asked.out or session.project / LOCKFILES / name,
        by_base=asked.out is None,
        upgrade=asked.upgrade,
        named=bool(asked.name or asked.out),
    )
    # Not for --diff, which looks at one base as if it were named; a lock may fall back to another.
    request = replace(request, base_named=asked.base is not None)
    try:
        verifier = _verifier(session, selection, asked.verify)
        result = lock_stack(selection, request, options, session.context, verifier)
    except EnvbuildError as error:
        if not (is_curable(error) or isinstance(error, NoReleaseError)):
            raise
        more = [] if asked.verify is None else ["--verify" if asked.verify else "--no-verify"]
        good = _last_good_lock(session, selection.stack_name, name)
        now = session.context.clock()
        raise with_next_command(error, selection, request, asked.place(), now, more, good) from error
    print_lock(session, result)


def _project_stack(session: Session, asked: _Asked) -> str:
    """The stack of the project that is named: the file that is there, or a new one."""
    from envbuild.lock.project_stack import project_of, write_stack  # slow to import

    definition = project_of(asked.project or "", session.project, asked.extras, asked.groups)
    return write_stack(
        definition, session.project, session.context, name=asked.name, base=asked.base, target=asked.target
    )


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


# Options that decide what a stack resolves to.
_OF_STACKS = {"stack", "nemo", "pins", "as_of", "no_as_of", "torch_build", "exact"}
# What a mode does with locks, so that other options have no effect.
_MODES = {
    "--all": "It makes the default lock of every stack on every base that it names; the option is for one lock.",
    "--project": "The project's uv.lock decides every package: nothing is resolved.",
    "--check": "It compares existing locks with what they were made from: it resolves, installs and writes nothing.",
}


def _refuse_with(context: click.Context, mode: str, idle: set[str]) -> None:
    """Refuse options, by name, that have no effect with a mode."""
    every = context.command.params
    options = [option for option in every if isinstance(option, click.Option) and mode not in option.opts]
    flags = sorted(flag_of(option, context.params[str(option.name)]) for option in options if option.name in idle)
    if not flags:
        return
    (own,) = (str(option.name) for option in every if mode in option.opts)
    without = (command_line(context, without=names) for names in (idle - {own}, {own}))
    raise UsageError(
        f"{mode} does not go with {', '.join(flags)}",
        why=_MODES[mode],
        fix=f"Take one of them: {', or '.join(without)}",
    )


def _known_codes(session: Session, allow: tuple[str, ...]) -> None:
    known = sorted({*CODES, *session.catalog.conflicts})
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


def _diff(session: Session, selection: Selection, request: LockRequest, asked: _Asked, name: str) -> None:
    """Compare with the lock in the folder that was named, or with the one of a name."""
    from envbuild.lock.diff import diff_lock, own_or_shipped  # slow to import

    if asked.base is None:
        place = asked.out or name
        selection = with_locked_base(selection, place, session.project, session.reporter, target=asked.target)
    path = asked.out
    if path is None:
        own = lock_path(session.project, name, selection.base_name)
        path = own_or_shipped(own, selection, session.reporter)
    verifier = _verifier(session, selection, asked.verify)
    difference = diff_lock(selection, request, path, session.context, verifier, upgrade=asked.upgrade)
    session.done(difference.as_json(), *difference.lines())


def _diff_all(session: Session, asked: _Asked) -> None:
    from envbuild.lock.diff import diff_lock, locks_to_compare  # slow to import

    differences = []
    for selection, request, path in locks_to_compare(session.project, session.catalog, asked.base):
        verifier = _verifier(session, selection, asked.verify)
        change = diff_lock(selection, request, path, session.context, verifier, upgrade=asked.upgrade)
        differences.append(change)
    lines = [line for change in differences for line in (f"{shown(change.old.path)}:", *change.lines())]
    session.done({"locks": [change.as_json() for change in differences]}, *lines)


def _check(session: Session, asked: _Asked, stack: str | None) -> None:
    """Check the locks of the project, or of a stack."""
    paths = check_committed(
        session.project, session.catalog, session.context, stack=stack, base=asked.base, name=asked.name
    )
    if asked.online:
        from envbuild.lock.online import refuse_gone  # slow to import

        refuse_gone(paths, session.context)
    session.done({"checked": [str(path) for path in paths]}, *[f"{shown(path)}: up to date" for path in paths])


def _lock_all(session: Session, *, upgrade: bool) -> None:
    def reporter_of(selection: Selection) -> Reporter:
        # Steps of several locks run at once: only lines can show that.
        title = f"{selection.stack_name} on {selection.base_name}"
        return SilentReporter() if session.quiet else PlainReporter(title)

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
