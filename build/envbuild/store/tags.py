"""Lists the tags of a repository."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

from envbuild.core import jsonread
from envbuild.core.errors import NetworkError
from envbuild.store.limits import all_pages
from envbuild.store.registry import Answer, Registry

# RFC 8288, as the spec has it for further pages ("Listing Tags").
LIST = "tags/list"
NEXT_PAGE = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')


def list_tags(registry: Registry) -> list[str]:
    """All tags of the repository, page by page; a repository that does not exist yet has none.

    Raises:
        NetworkError: the registry cannot be reached, refuses, or answers with something else.
    """
    return _list_tags(registry, ()) or []


def list_tags_if_allowed(registry: Registry) -> list[str] | None:
    """The same; None where this account may not list them, as the narrowest rights of some registries have it."""
    return _list_tags(registry, (401, 403, 405))


def _list_tags(registry: Registry, refusals: tuple[int, ...]) -> list[str] | None:
    # Registries may send fewer, and link to the next page.
    first = registry.ask("GET", f"{LIST}?n=1000", accept=(200, 404, *refusals))
    if first.status != 200:
        return [] if first.status == 404 else None
    pages = all_pages(registry, first, "its list of tags", _next_page)
    return [tag for page in pages for tag in _tags_of(registry, page)]


def _tags_of(registry: Registry, page: Answer) -> list[str]:
    try:
        listed: Any = jsonread.foreign(page.body)
        return [str(tag) for tag in listed.get("tags") or []]
    except (ValueError, AttributeError, TypeError) as error:
        raise NetworkError(
            f"{registry.error.name} lists no tags",
            why='Its answer is not a list of tags (OCI distribution-spec, "Listing Tags").',
            fix=f"Check the address.{registry.error.wording.otherwise}",
        ) from error


def next_query(headers: Mapping[str, str]) -> str:
    """The query of the page that an answer links to; empty where there is none."""
    following = NEXT_PAGE.search(headers.get("Link", ""))
    return urllib.parse.urlsplit(following[1]).query if following else ""


def _next_page(headers: Mapping[str, str]) -> str:
    query = next_query(headers)
    return f"{LIST}?{query}" if query else ""
