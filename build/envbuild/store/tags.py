"""Lists the tags of a repository."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from envbuild.core import jsonread
from envbuild.core.errors import NetworkError
from envbuild.store.registry import Registry

# RFC 8288, as the spec has it for further pages ("Listing Tags").
NEXT_PAGE = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')


def list_tags(registry: Registry) -> list[str]:
    """All tags of the repository, page by page; a repository that does not exist yet has none.

    Raises:
        NetworkError: the registry cannot be reached, refuses, or answers with something else.
    """
    found: list[str] = []
    # Registries may send fewer, and link to the next page.
    query = "n=1000"
    seen = set()
    # A registry whose pages link to one another would be asked for ever.
    while query and query not in seen:
        seen.add(query)
        answer = registry.ask("GET", f"tags/list?{query}", accept=(200, 404))
        if answer.status == 404:
            return found
        try:
            listed: Any = jsonread.foreign(answer.body)
            found += [str(tag) for tag in listed.get("tags") or []]
        except (ValueError, AttributeError, TypeError) as error:
            raise NetworkError(
                f"{registry.error.name} lists no tags",
                why='Its answer is not a list of tags (OCI distribution-spec, "Listing Tags").',
                fix=f"Check the address.{registry.error.wording.otherwise}",
            ) from error
        following = NEXT_PAGE.search(answer.headers.get("Link", ""))
        query = urllib.parse.urlsplit(following[1]).query if following else ""
    return found
