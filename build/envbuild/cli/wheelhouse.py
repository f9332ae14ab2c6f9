"""``envbuild wheels list|show|verify|prune|push|pull``: what is in the wheelhouse, here and in remote stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import click

from envbuild.catalog.data import data_root
from envbuild.cli.common import Session, as_command
from envbuild.cli.options import argument, flag, include, option
from envbuild.cli.stores import one_store, store_name
from envbuild.core.digests import Json, short
from envbuild.core.errors import CheckRefusedError, UsageError
from envbuild.core.text import shown
from envbuild.lock.lockfile import read_lock
from envbuild.lock.project_locks import committed
from envbuild.store.document import Document
from envbuild.store.remote import Pushed, Remote
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.cache.entry import KIND, Built, WheelRecord
from envbuild.wheels.cache.prune import plan_pruning, remove
from envbuild.wheels.cache.remote import record_of
from envbuild.wheels.cache.wheelhouse import Wheelhouse, key_by_prefix

REPLACE = "Replace one by a good wheel of this machine: envbuild wheels push KEY --replace"
NONE = "no wheels here: `envbuild wheels` builds those of a lock, `envbuild wheels pull` takes them from a remote store"


def as_json(built: Built) -> dict[str, Json]:
    """A wheel as ``--json`` has it."""
    provenance = built.provenance()
    return {
        "built": built.built,
        "fetched": built.fetched,
        "pushed": dict(built.pushed),
        "path": str(built.wheel),
        "record": built.record.model_dump(mode="json", by_alias=True),
        "provenance": provenance.model_dump(mode="json", by_alias=True) if provenance else None,
    }


def line(built: Built) -> str:
    if built.built:
        state = f"built in {built.record.build_seconds:.0f} s"
    else:
        state = f"fetched from {built.fetched}" if built.fetched else "in the wheelhouse"
    state += "".join(f", {place}: {what}" for place, what in built.pushed.items())
    return f"{_what(built.record)}  {state}  {shown(built.wheel)}"


def _what(record: WheelRecord) -> str:
    architectures = Architectures.named(record.sm, record.ptx).text()
    return f"{short(record.key)}  {record.file}  {architectures}  {record.size_bytes / 1e6:.1f} MB"


def _details(record: WheelRecord) -> list[str]:
    return [
        f"  digest = {record.digest}",
        f"  glibc = {record.glibc}",
        f"  libstdc++ = {record.libstdcxx}",
        f"  policy = {record.policy or 'none'}",
        *[f"  not manylinux: {why}" for why in record.not_manylinux],
        f"  libraries = {' '.join(record.libraries)}",
        f"  imported = {' '.join(record.imported)}",
        *[f"  not imported: {module}: {why}" for module, why in record.not_imported.items()],
        *[f"  {name} = {value}" for name, value in record.parts.flat().items()],
    ]


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    store: str = store_name("Use this remote store instead: its name in the configuration, or its address.")


@as_command("list", PlaceOptions)
def list_command(session: Session, options: PlaceOptions) -> None:
    """List the wheels in the wheelhouse."""
    if not options.store:
        wheels = list(Wheelhouse(session.store).all())
        lines = [line(built) for built in wheels] or [NONE]
        session.done({"wheels": [as_json(built) for built in wheels]}, *lines)
        return
    remote = one_store(session, options.store)
    records, bad = _records(remote, remote.keys(KIND))
    session.done(
        {
            "store": remote.address,
            "wheels": [_remote_json(record) for record in records.values()],
            "refused": dict(bad),
        },
        *([_what(record) for record in records.values()] or ([] if bad else [f"no wheels in {remote.address}"])),
        *[f"{short(key)}  refused: {why}" for key, why in bad.items()],
    )


def _remote_json(record: WheelRecord) -> dict[str, Json]:
    return {"record": record.model_dump(mode="json", by_alias=True)}


def _records(remote: Remote, keys: list[str]) -> tuple[dict[str, WheelRecord], dict[str, str]]:
    """The records of a store's wheels, by package, and why the others cannot be read."""
    good, bad = {}, {}
    for key, document in remote.documents(KIND, keys).items():
        if isinstance(document, CheckRefusedError):
            bad[key] = document.why
        elif (record := record_of(document)) is None or record.key != key:
            bad[key] = "Its record is not that of a wheel with this key."
        else:
            good[key] = record
    return dict(sorted(good.items(), key=lambda pair: (pair[1].parts.package, pair[1].parts.version, pair[0]))), bad


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    key: str = argument()
    place: PlaceOptions = include(PlaceOptions)


@as_command("show", ShowOptions)
def show_command(session: Session, options: ShowOptions) -> None:
    """Print the record of the wheel whose key begins with KEY: its parts, its content, who built it, where it is."""
    key = options.key
    if options.place.store:
        remote = one_store(session, options.place.store)
        records, _ = _records(remote, _matching(remote, key))
        record = records[key_by_prefix(key, {name: built.file for name, built in records.items()})]
        session.done({"store": remote.address, **_remote_json(record)}, _what(record), *_details(record))
        return
    built = Wheelhouse(session.store).by_prefix(key)
    provenance = built.provenance()
    made = provenance.model_dump(exclude={"schema_", "toolchain"}) if provenance else {}
    lines = [f"  {name} = {value}" for name, value in made.items()]
    session.done(as_json(built), line(built), *lines, *_details(built.record))


def _matching(remote: Remote, text: str) -> list[str]:
    """The keys that begin with ``text``; all where none does, for the error that names them."""
    keys = remote.keys(KIND)
    return [key for key in keys if key.removeprefix("sha256:").startswith(text.removeprefix("sha256:"))] or keys


@as_command("verify", PlaceOptions)
def verify_command(session: Session, options: PlaceOptions) -> None:
    """Read every wheel again and compare it with its record."""
    if options.store:
        remote = one_store(session, options.store)
        keys = remote.keys(KIND)
        problems = _remote_problems(session, remote, keys)
        where, count = f"the store {remote.address}", len(keys)
        fix = f"Damaged entries are not used. {REPLACE} --store STORE"
    else:
        wheelhouse = Wheelhouse(session.store)
        problems = wheelhouse.problems()
        where, count = "the wheelhouse", len(wheelhouse.entries())
        fix = "Run `envbuild wheels` again: damaged entries are not used, and are built again."
    if problems:
        raise CheckRefusedError(
            f"{len(problems)} of {count} entries of {where} are damaged",
            why="\n".join(f"{short(name)}: {why}" for name, why in problems.items()),
            fix=fix,
        )
    session.done({"verified": count}, f"{count} wheels in {where}, all unchanged")


def _remote_problems(session: Session, remote: Remote, keys: list[str]) -> dict[str, str]:
    remote_wheels = Wheelhouse(session.store, [remote]).remote
    problems = {}
    for key, document in remote.documents(KIND, keys).items():
        why = document.why if isinstance(document, CheckRefusedError) else remote_wheels.damage(remote, document)
        if why:
            problems[key] = why
    return problems


@dataclass(frozen=True, kw_only=True)
class MoveOptions:
    """The wheels that are pushed or pulled, and the store."""

    keys: tuple[str, ...] = argument(nargs=-1, metavar="[KEY]...")
    everything: bool = flag("--all", "Every wheel.")
    store: str = store_name(
        "The remote store: its name in the configuration, or its address; default: the only one configured."
    )

    def check(self) -> None:
        """Refuse keys next to --all, and neither of them.

        Raises:
            UsageError: which wheels are meant is not clear.
        """
        if bool(self.keys) == self.everything:
            raise UsageError(
                "which wheels are meant is not clear",
                why="Both keys and --all were given." if self.keys else "Neither a key nor --all was given.",
                fix="Name wheels by the beginning of their keys (`envbuild wheels list`), or use --all.",
            )


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    wheels: MoveOptions = include(MoveOptions)
    replace: bool = flag("--replace", "Replace damaged wheels in the store; good ones stay.")


@as_command("push", PushOptions)
def push_command(session: Session, options: PushOptions) -> None:
    """Push wheels to a remote store. A wheel that the store already has is not replaced."""
    options.wheels.check()
    wheelhouse, replace = Wheelhouse(session.store), options.replace
    wheels = (
        list(wheelhouse.all())
        if options.wheels.everything
        else [wheelhouse.by_prefix(key) for key in options.wheels.keys]
    )
    remote = one_store(session, options.wheels.store)
    if not wheels:
        remote.keys(KIND)  # a store that cannot be reached is told also where there is nothing to push
    done: dict[str, str] = {}
    for built in wheels:
        # By its document, before the wheel is read and hashed.
        if not replace and wheelhouse.remote.has(remote, built):
            done[built.record.key] = Pushed.SAME.value
            continue
        if problem := wheelhouse.problem(built):
            raise CheckRefusedError(
                f"the wheel {short(built.record.key)} is damaged and is not pushed",
                why=f"{problem}. Pushed before it: {len(done)}.",
                fix="Run `envbuild wheels` again: damaged entries are not used, and are built again.",
            )
        done[built.record.key] = wheelhouse.remote.push(remote, built, replace=replace).value
    names = {built.record.key: built.record.file for built in wheels}
    session.done({"store": remote.address, "pushed": dict(done)}, *_lines(done, names), _total(done, remote))


@as_command("pull", MoveOptions)
def pull_command(session: Session, options: MoveOptions) -> None:
    """Pull wheels from a remote store into the wheelhouse; each is compared with its record."""
    options.check()
    remote = one_store(session, options.store)
    chosen = remote.keys(KIND)
    if not options.everything:
        names = dict.fromkeys(chosen, remote.address)
        chosen = [key_by_prefix(key, names) for key in options.keys]
    documents = remote.documents(KIND, chosen)
    wheelhouse = Wheelhouse(session.store, [remote])
    done = {key: _pull(wheelhouse, remote, session, key, document) for key, document in documents.items()}
    refused = {key: what for key, what in done.items() if what not in (PULLED, HERE)}
    if refused:
        raise CheckRefusedError(
            f"{len(refused)} of {len(done)} wheels of the store {remote.address} are refused",
            why="\n".join(f"{short(key)}: {why}" for key, why in refused.items()),
            fix=f"The others were pulled. {REPLACE}",
        )
    names = {built.record.key: built.record.file for built in wheelhouse.all()}
    session.done({"store": remote.address, "pulled": dict(done)}, *_lines(done, names), _total(done, remote))


PULLED, HERE = "pulled", "here already"


def _pull(
    wheelhouse: Wheelhouse, remote: Remote, session: Session, key: str, document: Document | CheckRefusedError
) -> str:
    """Pull a wheel; returns whether it was pulled or was here, or why it is refused."""
    if isinstance(document, CheckRefusedError):
        return document.why
    # An entry whose record has another key must not count as one that is here.
    wheelhouse.set_aside(key)
    try:
        entry = session.store.get_or_build(
            KIND, key, lambda folder: wheelhouse.remote.fetch_into(remote, document, folder)
        )
    except CheckRefusedError as error:
        return error.why
    return PULLED if entry.built else HERE


def _lines(done: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    return [f"{short(key)}  {names.get(key, '')}  {what}" for key, what in done.items()]


def _total(done: Mapping[str, str], remote: Remote) -> str:
    return f"{len(done)} wheels, {remote.address}"


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    dry_run: bool = flag("--dry-run", "Print what would be removed and its size; remove nothing.")
    unused_days: float = option(
        "--unused-days DAYS",
        "Remove what was not used for this long; 0: everything.",
        type=click.FloatRange(min=0),
        default=30,
    )
    force: bool = flag("--force", "Also remove what a lock under lockfiles/ needs.")


@as_command("prune", PruneOptions)
def prune_command(session: Session, options: PruneOptions) -> None:
    """Remove local wheels that are unused or damaged, and abandoned builds.

    Also removes toolkits, build environments and git mirrors, which are made again when needed. Wheels that a
    lock of the project or a shipped lock needs are kept. Remote stores are not changed.
    """
    dry_run, force = options.dry_run, options.force
    # In a checkout both roots are the same folder.
    folders = dict.fromkeys(path.resolve() for root in (session.project, data_root()) for path in committed(root))
    lock_directories = [] if force else [read_lock(path) for path in folders]
    plan = plan_pruning(session.store, lock_directories, unused_days=options.unused_days, force=force)
    gone = plan.old if dry_run else remove(session.store, plan.old)
    size = sum(entry.size_bytes for entry in gone)
    word = "would be removed" if dry_run else "removed"
    session.done(
        {
            "dry_run": dry_run,
            "removed": [asdict(entry) for entry in gone],
            "needed": [asdict(entry) for entry in plan.needed],
            "size_bytes": size,
        },
        *[f"{word}: {entry.name}  {entry.size_bytes / 1e6:.1f} MB  {entry.why}" for entry in gone],
        *[
            f"stays, a lock needs it: {entry.name}  {entry.size_bytes / 1e6:.1f} MB  {entry.why}"
            for entry in plan.needed
        ],
        f"{word}: {len(gone)} entries of the cache directory, {size / 1e6:.1f} MB",
    )


COMMANDS = (list_command, show_command, verify_command, prune_command, push_command, pull_command)
