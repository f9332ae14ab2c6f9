"""A bucket: S3 and what speaks like it, and Google Cloud Storage.

Obstore does the work: one library for both, with conditional puts, retries, multipart uploads, streams, and no
dependencies, in 15 MB where boto3 alone is twice that.
"""

from __future__ import annotations

import configparser
import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from envbuild.core.background import run_in_background
from envbuild.core.errors import EnvbuildError, MachineError, NetworkError
from envbuild.core.files import NotPlainFileError, machine_errors
from envbuild.store.address import Address
from envbuild.store.backend import StoredObject
from envbuild.store.registry_errors import Wording
from envbuild.store.transfer import longest_seconds

if TYPE_CHECKING:
    from obstore.store import GCSStore, S3Store

# S3 takes no parts of an upload below 5 MiB, and no more than 10 000 of them.
LEAST_PART_BYTES, PARTS = 8 << 20, 9000
CHUNK_BYTES = 4 << 20
# An empty object, whose time is that of its last writing.
CLOCK = "clock"
# By which it is seen what the service knows.
PROBE = "probe"
T = TypeVar("T")
CONNECT_SECONDS, READ_SECONDS = 10, 60
# For so long an upload that its store puts together is waited for: ten minutes.
ARRIVAL_PAUSE_SECONDS, ARRIVAL_LOOKS = 5.0, 120
RETRIES = 5
RETRY_SECONDS = 120
# For an answer that is no file, all tries together: a server that trickles would hold a command for ever.
ANSWER_SECONDS = 600.0
# Lists come page by page, and a server could send pages for ever.
MOST_NAMES, LIST_SECONDS = 1_000_000, 600.0
# The exceptions of obstore (0.12) have no fields: status and kind of a failure are in their text alone.
_STATUS = re.compile(r"status code: (\d{3})[ A-Za-z-]*")
_KIND = re.compile(r"kind: (\w+),")
# The word for an error in S3's answers ("Error responses"); the rest of them may quote the request.
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
# Of the request that sends a part. A failure to put them together may have the text of the one to clean up after it.
_SENDING = "performing PUT"
_FIXES = {
    "NoSuchUpload": "It forgot the upload before its end: run the same command again. If a rule of the bucket ends "
    "unfinished uploads, give them a day.",
    "401": "Check the credentials.",
    "403": "Give {account} the right to do this there (get, put and list), or check the credentials.",
    "429": "It is overloaded: run the same command again later.",
    "507": "Its space is used up: free some, or have the quota raised; then run the same command again.",
    "QuotaExceeded": "Its quota is used up: free some space there, or have it raised; then run the same command again.",
    "RequestTimeTooSkewed": "Set this machine's clock: a request is signed for some minutes.",
    "ExpiredToken": "The credentials expired: get new ones.",
}


class Bucket:
    """The objects under a prefix of a bucket; an object store (:class:`~envbuild.store.backend.ObjectStore`)."""

    def __init__(self, address: Address, store: S3Store | GCSStore, account: str, wording: Wording) -> None:
        self._address = address
        self._store = store
        self._account = account
        self._wording = wording
        self._seen = False

    @property
    def address(self) -> str:
        return str(self._address)

    def read(self, path: str, at_most_bytes: int) -> StoredObject | None:
        import obstore

        with self._errors(f"read {path}"):
            try:
                answer = wait_for(lambda: obstore.get(self._store, path))
                if answer.meta["size"] > at_most_bytes:
                    raise NotPlainFileError(f"{path.rpartition('/')[2]} is larger than {at_most_bytes >> 20} MiB")
                content = wait_for(lambda: bytes(answer.bytes()))
            except FileNotFoundError:
                self._check_bucket()
                return None
        # S3 compares entity tags, Google generations; obstore wants no key without a value.
        version = {key: value for key in ("e_tag", "version") if (value := answer.meta[key])}
        return StoredObject(content, version, answer.meta["last_modified"])

    def create(self, path: str, content: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        with self._errors(f"write {path}"):
            try:
                # HTTP's If-None-Match: *, which the server decides.
                # A conditional put is one request: parts of an upload have no such condition.
                self._put(path, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def replace(self, path: str, content: bytes, of: StoredObject) -> bool:
        from obstore.exceptions import PreconditionError

        with self._errors(f"write {path}"):
            try:
                self._put(path, content, mode=of.version, use_multipart=False)
            except PreconditionError:
                return False
            except FileNotFoundError as error:
                # S3's answer to a condition on what was removed.
                if _code(str(error)) != "NoSuchKey":
                    raise
                return False
        return True

    def write(self, path: str, content: bytes) -> None:
        with self._errors(f"write {path}"):
            self._put(path, content)

    def remove(self, path: str) -> None:
        import obstore

        # Where there is nothing, S3 answers well and GCS does not.
        with self._errors(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            wait_for(lambda: obstore.delete(self._store, path))

    def names(self, prefix: str) -> list[str]:
        import obstore

        with self._errors("list what it has"):
            listing = obstore.list(self._store, prefix)
            names = list[str]()

            def read() -> list[str]:
                for page in listing:
                    names.extend(str(entry["path"]) for entry in page)
                    if len(names) > MOST_NAMES:
                        raise self._endless(len(names))
                return names

            try:
                return run_in_background(read).result(timeout=LIST_SECONDS)
            except FutureTimeoutError:  # also of pages without a name, of which obstore says nothing
                raise self._endless(len(names)) from None

    def size(self, path: str) -> int | None:
        with self._errors(f"look for {path}"):
            state = self._state(path)
            if state is None:
                self._check_bucket()
            return None if state is None else int(state["size"])

    def has_conditions(self) -> bool:
        # It stays: an account may lack the right to remove.
        self.create(PROBE, b"")
        if self.create(PROBE, b""):
            return False
        older = self.read(PROBE, 32)
        # Entity tags of equal contents are equal.
        self.write(PROBE, secrets.token_bytes(32))
        return older is None or not self.replace(PROBE, b"", older)

    def now(self) -> datetime:
        # Buckets tell no time but that of objects, and obstore no headers.
        self.write(CLOCK, b"")
        state = self.read(CLOCK, 0)
        if state is None:
            raise self._failed(f"read {CLOCK}", "")
        return state.modified

    def upload(self, file: Path, path: str, size_bytes: int) -> None:
        # obstore sends parts of one size, so it is chosen for the number of parts; it sends a part again that was cut.
        part = max(LEAST_PART_BYTES, size_bytes // PARTS + 1)
        with self._errors(f"write {path}"):
            before = self._state(path) if size_bytes > part else None
            # What its store forgot before it was whole is sent once more.
            if not self._is_sent(file, path, size_bytes, part, before):
                self._put(path, file, chunk_size=part)

    def _is_sent(self, file: Path, path: str, size_bytes: int, part: int, before: Any) -> bool:
        try:
            self._put(path, file, chunk_size=part)
        except FileNotFoundError as error:
            text = str(error)
            if _code(text) != "NoSuchUpload":
                raise
            # S3 puts parts together for minutes, and takes the request that is sent again meanwhile for one of an
            # unknown upload.
            return _SENDING not in text and self._arrives(path, size_bytes, before)
        return True

    def _arrives(self, path: str, size_bytes: int, before: Any) -> bool:
        """Whether a new object of a size is there before the time is up."""
        for pause in (0.0, *[ARRIVAL_PAUSE_SECONDS] * ARRIVAL_LOOKS):
            time.sleep(pause)
            now = self._state(path)
            if now is not None and now != before and now["size"] == size_bytes:
                return True
        return False

    def _state(self, path: str) -> Any:
        """What the store says of an object; None when there is none."""
        import obstore

        with contextlib.suppress(FileNotFoundError):
            return wait_for(lambda: obstore.head(self._store, path))
        return None

    def download(self, path: str, size_bytes: int, to: Path, start: int = 0) -> bool:
        import obstore

        with self._errors(f"read {path}"):
            try:
                options: Any = {"range": {"offset": start}} if start else None
                answer = wait_for(lambda: obstore.get(self._store, path, options=options))
            except FileNotFoundError:
                self._check_bucket()
                return False
            with machine_errors(to), to.open("ab" if start else "wb") as out:
                chunks = iter(answer.stream(min_chunk_size=CHUNK_BYTES))
                limit = longest_seconds(size_bytes)
                deadline = time.monotonic() + limit
                while out.tell() <= size_bytes:
                    left = max(0.0, deadline - time.monotonic())
                    if (chunk := wait_for(lambda: next(chunks, None), left, limit)) is None:
                        break
                    out.write(chunk)
        return True

    def _put(self, path: str, content: bytes | Path, **how: Any) -> None:
        import obstore

        size_bytes = content.stat().st_size if isinstance(content, Path) else 0
        wait_for(lambda: obstore.put(self._store, path, content, **how), ANSWER_SECONDS + longest_seconds(size_bytes))

    def _check_bucket(self) -> None:
        """What is not found may be missing with its whole bucket; listing an empty place is no error, that one is."""
        # S3 answers 404 for both; obstore raises FileNotFoundError for both.
        if not self._seen:
            self.names("entries")
            self._seen = True

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (EnvbuildError, NotPlainFileError):
            raise
        except _TooSlowError as error:
            raise NetworkError(
                f"the {self._wording.noun} {self.address} is too slow to {doing}",
                why=f"It was not whole after {error} s.",
                fix=f"Look at the network and the service, and run the same command again.{self._wording.otherwise}",
            ) from error
        except FileNotFoundError as error:
            raise self._failed(doing, str(error), not_found=True) from error
        except (BaseError, ValueError, OSError) as error:
            raise self._failed(doing, str(error)) from error

    def _endless(self, count: int) -> NetworkError:
        return NetworkError(
            f"the {self._wording.noun} {self._address} does not end its list of objects",
            why=f"It has sent {count} names, and there are more.",
            fix="Have its administrators look, or use another prefix: a store has far fewer objects."
            f"{self._wording.otherwise}",
        )

    def _failed(self, doing: str, text: str, *, not_found: bool = False) -> NetworkError:
        """The error for what obstore says; its own text may quote the request, and is not shown."""
        status = match[1] if (match := _STATUS.search(text)) else ""
        code = _code(text)
        # Where nothing else is named, it is the bucket: what may be missing in it is asked for by other methods.
        if (not_found or status == "404") and code in ("", "NoSuchBucket"):
            return self._missing()
        kind = match[1] if (match := _KIND.search(text)) else ""
        if status:
            why = (
                f"It answered with status {status}{code and f' ({code})'}, as {self._account}; status 429 and 5xx "
                f"after {RETRIES} retries."
            )
        else:
            why = f"There was no answer ({kind or 'no connection'}), after {RETRIES} retries."
        place = (
            "Check the bucket's name, the endpoint (AWS_ENDPOINT_URL, or endpoint under [stores.NAME]), the network."
        )
        name = f"the {self._wording.noun} {self.address}"
        return NetworkError(
            f"{name} refuses to {doing}" if status else f"{name} cannot {doing}",
            why=why,
            fix=_FIXES.get(code, _FIXES.get(status, place)).format(account=self._account) + self._wording.otherwise,
        )

    def _missing(self) -> NetworkError:
        return NetworkError(
            f"the {self._wording.noun} {self.address} does not exist",
            why=f"There is no bucket {self._address.host}.",
            fix=f"Correct the address, or make the bucket.{self._wording.otherwise}",
        )


def _code(text: str) -> str:
    """The word for the error in an answer of S3's; empty where there is none."""
    match = _CODE.search(text)
    return match[1] if match else ""


class _TooSlowError(Exception):
    pass


def wait_for(action: Callable[[], T], seconds: float | None = None, limit: float | None = None) -> T:
    """The result of a call into obstore, which hears of no signal until it is done: Ctrl-C ends the waiting here.

    Args:
        seconds: how long it may take.
        limit: which limit that is what is left of.
    """
    seconds = ANSWER_SECONDS if seconds is None else seconds
    try:
        return run_in_background(action).result(timeout=seconds)
    except FutureTimeoutError:
        raise _TooSlowError(f"{limit or seconds:.0f}") from None


def open_bucket(
    address: Address, endpoint: str | None, ca_bundle: Path | None, environ: Mapping[str, str], wording: Wording
) -> Bucket:
    """The bucket at an address; nothing is asked of it yet.

    Raises:
        MachineError: obstore is not there for this machine.
        NetworkError: what it was configured with cannot be used.
    """
    try:
        from obstore.store import GCSStore, S3Store
    except ImportError as error:
        raise MachineError(
            f"the store {address} needs obstore, which cannot be imported",
            why=str(error),
            fix="Install envbuild with its dependencies again.",
        ) from error
    url = endpoint or ""
    if address.scheme == "s3":
        url = url or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=READ_SECONDS),
        # Of a whole request; large files take their time, and a stalled one ends by the read timeout.
        # object_store ends each request after 30 s by default.
        "timeout": timedelta(days=1),
        "allow_http": url.startswith("http://"),
    }
    if ca_bundle is not None:
        client["root_certificate"] = ca_bundle.read_bytes()
    retry: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    options: dict[str, Any] = {"client_options": client, "retry_config": retry, "prefix": address.path or None}
    store: S3Store | GCSStore
    try:
        if address.scheme == "gs":
            account = environ.get("GOOGLE_APPLICATION_CREDENTIALS", "Google's default credentials")
            options |= {"base_url": url} if url else {}
            store = GCSStore(address.host, **options)
        elif address.scheme == "s3":
            settings, account = aws_settings(environ)
            settings |= {"endpoint": url} if url else {}
            # Sent along with each put and each part, so that the server compares what came.
            store = S3Store(address.host, checksum_algorithm="SHA256", **options, **settings)
        else:
            raise NotImplementedError(f"{address.scheme}:// has no client here")
    except Exception as error:
        raise NetworkError(
            f"the store {address} cannot be opened",
            why=str(error).splitlines()[0][:300],
            fix=f"Correct its settings and credentials.{wording.otherwise}",
        ) from error
    return Bucket(address, store, account, wording)


def aws_settings(environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """What obstore does not find by itself: the keys and region of AWS's own files; and a name for the account.

    The environment's keys, a web identity or a container's role come first; obstore takes those itself.
    """
    own = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if named := next((name for name in own if environ.get(name)), None):
        return {}, f"the account of {named}"
    profile = environ.get("AWS_PROFILE", "default")
    home = Path(environ.get("HOME") or "~").expanduser()
    keys = _section(Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials"), profile)
    config = _section(
        Path(environ.get("AWS_CONFIG_FILE") or home / ".aws/config"),
        # In this file alone, sections are called "profile NAME", but for the default one (AWS CLI user guide,
        # "Configuration and credential file settings").
        profile if profile == "default" else f"profile {profile}",
    )
    settings: dict[str, Any] = {
        "aws_access_key_id": keys.get("aws_access_key_id", ""),
        "aws_secret_access_key": keys.get("aws_secret_access_key", ""),
        "aws_session_token": keys.get("aws_session_token", ""),
        "region": "" if environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") else config.get("region", ""),
    }
    account = f"profile {profile} of AWS's credentials file" if settings["aws_access_key_id"] else "this machine's role"
    return {name: value for name, value in settings.items() if value}, account


def _section(path: Path, name: str) -> Mapping[str, str]:
    # A secret may have a % in it, which interpolation would take for a reference.
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError):
        return {}  # AWS's own tools say what is wrong with it
    return parser[name] if parser.has_section(name) else {}
