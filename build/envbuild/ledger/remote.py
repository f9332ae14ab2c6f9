"""A ledger that runners share which do not last: rows in a registry, a bucket or a directory (``--state``).

Each write adds an entry of its own, created and never replaced, so that no writer can lose another one's rows; a
reader takes the union. From time to time one entry gets all rows and says which others it has. Where entries went
away, all that is there is read anew and compared, row by row.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from envbuild.core import jsonread
from envbuild.core.digests import Json, canonical_json, hex_of, sha256_bytes, short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors, open_plain
from envbuild.ledger.ledger import SCHEMA, Ledger, rows_of
from envbuild.ledger.models import ROW_TYPES, Row
from envbuild.store.connect import open_remote
from envbuild.store.document import Document
from envbuild.store.local import LocalStore
from envbuild.store.registry_errors import Wording
from envbuild.store.remote import Remote

KIND = "ledger"
FILE = "rows.json.gz"
# In the index: an entry with all rows, by how many others it has.
WHOLE, PART = "whole", "part"
# So many entries are read one by one; then they are put together.
MOST_PARTS = 64
LARGEST_BYTES = 1 << 30
WORDING = Wording(noun="shared state")


@dataclass(frozen=True, kw_only=True)
class SharedState:
    """Shared state, and the local store in which files are staged."""

    remote: Remote
    store: LocalStore

    @classmethod
    def open(cls, text: str, store: LocalStore, ca_bundle: Path | None = None) -> SharedState:
        """The state at an address: ``oci://``, ``s3://``, ``gs://``, ``file://``, or a directory.

        Raises:
            ConfigurationError: the address is malformed.
        """
        address = text if "://" in text else Path(text).absolute().as_uri()
        return cls(remote=open_remote(address, ca_bundle=ca_bundle, wording=WORDING), store=store)

    @property
    def address(self) -> str:
        return self.remote.address

    def fetch(self, ledger: Ledger) -> int:
        """Bring what others wrote into a ledger; how many rows changed.

        Raises:
            CheckRefusedError: what is there is damaged, or of a newer envbuild.
            NetworkError: it cannot be reached.
        """
        keys = self.remote.keys(KIND)
        self._forget_what_went(ledger, keys)
        return self._fetch(ledger, keys)

    def push(self, ledger: Ledger) -> int:
        """Write what the ledger has and the state does not; how many rows that were.

        Raises:
            CheckRefusedError: what is there is damaged, or of a newer envbuild.
            NetworkError: it cannot be reached or written.
        """
        keys = self.remote.keys(KIND)
        if self._forget_what_went(ledger, keys):
            self._fetch(ledger, keys)
        unsent = ledger.unsent(self.address)
        if unsent:
            key = self._put([row.row for row in unsent], (PART,), ())
            # Afterwards: a process that is killed before sends the same rows again, under the same key.
            ledger.mark_sent(self.address, unsent, key)
            keys = [*keys, key]
        self._put_together(ledger, keys)
        return len(unsent)

    def _forget_what_went(self, ledger: Ledger, keys: Sequence[str]) -> bool:
        """Forget what the state has where entries went away: an older copy was put back, or somebody removed some.

        What is there then is read anew, and its rows are compared with those here: what it lacks is sent again.
        """
        gone = ledger.merged(self.address).difference(keys)
        # An entry with all rows may have taken its place.
        if not gone or not gone.difference(*self._wholes(keys).values()):
            return False
        self.store.reporter.note(
            f"note: {self.address} has lost {len(gone)} entries of the shared ledger since it was last read (was an "
            "older copy put back?): a night sends again what it lacks"
        )
        ledger.forget_place(self.address)
        return True

    def _fetch(self, ledger: Ledger, keys: Sequence[str]) -> int:
        known = ledger.merged(self.address)
        missing = [key for key in keys if key not in known]
        changed = 0
        for key in self._whole_first(missing):
            # Asked again: an entry with all rows may have brought this one along.
            # One that is listed and not there yet is asked for again the next time.
            if key not in ledger.merged(self.address) and (tables := self._take(key)) is not None:
                rows, contained = tables
                changed += ledger.merge(rows, self.address, [key, *contained])
        return changed

    def _put_together(self, ledger: Ledger, keys: Sequence[str]) -> None:
        contained = {key for contained_keys in self._wholes(keys).values() for key in contained_keys}
        if len(set(keys) - contained) <= MOST_PARTS:
            return
        # First all that is there: an entry that says which others it has must have their rows.
        self._fetch(ledger, keys)
        kept = sorted(ledger.merged(self.address))
        exported = rows_of(ledger.export(), "the ledger")
        key = self._put(exported, (WHOLE, f"{len(kept):09d}"), kept)
        ledger.merge(exported, self.address, [key])

    def _whole_first(self, keys: Sequence[str]) -> list[str]:
        """The keys, those of entries with all rows first, the largest of these before the others."""
        wholes = self._wholes(keys)
        return [*sorted(wholes, key=lambda key: -len(wholes[key])), *[key for key in keys if key not in wholes]]

    def _wholes(self, keys: Sequence[str]) -> dict[str, list[str]]:
        refs = self.remote.list_index(KIND, (WHOLE,)) if keys else []
        documents = self.remote.documents(KIND, [ref.key for ref in refs if ref.key in set(keys)])
        # A damaged one counts as any other here, and is refused when it is taken.
        return {key: _contained(document) for key, document in documents.items() if isinstance(document, Document)}

    def _put(self, rows: Sequence[Row], index_path: tuple[str, ...], contains: Sequence[str]) -> str:
        tables: dict[str, Json] = {
            kind.table: [jsonread.loads(row.body()) for row in rows if isinstance(row, kind)] for kind in ROW_TYPES
        }
        content = canonical_json(
            {"schema": SCHEMA, **{name: table_rows for name, table_rows in tables.items() if table_rows}}
        )
        key = sha256_bytes(content)
        record: JsonValue = {"contains": list(contains)}
        with self.store.staging(KIND) as folder:
            with machine_errors(folder):
                # Without the time: the same rows are the same file.
                (folder / FILE).write_bytes(gzip.compress(content, mtime=0))
            # Whether it was there already does not matter: its key is the digest of its rows.
            self.remote.push(KIND, key, index_path, folder, record)
        return key

    def _take(self, key: str) -> tuple[list[Row], list[str]] | None:
        where = f"the shared ledger at {self.address}"
        with self.store.staging(KIND) as folder:
            try:
                document = self.remote.find(KIND, key)
                if document is None:
                    return None
                self.remote.fetch(document, folder)
            except CheckRefusedError as error:
                raise _refused(where, key, error.why) from error
            try:
                content = _unpacked(folder / FILE)
                exported = jsonread.loads(content)
            except (OSError, EOFError, zlib.error, ValueError) as error:
                raise _refused(where, key, f"It cannot be read: {error}.") from error
        if sha256_bytes(content) != key:
            raise _refused(where, key, "It has other content than its name states.")
        return rows_of(exported, where), _contained(document)


def _unpacked(path: Path) -> bytes:
    with open_plain(path) as packed, gzip.GzipFile(fileobj=packed) as stream:
        content = stream.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"it is larger than {LARGEST_BYTES} bytes")
    return content


def _contained(document: Document) -> list[str]:
    record = document.record
    keys = record.get("contains") if isinstance(record, dict) else None
    return [str(key) for key in keys] if isinstance(keys, list) else []


def _refused(where: str, key: str, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"entry {short(key)} of {where} is damaged",
        why=why,
        fix=f"Remove there what has {hex_of(key)} in its name: the next night of a machine with its rows sends them "
        "again. `envbuild ledger rebuild --from REGISTRY/REPO` brings back what is published.",
    )
