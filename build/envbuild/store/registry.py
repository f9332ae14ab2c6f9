"""Speaks with an OCI registry: requests, credentials, retries, downloads that are resumed.

On urllib3, which has the pool, the redirects and a retry policy that knows Retry-After; oras-py was looked at and left
out, since it neither goes on after a cut connection nor checks what it downloads, and brings requests and jsonschema.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
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
from envbuild.store.transfer import CHUNK_BYTES, is_progress, longest_seconds, receive, redirected_to, whole_body

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager
    from urllib3.util import Retry


class Pools:
    """A pool of connections for each proxy; threads may share it."""

    def __init__(self, ca_bundle: Path | None) -> None:
        self._ca_bundle = ca_bundle
        self._lock = threading.Lock()
        self._pools: dict[str, PoolManager] = {}

    def pool(self, url: str) -> PoolManager:
        """The pool for an address: there is one for each proxy that the environment names."""
        from urllib3 import PoolManager, ProxyManager

        parts = urllib.parse.urlsplit(url)
        # urllib3 does not read HTTPS_PROXY and NO_PROXY; the standard library does.
        proxy = "" if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme, "")
        with self._lock:
            if proxy not in self._pools:
                # What cannot be reached through TLS that is trusted, is not reached.
                trust = str(self._ca_bundle) if self._ca_bundle else None
                # blocksize: a file goes out in pieces of 16 kB otherwise, which takes twice the time on a fast network.
                make = functools.partial(ProxyManager, proxy) if proxy else PoolManager
                self._pools[proxy] = make(maxsize=8, ca_certs=trust, blocksize=CHUNK_BYTES)
            return self._pools[proxy]


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
        self,
        address: Address,
        ca_bundle: Path | None,
        environ: Mapping[str, str],
        wording: Wording = STORE,
        *,
        also_read: Sequence[str] = (),
    ) -> None:
        """``also_read``: other repositories of the registry that tokens are asked for, to mount blobs from them."""
        from urllib3.util import Retry, Timeout

        self.address = address
        self._also_read = tuple(f"repository:{name}:pull" for name in also_read)
        self.error = RegistryErrors(address, wording)
        self._environ = environ
        self._top = f"{'http' if address.is_loopback else 'https'}://{address.host}/v2/{address.path}/"
        self._timeout = Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
        self.retries = Retry(
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
        # Only a registry on loopback may have none; whether it has TLS, its first answer shows.
        self._answered = self._top.startswith("https:")
        self._lock = threading.Lock()
        self._pools = Pools(ca_bundle)
        self._authorization = ""
        self._credentials: Credentials | None = None

    def url(self, path: str) -> str:
        """Where a path of the repository is."""
        return self._top + path

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

        retries, url, deadline = self.retries, self.url(path), time.monotonic() + HEAD_SECONDS
        with self.errors(method, path):
            while True:
                response = self.send(method, url, headers or {}, body, self.retries)
                try:
                    answer = Answer(status=response.status, headers=response.headers, body=whole_body(response))
                    break
                except HTTPError as error:
                    if time.monotonic() > deadline:
                        raise
                    retries = retries.increment(method, path, error=error)
                    retries.sleep()
                finally:
                    response.close()
        if answer.status not in accept:
            elsewhere = redirected_to(response, url)
            raise self.refused(f"{method} {path}", answer.status, answer.body, elsewhere)
        return answer

    def download(
        self, path: str, size_bytes: int, to: Path, headers: Mapping[str, str] | None = None, start: int = 0
    ) -> bool:
        """Write what is at a path to a file, going on where a connection was cut; False when nothing is there.

        With ``start``, so many bytes are in the file already, and what follows is appended. Not more than one chunk
        beyond ``size_bytes`` is taken. What came is for the caller to check.

        Raises:
            NetworkError: there is no answer, another one, or it takes too long.
        """
        from urllib3.exceptions import HTTPError

        retries, url, limit = self.retries, self.url(path), longest_seconds(size_bytes)
        deadline = time.monotonic() + limit
        with self.errors("GET", path), machine_errors(to), to.open("ab" if start else "wb") as out:
            while True:
                start = out.tell()
                range_headers = {**(headers or {}), **({"Range": f"bytes={start}-"} if start else {})}
                response = self.send("GET", url, range_headers, None, self.retries)
                try:
                    if response.status not in (200, 206):
                        break
                    if response.status == 200 and start:  # it does not know of ranges
                        out.seek(0)
                        out.truncate()
                    receive(response, out, size_bytes, max(0.0, deadline - time.monotonic()))
                    break
                except HTTPError as error:
                    # A range from the end on is answered with 416 (RFC 9110, 15.5.17).
                    if out.tell() == size_bytes:
                        break
                    if time.monotonic() >= deadline:
                        raise self.error.too_slow(f"GET {path}", out.tell(), size_bytes, limit) from error
                    # Each piece that came makes the rest smaller: only tries without one are counted.
                    retries = self.retries if is_progress(out.tell() - start) else retries
                    retries = retries.increment("GET", path, error=error)
                    retries.sleep()
                finally:
                    response.close()
        if response.status not in (200, 206, 404):
            raise self.refused(f"GET {path}", response.status, b"", redirected_to(response, url))
        return response.status != 404

    def read(self, path: str, at_most_bytes: int, headers: Mapping[str, str] | None = None) -> bytes | None:
        """What is at a path, as a download, which is resumed and bounded by a size; None when nothing is there."""
        with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
            file = Path(folder) / "document"
            there = self.download(path, at_most_bytes, file, headers)
            with machine_errors(file, "read"):
                return file.read_bytes() if there else None

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | IO[bytes] | None,
        retries: Retry,
    ) -> BaseHTTPResponse:
        """One request, sent again with credentials when the registry asks for them; its body is not read yet.

        Raises:
            urllib3.exceptions.HTTPError: there is no answer; see :meth:`errors`.
        """
        sent = {"User-Agent": f"envbuild/{__version__}", **headers}
        if method != "GET" and not self._answered and self._is_own(url):
            # To what has a body a server with TLS hangs up, and to HEAD it says nothing.
            with self._lock:
                if not self._answered:
                    whole_body(self.send("GET", f"{self._top.partition('/v2/')[0]}/v2/", {}, None, retries))
        url = self._secured(url)
        # Blobs often come from signed addresses of object stores, which refuse a second kind of authorization.
        own = self._is_own(url)
        for last in (False, True):
            if own and self._authorization:
                sent["Authorization"] = self._authorization
            response = self._request(method, url, sent, body, retries)
            if own and self._wants_tls(url, response):
                url = self._secured(url)
                response = self._request(method, url, sent, body, retries)
            self._answered = True
            # Credentials are for the registry, whatever a place that it redirects to asks for.
            if response.status != 401 or last or not own or redirected_to(response, url):
                break
            whole_body(response)
            self._authorize(response.headers.get("WWW-Authenticate", ""), sent.get("Authorization", ""))
            if body is not None and not isinstance(body, bytes):
                body.seek(0)
        return response

    def _secured(self, url: str) -> str:
        """An address of the registry as it is, where its TLS was found after the address was made."""
        plain = f"http{self._top.removeprefix('https')}"
        return f"https{url.removeprefix('http')}" if self._top != plain and url.startswith(plain) else url

    def _wants_tls(self, url: str, response: BaseHTTPResponse) -> bool:
        """Whether a registry on loopback, which is asked without TLS first, has TLS; it is asked so from then on."""
        # Go's server, and so docker's registry, says so in the clear (net/http, server.go); nginx does in other words.
        if not url.startswith("http:") or response.status != 400 or b"HTTPS" not in whole_body(response):
            return False
        self._top = f"https:{self._top.partition(':')[2]}"
        return True

    def _request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None, retries: Retry
    ) -> BaseHTTPResponse:
        """A request and the head of its answer, which a peer that trickles must not hold for ever."""
        from urllib3.exceptions import HTTPError

        def request() -> BaseHTTPResponse:
            return self._pools.pool(url).request(
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

        # A file takes its time.
        is_file = body is not None and not isinstance(body, bytes)
        limit = HEAD_SECONDS + (longest_seconds(int(headers.get("Content-Length", 0))) if is_file else 0.0)
        try:
            return run_in_background(request).result(timeout=limit)
        except FutureTimeoutError:
            raise HTTPError(f"no answer within {limit:.0f} s") from None

    def _is_own(self, url: str) -> bool:
        """Whether credentials may go there: only to the registry itself."""
        return urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(self._top)[:2]

    def _authorize(self, challenge: str, refused: str) -> None:
        """Find what the registry's challenge asks for (RFC 7235; the distribution project's token specification)."""
        scheme, _, rest = challenge.partition(" ")
        challenged = urllib.request.parse_keqv_list(urllib.request.parse_http_list(rest)) if "=" in rest else {}
        credentials = credentials_for(self.address.host, self._environ, self.address.path)
        self._credentials = credentials
        if scheme.lower() == "bearer" and challenged.get("realm"):
            header = f"Bearer {self._token(challenged, credentials)}"
        elif scheme.lower() == "basic" and credentials is not None:
            header = credentials.basic
        else:
            header = ""
        # The same again would be refused again.
        self._authorization = "" if header == refused else header

    def _token(self, challenge: Mapping[str, str], credentials: Credentials | None) -> str:
        realm = urllib.parse.urlsplit(challenge["realm"])
        if realm.scheme != "https" and not (realm.scheme == "http" and is_loopback(realm.hostname or "")):
            raise self.error.without_tls(realm)
        fields = {name: challenge[name] for name in ("service", "scope") if challenge.get(name)}
        if "scope" in fields:  # several are separated by spaces (RFC 6749, 3.3)
            fields["scope"] = " ".join(dict.fromkeys([*fields["scope"].split(), *self._also_read]))
        url, headers, method, body = realm.geturl(), {}, "GET", None
        if credentials is not None and credentials.identity_token:
            fields |= {"grant_type": "refresh_token", "client_id": "envbuild", "refresh_token": credentials.secret}
            method, body = "POST", urllib.parse.urlencode(fields).encode()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        else:
            url += ("&" if realm.query else "?") + urllib.parse.urlencode(fields)
            headers |= {"Authorization": credentials.basic} if credentials else {}
        response = self._request(method, url, headers, body, self.retries)
        answer = whole_body(response)
        if response.status != 200:
            raise self.refused("GET its token", response.status, answer)
        with contextlib.suppress(ValueError, AttributeError):
            document = jsonread.foreign(answer)
            # The token specification has both names; some registries send one, some the other.
            if token := document.get("token") or document.get("access_token"):
                return str(token)
        raise self.error.no_token(realm)

    def refused(self, request: str, status: int, body: bytes, elsewhere: str = "") -> NetworkError:
        """The error for an answer of the registry."""
        return self.error.refused(request, status, body, self._credentials, elsewhere)

    @contextlib.contextmanager
    def errors(self, method: str, path: str) -> Iterator[None]:
        """Turn what urllib3 raises into errors of envbuild."""
        from urllib3.exceptions import HTTPError

        try:
            yield
        except EnvbuildError:
            raise
        except HTTPError as error:
            raise self.error.unreachable(f"{method} {path}", error) from error
