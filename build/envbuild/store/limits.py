"""What a registry may take for one question: without bounds its answers could hold a command for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

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
