"""Speaks with an OCI registry: requests, credentials, retries, transfers that are resumed or started again.

On urllib3, which has the pool, the redirects and a retry policy that knows Retry-After; oras-py was looked at and left
out, since it neither goes on after a cut connection nor checks what it downloads, and brings requests and jsonschema.
"""

from __future__ import annotations

import contextlib
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
from envbuild.store.registry_errors import RETRIES, STORE, TRANSIENT, RegistryErrors, Wording
from envbuild.store.transfer import is_progress, receive, redirected_to, whole_body

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager
    from urllib3.util import Retry

CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
BACKOFF_SECONDS, LONGEST_WAIT_SECONDS = 0.2, 30
# For the head of an answer, all tries of a request together: longer than they take where each waits as long as it may.
HEAD_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Registry:
    """The repository at an address. Threads may share it."""

    def __init__(
        self, address: Address, ca_bundle: Path | None, environ: Mapping[str, str], wording: Wording = STORE
    ) -> None:
        from urllib3.util import Retry, Timeout

        self._address = address
        self._error = RegistryErrors(address, wording)
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
                    answer = Answer(status=response.status, headers=response.headers, body=whole_body(response))
                    break
                except HTTPError as error:
                    retries = retries.increment(method, path, error=error)
                    retries.sleep()
                finally:
                    response.close()
        if answer.status not in accept:
            elsewhere = redirected_to(response, url)
            raise self._refused(f"{method} {path}", answer.status, answer.body, elsewhere)
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
                    receive(response, out, size_bytes)
                    break
                except HTTPError as error:
                    # Each piece that came makes the rest smaller: only tries without one are counted.
                    retries = self._retries if is_progress(out.tell() - start) else retries
                    retries = retries.increment("GET", path, error=error)
                    retries.sleep()
                finally:
                    response.close()
        if response.status not in (200, 206, 404):
            raise self._refused(f"GET {path}", response.status, b"", redirected_to(response, url))
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
                            elsewhere = redirected_to(response, place)
                            raise self._refused(f"PUT {path}", response.status, whole_body(response), elsewhere)
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
            if response.status != 401 or last or not own or redirected_to(response, url):
                break
            whole_body(response)
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
            raise self._error.without_tls(realm)
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
        answer = whole_body(response)
        if response.status != 200:
            raise self._refused("GET its token", response.status, answer)
        with contextlib.suppress(ValueError, AttributeError):
            found = jsonread.foreign(answer)
            # The token specification has both names; some registries send one, some the other.
            if token := found.get("token") or found.get("access_token"):
                return str(token)
        raise self._error.no_token(realm)

    def _refused(self, request: str, status: int, body: bytes, elsewhere: str = "") -> NetworkError:
        return self._error.refused(request, status, body, self._credentials, elsewhere)

    @contextlib.contextmanager
    def _errors(self, method: str, path: str) -> Iterator[None]:
        from urllib3.exceptions import HTTPError

        try:
            yield
        except EnvbuildError:
            raise
        except HTTPError as error:
            raise self._error.unreachable(f"{method} {path}", error) from error


def _basic(credentials: Credentials) -> str:
    from urllib3.util import make_headers

    return make_headers(basic_auth=f"{credentials.user}:{credentials.secret}")["authorization"]
