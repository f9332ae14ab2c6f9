"""Shows the progress of a run: the events of the smoke runner, line by line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from envbuild.core.progress import Reporter
from envbuild.core.text import printable

# Of a text that a runner, a rank or a results file wrote; the report has all of it.
MOST_CHARACTERS = 1000


class Watcher:
    """Shows the runner's events while it runs.

    Attributes:
        cannot_run: the reason and the message of a runner that could not start.
    """

    def __init__(self, reporter: Reporter, *, cases: int = 0, repeats: int = 1) -> None:
        self._reporter = reporter
        self._cases = cases
        self._repeats = repeats
        self._of_repeat: Counter[int] = Counter()
        self._running: dict[str, str] = {}
        self._ended = 0
        self.cannot_run: tuple[str, str] | None = None

    def __call__(self, line: str) -> None:
        """Take a line of its output."""
        try:
            event = json.loads(line)
            match event["event"]:
                case "case-started":
                    self._running[event["case"]] = "starts"
                # The fork server of its ranks died, for example because memory ran out (docs/reference/plan.md).
                case "case-restarted":
                    case = brief(event["case"])
                    self._running[case] = "starts"
                    self._reporter.note(f"  {case}: started again: {brief(event['message'])}")
                case "step":
                    loss = "not finite" if event["loss"] is None else f"{event['loss']:.5f}"
                    self._running[event["case"]] = f"step {event['step']}, loss {loss}"
                case "case-finished":
                    self._finished(event)
                case "bandwidth":
                    self._measured(event.get("nodes", [0]))
                    return
                case "cannot-run":
                    self.cannot_run = brief(event["reason"]), brief(event["message"])
                    return
                case _:
                    return
        except (ValueError, KeyError, TypeError):
            return  # text for people, which the log has
        running = "; ".join(f"{case} {what}" for case, what in self._running.items())
        self._reporter.update(f"{self._ended} done; {running}" if running else f"{self._ended} done")

    def _measured(self, nodes: Sequence[int]) -> None:
        """One sweep on one node is reported; of several nodes there may be hundreds, and a table comes after them."""
        if list(nodes) == [0]:
            self._reporter.note("  bandwidth measured")
        else:
            names = f"node {nodes[0]}" if len(nodes) == 1 else f"{len(nodes)} nodes, {nodes[0]} to {nodes[-1]}"
            self._reporter.update(f"bandwidth measured: {names}")

    def _finished(self, event: dict[str, object]) -> None:
        case, status, seconds = brief(event["case"]), brief(event["status"]), float(str(event["seconds"]))
        self._running.pop(case, None)
        self._ended += 1
        repeat = int(str(event.get("repeat", 1)))
        self._of_repeat[repeat] += 1
        if self._repeats == 1 or status != "completed":
            self._reporter.note(f"  {case}{repeat_suffix(repeat)}: {status} in {seconds:.1f} s")
        if self._repeats > 1 and self._of_repeat[repeat] == self._cases:
            whole = self._cases * self._repeats
            self._reporter.note(
                f"  repeat {repeat} of {self._repeats}: {self._cases} cases ended ({self._ended} of {whole})"
            )


def brief(value: object) -> str:
    """A text of a runner, a rank or a results file, in one line of limited length."""
    text = str(value)
    return printable(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}...")


def repeat_suffix(repeat: int) -> str:
    """Names a repeat after the first."""
    return f" (repeat {repeat})" if repeat > 1 else ""
