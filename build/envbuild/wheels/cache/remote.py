"""Wheels from and for remote stores: what comes is checked before it is an entry here, what goes was checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from envbuild.core.digests import Json, short
from envbuild.core.errors import CheckRefusedError, EnvbuildError, MachineError, NetworkError
from envbuild.core.text import quoted_command
from envbuild.store.backend import EntryRef
from envbuild.store.document import Document, refused
from envbuild.store.local import LocalStore
from envbuild.store.remote import Pushed, Remote
from envbuild.wheels.cache.entry import KIND, Built, WheelRecord, check_entry, index_path_of, read_record
from envbuild.wheels.key import KeyParts


class RemoteWheels:
    """The remote stores of a local one, for wheels."""

    def __init__(self, store: LocalStore, remotes: Sequence[Remote]) -> None:
        self._store = store
        self.remotes = tuple(remotes)

    def fetch(self, key: str) -> str:
        """Make the entry of ``key`` a local one; returns the store it came from, empty where none has a good one.

        Raises:
            NetworkError: a store that is to be read cannot be reached or refuses.
        """
        return next((remote.address for remote in self._readers if self._fetch_from(remote, key)), "")

    def _fetch_from(self, remote: Remote, key: str) -> bool:
        try:
            document = remote.find(KIND, key)
            if document is None:
                return False
            self._store.get_or_build(KIND, key, lambda folder: self.fetch_into(remote, document, folder))
        except CheckRefusedError as error:
            self._store.reporter.note(f"not taken: {error.what}. {error.why}")
            return False
        return True

    def fetch_into(self, remote: Remote, document: Document, folder: Path) -> None:
        """Put the files of a remote entry into a folder, and check them.

        Raises:
            CheckRefusedError: it is damaged, another one's, or not what it says.
        """
        size = document.size_bytes / 1e6
        with self._store.reporter.step(f"fetch {_file(document)} from {remote.address}, {size:.1f} MB"):
            remote.fetch(document, folder)
        try:
            record = check_entry(folder, document.key)
        except CheckRefusedError as error:
            why = error.why.replace(f" ({folder})", "")
            raise refused(KIND, document.key, remote.address, f"It does not match its record: {why}.") from error
        # Wheels are ranked by their documents alone, before any file is fetched: a document that differs from the
        # record in the entry would be chosen for what the wheel is not.
        if document.record != record.model_dump(mode="json", by_alias=True) or document.index_path != index_path_of(
            record.parts
        ):
            raise refused(KIND, document.key, remote.address, "Its document differs from its record.")

    @property
    def _readers(self) -> Iterator[Remote]:
        return (remote for remote in self.remotes if remote.reads)

    @cached_property
    def entry_refs(self) -> tuple[tuple[Remote, EntryRef], ...]:
        """All wheels of the stores that are read, by sdist and by what they are for; listed once."""
        return tuple((remote, ref) for remote in self._readers for ref in remote.list_index(KIND, ()))

    def fetch_fitting(self, parts: KeyParts, rank: Callable[[KeyParts], tuple[int, ...] | None]) -> str:
        """Make the best wheel that may stand in for one with these parts a local one; returns its key, or nothing.

        Args:
            rank: how good a wheel with some parts is; None: it does not fit.
        """
        for remote in self._readers:
            keys = [
                ref.key for place, ref in self.entry_refs if place is remote and ref.index_path == index_path_of(parts)
            ]
            ranked = self._ranked(remote, keys, rank)
            for key in ranked:
                if self._fetch_from(remote, key):
                    return key
        return ""

    def _ranked(
        self, remote: Remote, keys: list[str], rank: Callable[[KeyParts], tuple[int, ...] | None]
    ) -> Iterable[str]:
        ranked = []
        for key, document in remote.documents(KIND, keys).items():
            if isinstance(document, CheckRefusedError):
                self._store.reporter.note(f"not taken: {document.what}. {document.why}")
                continue
            record = record_of(document)
            order = rank(record.parts) if record is not None and record.key == key else None
            if order is not None:
                ranked.append((order, key))
        return [key for _, key in sorted(ranked, reverse=True)]

    def push_built(self, built: Built) -> dict[str, str]:
        """Push what was built here to every store that is written; a failure is reported and is not an error.

        Where another machine was first, its wheel takes the place of this one: there is one for a key.
        """
        done = {}
        for remote in self.remotes:
            if remote.writes:
                try:
                    done[remote.address] = self._push_built(remote, built)
                except (NetworkError, MachineError, CheckRefusedError) as error:
                    done[remote.address] = f"failed: {error.what}"
                    self._store.reporter.note(_not_pushed(built, remote, error))
        return done

    def _push_built(self, remote: Remote, built: Built) -> str:
        result = self.push(remote, built)
        # Builds of one key need not have the same bytes (a package may write times into its files). Two wheels of
        # one key would give images of two digests: the first one counts everywhere.
        if result is Pushed.OTHER:
            key, name = built.record.key, built.record.file
            document = remote.find(KIND, key)
            if document is not None:
                self._store.rebuild(KIND, key, lambda folder: self.fetch_into(remote, document, folder))
            self._store.reporter.note(
                f"{name} {short(key)} was built by another machine first: the one in {remote.address} is kept"
            )
        return result.value

    def has(self, remote: Remote, built: Built) -> bool:
        """Whether a store has this very wheel, by what its document says: nothing is read again, here or there.

        Raises:
            NetworkError: the store cannot be reached or refuses.
        """
        record = built.record
        try:
            document = remote.find(KIND, record.key)
        except CheckRefusedError:
            return False
        if document is None or document.record != record.model_dump(mode="json", by_alias=True):
            return False
        return (record.digest, record.size_bytes) in {(file.digest, file.size_bytes) for file in document.files}

    def push(self, remote: Remote, built: Built, *, replace: bool = False) -> Pushed:
        """Push a local wheel.

        Args:
            replace: put it in the place of a damaged one, which is found out by fetching that.

        Raises:
            CheckRefusedError: the local wheel or the one in the store is damaged.
            NetworkError: the store cannot be reached or refuses.
        """
        record = read_record(built.path)  # may have been replaced by another store's since
        content: Json = record.model_dump(mode="json", by_alias=True)
        title = f"push {record.file} to {remote.address}, {record.size_bytes / 1e6:.1f} MB"
        with self._store.reporter.step(title):
            return remote.push(
                KIND,
                record.key,
                index_path_of(record.parts),
                built.path,
                content,  # type: ignore[arg-type]
                replace=lambda document: replace and self.damage(remote, document) != "",
            )

    def damage(self, remote: Remote, document: Document | None) -> str:
        """What is wrong with an entry of a remote store, all of it read; empty when nothing is."""
        if document is None:
            return "its document cannot be read"
        with self._store.staging("looked-at") as folder:
            try:
                self.fetch_into(remote, document, folder)
            except CheckRefusedError as error:
                return error.why
        return ""


def record_of(document: Document) -> WheelRecord | None:
    """The record that a document has; None when it is not a wheel's."""
    try:
        return WheelRecord.model_validate(document.record)
    except ValidationError:
        return None


def _file(document: Document) -> str:
    record = record_of(document)
    return record.file if record is not None else short(document.key)


def _not_pushed(built: Built, remote: Remote, error: EnvbuildError) -> str:
    push = quoted_command("envbuild", "wheels", "push", short(built.record.key), "--store", remote.name)
    return (
        f"warning: {built.record.file} was built and is kept here, but not pushed: {error.what}. {error.why}\n"
        f"  Push it later: {push}"
    )
