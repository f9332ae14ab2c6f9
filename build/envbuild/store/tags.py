"""Lists what a repository has page by page, within bounds: its tags, the artifacts about a manifest."""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from envbuild.core import jsonread
from envbuild.core.errors import NetworkError
from envbuild.store.registry import Answer, Registry
from envbuild.store.transfer import MOST_ANSWER_BYTES

# A thousand pages of a thousand tags each are more than any registry serves well; some send a hundred a page.
MOST_ANSWERS, MOST_SECONDS = 1000, 300.0


@dataclass
class Bounded:
    """The answers to one question.

    Attributes:
        question: what is asked for, for the error: "its list of tags".
    """

    registry: Registry
    question: str
    answers: int = 0
    size_bytes: int = 0
    started: float = field(default_factory=time.monotonic)

    def count(self, size_bytes: int = 0) -> None:
        """Count an answer that came, before the next one is asked for.

        Raises:
            NetworkError: there were too many, of too many bytes, or for too long.
        """
        self.answers += 1
        self.size_bytes += size_bytes
        seconds = time.monotonic() - self.started
        if self.answers < MOST_ANSWERS and self.size_bytes <= MOST_ANSWER_BYTES and seconds <= MOST_SECONDS:
            return
        raise NetworkError(
            f"{self.registry.error.name} does not end {self.question}",
            why=f"It sent {self.answers} answers with {self.size_bytes} bytes in {seconds:.0f} s, and there is more.",
            fix="Remove there what nobody needs (envbuild gc --from), or have its administrators look: its answers "
            f"may lead to one another.{self.registry.error.wording.otherwise}",
        )


def all_pages(
    registry: Registry, first: Answer, question: str, next_page: Callable[[Mapping[str, str]], str], **asked: str
) -> Iterator[Answer]:
    """The first page of a list, and those that follow it.

    Args:
        next_page: the path of the page that an answer's headers link to; empty where there is none.
        asked: headers of the requests.

    Raises:
        NetworkError: the registry cannot be reached, refuses, or sends pages without end.
    """
    bounded, seen, answer = Bounded(registry, question), set[str](), first
    while True:
        yield answer
        path = next_page(answer.headers)
        # Pages that link to one another end by themselves.
        if not path or path in seen:
            return
        seen.add(path)
        bounded.count(len(answer.body))
        answer = registry.ask("GET", path, accept=(200,), headers=asked)


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
