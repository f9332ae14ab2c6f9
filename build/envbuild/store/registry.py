"""Speaks with an OCI registry: requests, credentials, retries, transfers that are resumed or started again.

On urllib3, which has the pool, the redirects and a retry policy that knows Retry-After; oras-py was looked at and left
out, since it neither goes on after a cut connection nor checks what it downloads, and brings requests and jsonschema.
"""

from __future__ import annotations

import contextlib
import errno
import io
import re
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from envbuild import __version__
from envbuild.core import jsonread
from envbuild.core.background import run_in_background
from envbuild.core.errors import EnvbuildError, NetworkError
from envbuild.core.files import machine_errors
from envbuild.store.address import Address, is_loopback
from envbuild.store.docker_config import Credentials, credentials_for

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager
    from urllib3.util import Retry

CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
RETRIES = 5
BACKOFF_SECONDS, LONGEST_WAIT_SECONDS = 0.2, 30
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
CHUNK_BYTES = 1 << 20
# The least that must come, as curl's --speed-limit and --speed-time: a peer that trickles would hold a build for ever.
LEAST_BYTES_A_SECOND, SLOW_SECONDS = 1024, 30.0
# For the head of an answer, all tries of a request together: longer than they take where each waits as long as it may.
HEAD_SECONDS = 600.0
# Manifests, lists of tags, errors: what is longer is none.
MOST_ANSWER_BYTES = 64 << 20
MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How errors speak of a registry.

    Attributes:
        noun: what it is to those who read them.
        otherwise: how to go on without it.
    """

    noun: str
    otherwise: str = ""


STORE = Wording(noun="store", otherwise=" ENVBUILD_STORE=off goes on without it.")


class Registry:
    """The repository at an address. Threads may share it."""

    def __init__(
        self, address: Address, ca_bundle: Path | None, environ: Mapping[str, str], wording: Wording = STORE
    ) -> None:
        from urllib3.util import Retry, Timeout

        self._address = address
        self._noun, self._otherwise = wording.noun, wording.otherwise
        self._environ = environ
        self._ca_bundle = ca_bundle
        self._top = f"{'http' if address.is_loopback else 'https'}://{address.host}/v2/{address.path}/"
        self._timeout = Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
        self._retries = Retry(
            total=RETRIES,
            backoff_factor=BACKOFF_SECONDS,
            backoff_max=LONGEST_WAIT_SECONDS,
            retry_after_max=LONGEST_WAIT_SECONDS,
            status_forcelist=TRANSIENT,
            # All methods: urllib3 sends POST again only if told to, and uploads begin with one. What is sent twice has
            # one digest.
            allowed_methods=None,
            raise_on_status=False,
        )
        self._lock = threading.Lock()
        self._pools: dict[str, PoolManager] = {}
        self._authorization = ""
        self._credentials: Credentials | None = None

    def ask(
        self,
        method: str,
        path: str,
        *,
        accept: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """Send a request about the repository, and again where that may help.

        Raises:
            NetworkError: there is no answer, or one whose status is not in ``accept``.
        """
        from urllib3.exceptions import HTTPError

        retries, url = self._retries, self._top + path
        with self._errors(method, path):
            while True:
                response = self._send(method, url, headers or {}, body, self._retries)
                try:
                    answer = Answer(status=response.status, headers=response.headers, body=_body(response))
                    break
                except HTTPError as error:
                    retries = retries.increment(method, path, error=error)
                    retries.sleep()
                finally:
                    response.close()
        if answer.status not in accept:
            raise self._refused(method, path, answer.status, answer.body, _redirected(response, url))
        return answer

    def download(self, path: str, size_bytes: int, to: Path, headers: Mapping[str, str] | None = None) -> bool:
        """Write what is at a path to a file, going on where a connection was cut; False when nothing is there.

        Not more than one chunk beyond ``size_bytes`` is taken. What came is for the caller to check.
        """
        from urllib3.exceptions import HTTPError

        retries, url = self._retries, self._top + path
        with self._errors("GET", path), machine_errors(to), to.open("wb") as out:
            while True:
                start = out.tell()
                range_headers = {**(headers or {}), **({"Range": f"bytes={start}-"} if start else {})}
                response = self._send("GET", url, range_headers, None, self._retries)
                try:
                    if response.status not in (200, 206):
                        break
                    if response.status == 200 and start:  # it does not know of ranges
                        out.seek(0)
                        out.truncate()
                    _receive(response, out, size_bytes)
                    break
                except HTTPError as error:
                    # Each piece that came makes the rest smaller: only tries without one are counted.
                    retries = self._retries if out.tell() - start >= LEAST_BYTES_A_SECOND * SLOW_SECONDS else retries
                    retries = retries.increment("GET", path, error=error)
                    retries.sleep()
                finally:
                    response.close()
        if response.status not in (200, 206, 404):
            raise self._refused("GET", path, response.status, b"", _redirected(response, url))
        return response.status != 404

    def upload(self, path: str, query: Mapping[str, str], file: Path, size_bytes: int) -> None:
        """Send a file to the upload that a request to ``path`` opens; a transfer that was cut is started again."""
        from urllib3.exceptions import HTTPError

        retries = self._retries
        # Of the transfer itself: what it is sent to may be gone after a failure.
        once = self._retries.new(total=None, connect=0, read=0, status=0, other=0, redirect=5)
        with self._errors("PUT", path):
            while True:
                # OCI distribution-spec 1.1, "POST then PUT". The Location may be relative and may have a query.
                opened = self.ask("POST", path, accept=(202,), headers={"Content-Length": "0"})
                place = urllib.parse.urljoin(self._top + path, opened.headers.get("Location", ""))
                place += ("&" if "?" in place else "?") + urllib.parse.urlencode(query)
                headers = {"Content-Length": str(size_bytes), "Content-Type": "application/octet-stream"}
                failure: HTTPError | None = None
                response: BaseHTTPResponse | None = None
                with file.open("rb") as body:
                    try:
                        response = self._send("PUT", place, headers, body, once)
                        if response.status == 201:
                            return
                        # 404: the registry has forgotten the upload (BLOB_UPLOAD_UNKNOWN).
                        if response.status not in TRANSIENT | {404}:
                            raise self._refused(
                                "PUT", path, response.status, _body(response), _redirected(response, place)
                            )
                    except HTTPError as error:
                        failure = error
                retries = retries.increment("PUT", path, response=response, error=failure)
                retries.sleep(response)

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | IO[bytes] | None,
        retries: Retry,
    ) -> BaseHTTPResponse:
        """One request, sent again with credentials when the registry asks for them; its body is not read yet."""
        sent = {"User-Agent": f"envbuild/{__version__}", **headers}
        # Blobs often come from signed addresses of object stores, which refuse a second kind of authorization.
        own = self._is_own(url)
        for last in (False, True):
            if own and self._authorization:
                sent["Authorization"] = self._authorization
            response = self._request(method, url, sent, body, retries)
            # Credentials are for the registry, whatever a place that it redirects to asks for.
            if response.status != 401 or last or not own or _redirected(response, url):
                break
            _body(response)
            self._authorize(response.headers.get("WWW-Authenticate", ""), sent.get("Authorization", ""))
            if body is not None and not isinstance(body, bytes):
                body.seek(0)
        return response

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None, retries: Retry
    ) -> BaseHTTPResponse:
        """A request and the head of its answer, which a peer that trickles must not hold for ever."""
        from urllib3.exceptions import HTTPError

        def request() -> BaseHTTPResponse:
            return self._pool(url).request(
                method,
                url,
                body=body,
                headers=headers,
                retries=retries,
                timeout=self._timeout,
                preload_content=False,
                # Digests and sizes are those of the bytes as they are sent.
                decode_content=False,
            )

        if body is not None and not isinstance(body, bytes):
            return request()  # a file takes its time
        try:
            return run_in_background(request).result(timeout=HEAD_SECONDS)
        except FutureTimeoutError:
            raise HTTPError(f"no answer within {HEAD_SECONDS:.0f} s") from None

    def _is_own(self, url: str) -> bool:
        """Whether credentials may go there: only to the registry itself."""
        return urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(self._top)[:2]

    def _pool(self, url: str) -> PoolManager:
        from urllib3 import PoolManager, ProxyManager

        parts = urllib.parse.urlsplit(url)
        # urllib3 does not read HTTPS_PROXY and NO_PROXY; the standard library does.
        proxy = "" if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme, "")
        with self._lock:
            if proxy not in self._pools:
                # What cannot be reached through TLS that is trusted, is not reached.
                trust = str(self._ca_bundle) if self._ca_bundle else None
                self._pools[proxy] = (
                    ProxyManager(proxy, maxsize=8, ca_certs=trust) if proxy else PoolManager(maxsize=8, ca_certs=trust)
                )
            return self._pools[proxy]

    def _authorize(self, challenge: str, refused: str) -> None:
        """Find what the registry's challenge asks for (RFC 7235; the distribution project's token specification)."""
        scheme, _, rest = challenge.partition(" ")
        challenged = urllib.request.parse_keqv_list(urllib.request.parse_http_list(rest)) if "=" in rest else {}
        credentials = credentials_for(self._address.host, self._environ)
        self._credentials = credentials
        if scheme.lower() == "bearer" and challenged.get("realm"):
            found = f"Bearer {self._token(challenged, credentials)}"
        elif scheme.lower() == "basic" and credentials is not None:
            found = _basic(credentials)
        else:
            found = ""
        # The same again would be refused again.
        self._authorization = "" if found == refused else found

    def _token(self, challenge: Mapping[str, str], credentials: Credentials | None) -> str:
        realm = urllib.parse.urlsplit(challenge["realm"])
        if realm.scheme != "https" and not (realm.scheme == "http" and is_loopback(realm.hostname or "")):
            raise NetworkError(
                f"the {self._noun} {self._address} asks for credentials at a place without TLS",
                why=f"Its tokens come from {realm.scheme}://{realm.netloc}.",
                fix="Nothing was sent there. Have the registry's administrators name a place with https.",
            )
        fields = {name: challenge[name] for name in ("service", "scope") if challenge.get(name)}
        url, headers, method, body = realm.geturl(), {}, "GET", None
        if credentials is not None and credentials.identity_token:
            fields |= {"grant_type": "refresh_token", "client_id": "envbuild", "refresh_token": credentials.secret}
            method, body = "POST", urllib.parse.urlencode(fields).encode()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        else:
            url += ("&" if realm.query else "?") + urllib.parse.urlencode(fields)
            headers |= {"Authorization": _basic(credentials)} if credentials else {}
        response = self._request(method, url, headers, body, self._retries)
        answer = _body(response)
        if response.status != 200:
            raise self._refused("GET", "its token", response.status, answer)
        with contextlib.suppress(ValueError, AttributeError):
            found = jsonread.foreign(answer)
            # The token specification has both names; some registries send one, some the other.
            if token := found.get("token") or found.get("access_token"):
                return str(token)
        raise NetworkError(
            f"the {self._noun} {self._address} gives no token",
            why=f"The answer of {realm.netloc} has none in it.",
            fix=f"Its administrators have to look at it.{self._otherwise}",
        )

    @contextlib.contextmanager
    def _errors(self, method: str, path: str) -> Iterator[None]:
        from urllib3.exceptions import HTTPError

        try:
            yield
        except EnvbuildError:
            raise
        except HTTPError as error:
            cause = getattr(error, "reason", None) or error
            # Without the object's address, which urllib3's texts begin with.
            text = re.sub(r"<[^>]*object at 0x[0-9a-f]+>:? ?", "", str(cause))[:MESSAGE_CHARACTERS]
            raise NetworkError(
                f"the {self._noun} {self._address} cannot be reached",
                why=f"{method} {path}: {text}; tried {RETRIES + 1} times.",
                fix="Check the address, the network and the proxy. Run the same command again: what was transferred "
                f"whole is kept.{self._otherwise}",
            ) from error

    def _refused(self, method: str, path: str, status: int, body: bytes, elsewhere: str = "") -> NetworkError:
        tried = f", tried {RETRIES + 1} times" if status in TRANSIENT else ""
        detail = f" Its message: {message}" if (message := _message(body)) else ""
        if elsewhere:
            return NetworkError(
                f"{elsewhere}, to which the {self._noun} {self._address} redirects, refuses: status {status}",
                why=f"{method} {path} was redirected there{tried}.{detail} The registry itself allowed it.",
                fix="Such an address is signed for some minutes: check this machine's clock, and whether network and "
                f"proxy let {elsewhere} through; then run the same command again.{self._otherwise}",
            )
        account = (
            f"as {self._credentials.user} (from {self._credentials.source})" if self._credentials else "without a name"
        )
        host = self._address.host
        login = f"Log in: docker login {host} (or podman, skopeo, oras: their files are read)."
        fixes = {
            401: login if self._credentials is None else f"The credentials are refused; {login[0].lower()}{login[1:]}",
            403: f"Give the account the right to this repository, or use another one. {login}",
            404: "Correct the address of the repository; some registries want it made first.",
            429: "It is overloaded, or its limit is used up: run the same command again later.",
        }
        return NetworkError(
            f"the {self._noun} {self._address} refuses: status {status}",
            why=f"{method} {path}, {account}{tried}.{detail}",
            fix=f"{fixes.get(status, 'Run the same command again later.')}{self._otherwise}",
        )


def _receive(response: BaseHTTPResponse, out: IO[bytes], size_bytes: int) -> None:
    """Write a body to a file, up to one chunk more than ``size_bytes``; ProtocolError where it comes too slowly."""
    from urllib3.exceptions import HTTPError, ProtocolError

    count, over, slow = 0, threading.Event(), threading.Event()

    # The read timeout of a socket starts again with each byte. shutdown() ends a read that another thread waits in.
    def watch() -> None:
        seen = 0
        while not over.wait(SLOW_SECONDS):
            if count - seen < LEAST_BYTES_A_SECOND * SLOW_SECONDS:
                slow.set()
                with contextlib.suppress(ValueError, RuntimeError, OSError):
                    response.shutdown()
                return
            seen = count

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        # read1 returns what has come, so the count grows also where a whole chunk takes long.
        while chunk := response.read1(CHUNK_BYTES):
            out.write(chunk)
            count += len(chunk)
            if out.tell() > size_bytes:
                return
    except (HTTPError, OSError) as error:
        if not slow.is_set() or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            raise
    finally:
        over.set()
        watcher.join()
    if slow.is_set():
        raise ProtocolError(f"less than {LEAST_BYTES_A_SECOND} bytes a second for {SLOW_SECONDS:.0f} s")


def _body(response: BaseHTTPResponse) -> bytes:
    """The whole body of an answer that is no file."""
    body = io.BytesIO()
    _receive(response, body, MOST_ANSWER_BYTES)
    return body.getvalue()


def _redirected(response: BaseHTTPResponse, url: str) -> str:
    """The host that answered, where that is another one than was asked."""
    host = urllib.parse.urlsplit(url).netloc
    for step in response.retries.history if response.retries else ():
        url = urllib.parse.urljoin(url, step.redirect_location or "")
    answered = urllib.parse.urlsplit(url).netloc
    return "" if answered == host else answered


def _basic(credentials: Credentials) -> str:
    from urllib3.util import make_headers

    return make_headers(basic_auth=f"{credentials.user}:{credentials.secret}")["authorization"]


def _message(body: bytes) -> str:
    """What a registry reports of an error (OCI distribution-spec, "Error Codes"), on one line."""
    try:
        errors = jsonread.foreign(body)["errors"]
        text = "; ".join(str(error.get("message") or error.get("code")) for error in errors)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text)[:MESSAGE_CHARACTERS]
