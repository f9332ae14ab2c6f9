"""``envbuild wheels list|show|verify|prune|push|pull``: what is in the wheelhouse, here and in remote stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import click

from envbuild.catalog.data import data_root
from envbuild.cli.command import Command
from envbuild.cli.common import Session, output_options
from envbuild.cli.stores import one_store, store_option
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

NONE = "no wheels here: `envbuild wheels` builds those of a lock, `envbuild wheels pull` takes them from a remote store"
THERE = "Look into this remote store instead: its name in the configuration, or its address."


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


@click.command("list", cls=Command)
@store_option(THERE)
@output_options
def list_command(session: Session, store: str) -> None:
    """List the wheels in the wheelhouse."""
    if not store:
        wheels = list(Wheelhouse(session.store).all())
        lines = [line(built) for built in wheels] or [NONE]
        session.done({"wheels": [as_json(built) for built in wheels]}, *lines)
        return
    remote = one_store(session, store)
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


@click.command("show", cls=Command)
@click.argument("key")
@store_option(THERE)
@output_options
def show_command(session: Session, key: str, store: str) -> None:
    """Print the record of the wheel whose key begins with KEY: its parts, its content, who built it, where it is."""
    if store:
        remote = one_store(session, store)
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


@click.command("verify", cls=Command)
@store_option(THERE)
@output_options
def verify_command(session: Session, store: str) -> None:
    """Read every wheel again and compare it with its record."""
    if store:
        remote = one_store(session, store)
        keys = remote.keys(KIND)
        problems = _remote_problems(session, remote, keys)
        where, count = f"the store {remote.address}", len(keys)
        fix = "They are not taken. With a good wheel here: envbuild wheels push KEY --store STORE --replace"
    else:
        wheelhouse = Wheelhouse(session.store)
        problems = wheelhouse.problems()
        where, count = "the wheelhouse", len(wheelhouse.entries())
        fix = "Run `envbuild wheels` again for them: a damaged entry is not used, and built anew."
    if problems:
        raise CheckRefusedError(
            f"{len(problems)} of {count} entries of {where} are damaged",
            why="\n".join(f"{short(name)}: {why}" for name, why in problems.items()),
            fix=fix,
        )
    session.done({"verified": count}, f"{count} wheels in {where}, all as they were kept")


def _remote_problems(session: Session, remote: Remote, keys: list[str]) -> dict[str, str]:
    remote_wheels = Wheelhouse(session.store, [remote]).remote
    problems = {}
    for key, document in remote.documents(KIND, keys).items():
        why = document.why if isinstance(document, CheckRefusedError) else remote_wheels.damage(remote, document)
        if why:
            problems[key] = why
    return problems


@click.command("push", cls=Command)
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="Push every wheel of the wheelhouse.")
@click.option("--replace", is_flag=True, help="Put a good wheel in the place of a damaged one. A good one stays.")
@store_option("The remote store: its name in the configuration, or its address; default: the only one configured.")
@output_options
def push_command(session: Session, keys: tuple[str, ...], everything: bool, replace: bool, store: str) -> None:
    """Push wheels to a remote store. What is there stays: the first wheel of a key is the one."""
    _one_of(keys, everything)
    wheelhouse = Wheelhouse(session.store)
    items = list(wheelhouse.all()) if everything else [wheelhouse.by_prefix(key) for key in keys]
    remote = one_store(session, store)
    if not items:
        remote.keys(KIND)  # a store that cannot be reached is told also where there is nothing to push
    done: dict[str, str] = {}
    for built in items:
        # By its document, before the wheel is read and hashed.
        if not replace and wheelhouse.remote.has(remote, built):
            done[built.record.key] = Pushed.SAME.value
            continue
        if problem := wheelhouse.problem(built):
            raise CheckRefusedError(
                f"the wheel {short(built.record.key)} is damaged and is not pushed",
                why=f"{problem}. Pushed before it: {len(done)}.",
                fix="Run `envbuild wheels` again for it: a damaged entry is not used, and built anew.",
            )
        done[built.record.key] = wheelhouse.remote.push(remote, built, replace=replace).value
    names = {built.record.key: built.record.file for built in items}
    session.done({"store": remote.address, "pushed": dict(done)}, *_lines(done, names), _total(done, remote))


@click.command("pull", cls=Command)
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--all", "everything", is_flag=True, help="Pull every wheel of the store.")
@store_option("The remote store: its name in the configuration, or its address; default: the only one configured.")
@output_options
def pull_command(session: Session, keys: tuple[str, ...], everything: bool, store: str) -> None:
    """Pull wheels from a remote store into the wheelhouse; each is checked before it is kept."""
    _one_of(keys, everything)
    remote = one_store(session, store)
    chosen = remote.keys(KIND)
    if not everything:
        names = dict.fromkeys(chosen, remote.address)
        chosen = [key_by_prefix(key, names) for key in keys]
    documents = remote.documents(KIND, chosen)
    wheelhouse = Wheelhouse(session.store, [remote])
    done = {key: _pull(wheelhouse, remote, session, key, document) for key, document in documents.items()}
    refused = {key: what for key, what in done.items() if what not in (PULLED, HERE)}
    if refused:
        raise CheckRefusedError(
            f"{len(refused)} of {len(done)} wheels of the store {remote.address} are refused",
            why="\n".join(f"{short(key)}: {why}" for key, why in refused.items()),
            fix="They were not taken; the others were. With a good wheel here: envbuild wheels push KEY --replace",
        )
    names = {built.record.key: built.record.file for built in wheelhouse.all()}
    session.done({"store": remote.address, "pulled": dict(done)}, *_lines(done, names), _total(done, remote))


PULLED, HERE = "pulled", "here already"


def _pull(
    wheelhouse: Wheelhouse, remote: Remote, session: Session, key: str, document: Document | CheckRefusedError
) -> str:
    """What became of a wheel: it was pulled, was here, or why it is refused."""
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


def _one_of(keys: tuple[str, ...], everything: bool) -> None:
    if bool(keys) == everything:
        raise UsageError(
            "which wheels are meant is not clear",
            why="Keys and --all belong not together." if keys else "Neither a key nor --all was given.",
            fix="Name wheels by the beginning of their keys (`envbuild wheels list`), or take --all.",
        )


def _lines(done: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    return [f"{short(key)}  {names.get(key, '')}  {what}" for key, what in done.items()]


def _total(done: Mapping[str, str], remote: Remote) -> str:
    return f"{len(done)} wheels, {remote.address}"


@click.command("prune", cls=Command)
@click.option("--dry-run", is_flag=True, help="Say what would go and how much it is; remove nothing.")
@click.option(
    "--unused-days",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    metavar="DAYS",
    help="Remove what nothing used for so long; 0 for everything.",
)
@click.option("--force", is_flag=True, help="Remove also what a lock under lockfiles/ needs.")
@output_options
def prune_command(session: Session, dry_run: bool, unused_days: float, force: bool) -> None:
    """Remove local wheels that were not used for a while, damaged ones, and abandoned builds.

    With them go toolkits, build environments and git mirrors, which are made again. Wheels that a lock needs stay: the
    project's locks and those that come with envbuild. Remote stores are not touched.
    """
    # In a checkout both roots are the same folder.
    folders = dict.fromkeys(path.resolve() for root in (session.project, data_root()) for path in committed(root))
    lock_directories = [] if force else [read_lock(path) for path in folders]
    plan = plan_pruning(session.store, lock_directories, unused_days=unused_days, force=force)
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
