"""The files that a page of a package index lists: PEP 691 (JSON), PEP 503 (HTML), or a page of find-links."""

from __future__ import annotations

import json
import posixpath
import re
import urllib.parse
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.catalog.site import Site
from envbuild.core.errors import NetworkError
from envbuild.core.exit_status import mask
from envbuild.lock.uv.fetch import Answer, FetchLimits, fetch

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1, */*;q=0.01"
_SHA256 = re.compile(r"sha256=([0-9a-f]{64})")
# The longest pages of the public index have some 10 MB.
PAGE_LIMITS = FetchLimits(most_bytes=64 << 20, seconds=120, idle_seconds=30)


@dataclass(frozen=True, kw_only=True)
class ListedFile:
    """A file as a page lists it.

    Attributes:
        sha256: ``sha256:...``; empty where the page states none.
        yanked: why it was yanked (PEP 592), which may be empty; None: it was not.
    """

    name: str
    url: str
    sha256: str = ""
    yanked: str | None = None


def project_url(index: str, package: str) -> str:
    """The page of a package on an index."""
    if "://" not in index:
        index = Path(index).absolute().as_uri()
    page = f"{index.rstrip('/')}/{canonicalize_name(package)}/"
    # A folder has no server that takes its page for it.
    return f"{page}index.html" if page.startswith("file:") else page


def listed_files(url: str, site: Site, limits: FetchLimits = PAGE_LIMITS) -> list[ListedFile]:
    """The files that the page at ``url`` lists.

    Raises:
        GoneError: there is no such page.
        NetworkError: it cannot be had, or is no page of an index.
    """
    answer = fetch(url, f"the index page {mask(url)}", site, limits, accept=_ACCEPT)
    try:
        return parse_page(answer)
    except (ValueError, RecursionError) as error:
        raise NetworkError(
            f"the answer for {mask(url)} is not a page of a package index",
            why=f"It is of the kind {answer.content_type}: {error}",
            fix="Correct the address of the index (UV_DEFAULT_INDEX, uv.toml, [indexes] of the configuration file).",
        ) from error


def parse_page(answer: Answer) -> list[ListedFile]:
    """The files of a page.

    Raises:
        ValueError: it has another form.
    """
    if answer.content_type.endswith("json"):
        return _from_json(json.loads(answer.body), answer.url)
    page = _Links(answer.url)
    page.feed(answer.body.decode(errors="replace"))
    page.close()
    return page.files


def _from_json(document: Any, url: str) -> list[ListedFile]:
    try:
        files: list[Any] = [*document["files"]]
    except (TypeError, KeyError) as error:
        raise ValueError("it has no list of files") from error
    listed = []
    for file in files:
        if not isinstance(file, dict) or not all(isinstance(file.get(key), str) for key in ("filename", "url")):
            raise ValueError("a file has no name or no address")
        hashes = file.get("hashes")
        digest = hashes.get("sha256") if isinstance(hashes, dict) else None
        yanked = file.get("yanked")
        listed.append(
            ListedFile(
                name=file["filename"],
                url=urllib.parse.urljoin(url, file["url"]),
                sha256=f"sha256:{digest}" if isinstance(digest, str) else "",
                yanked=(yanked if isinstance(yanked, str) else "") if yanked else None,
            )
        )
    return listed


class _Links(HTMLParser):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.files: list[ListedFile] = []
        self._base = url

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        link = values.get("href")
        if not link:
            return
        if tag == "base":
            self._base = urllib.parse.urljoin(self._base, link)
        if tag != "a":
            return
        parts = urllib.parse.urlsplit(urllib.parse.urljoin(self._base, link))
        digest = _SHA256.search(parts.fragment)
        name = urllib.parse.unquote(posixpath.basename(parts.path))
        if name:
            self.files.append(
                ListedFile(
                    name=name,
                    url=urllib.parse.urlunsplit(parts._replace(fragment="")),
                    sha256=f"sha256:{digest[1]}" if digest else "",
                    yanked=values["data-yanked"] or "" if "data-yanked" in values else None,
                )
            )
