"""Fetches what an index serves: with uv's credentials, the site's CA bundle, and limits of bytes and time."""

from __future__ import annotations

import email.message
import email.utils
import http.client
import io
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import IO

from envbuild.catalog.site import Site
from envbuild.core.errors import NetworkError
from envbuild.core.exit_status import mask
from envbuild.lock.uv.credentials import request_for

_BUSY = frozenset([429, 502, 503, 504])
MOST_TRIES = 5
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FetchLimits:
    """How much is waited for and read of one answer, tries again included.

    Attributes:
        idle_seconds: the longest wait for the next bytes.
    """

    most_bytes: int
    seconds: float
    idle_seconds: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came.

    Attributes:
        url: where it came from, after redirects.
        content_range: which part it is, as the header of that name states it; empty: all of it.
    """

    url: str
    content_type: str
    body: bytes
    content_range: str = ""


class GoneError(NetworkError):
    """The server has nothing at this address."""


def fetch(
    url: str,
    title: str,
    site: Site,
    limits: FetchLimits,
    *,
    accept: str = "*/*",
    byte_range: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Fetch ``url``; a server that is busy is asked again when it says so.

    Args:
        title: what it is, for messages.
        byte_range: the part that is enough (``0-99``, ``-100``); empty: all of it.

    Raises:
        GoneError: the server answers 404 or 410.
        NetworkError: it cannot be had within the limits.
    """
    deadline = time.monotonic() + limits.seconds
    headers = {"Accept": accept, **({"Range": f"bytes={byte_range}"} if byte_range else {})}
    try:
        for attempt in range(1, MOST_TRIES):
            answer = _fetched_or_busy(url, site, limits, deadline, headers)
            if isinstance(answer, Answer):
                return answer
            wait = _seconds_to_wait(answer.headers, attempt)
            if time.monotonic() + wait > deadline:
                raise answer
            sleep(wait)
        return _fetched(url, site, limits, deadline, headers)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise (GoneError if _is_gone(error) else NetworkError)(
            f"cannot download {title}",
            why=f"{mask(url)}: {_words(error)}",
            fix="Check the network, the proxy and the CA bundle (SSL_CERT_FILE), then run again. Where the index asks "
            "for a password: its URL, UV_INDEX_NAME_USERNAME and UV_INDEX_NAME_PASSWORD, or a netrc file have it.",
        ) from error


def _is_gone(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (404, 410)
    return isinstance(getattr(error, "reason", None), FileNotFoundError)


def _words(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        busy = f", and {MOST_TRIES} tries or the time for them are over" if error.code in _BUSY else ""
        return f"HTTP {error.code} {error.reason}{busy}"
    return str(getattr(error, "reason", error))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, with the credentials of the host that is asked next."""

    def __init__(self, named: Mapping[str, str]) -> None:
        self._named = named

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is None:
            return None
        own = request_for(request.full_url, named=self._named)
        own.headers.update(request.headers)
        return own


def _fetched_or_busy(
    url: str, site: Site, limits: FetchLimits, deadline: float, headers: Mapping[str, str]
) -> Answer | urllib.error.HTTPError:
    try:
        return _fetched(url, site, limits, deadline, headers)
    except urllib.error.HTTPError as error:
        if error.code in _BUSY:
            return error
        raise


def _fetched(url: str, site: Site, limits: FetchLimits, deadline: float, headers: Mapping[str, str]) -> Answer:
    bundle = site.ca_bundle
    trust = ssl.create_default_context(cafile=str(bundle)) if bundle else None
    opener = urllib.request.build_opener(_Redirects(site.indexes), urllib.request.HTTPSHandler(context=trust))
    request = request_for(url, named=site.indexes)
    request.headers.update(headers)
    remaining = max(deadline - time.monotonic(), 0.1)
    with opener.open(request, timeout=min(limits.idle_seconds, remaining)) as answer:
        # None: a file. A success without the content, or with a part of it, is no answer to the question.
        asked = {None, HTTPStatus.OK, *([HTTPStatus.PARTIAL_CONTENT] if "Range" in headers else [])}
        if answer.status not in asked:
            raise OSError(f"HTTP {answer.status} {answer.reason}")
        body = io.BytesIO()
        # read1: what is there, so that a server that sends a byte a second does not pass the limit of time.
        while chunk := answer.read1(_CHUNK) if hasattr(answer, "read1") else answer.read(_CHUNK):
            body.write(chunk)
            if body.tell() > limits.most_bytes:
                raise OSError(f"the answer has more than {limits.most_bytes} bytes")
            if time.monotonic() > deadline:
                raise OSError(f"the answer did not end within {limits.seconds:g} seconds")
        length = answer.headers.get("Content-Length", "")
        # read() notices an answer that is cut off, read1() does not.
        if length.isdigit() and body.tell() < int(length):
            raise http.client.IncompleteRead(body.getvalue(), int(length) - body.tell())
        return Answer(
            url=answer.geturl(),
            content_type=answer.headers.get_content_type(),
            body=body.getvalue(),
            content_range=answer.headers.get("Content-Range", ""),
        )


def _seconds_to_wait(headers: email.message.Message, attempt: int) -> float:
    """What Retry-After says (RFC 9110, section 10.2.3), else a little longer each time."""
    text = headers.get("Retry-After", "") if headers else ""
    if text.strip().isdigit():
        return float(text)
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return float(2 ** (attempt - 1))
