"""How long a rank computes in a step before it first communicates: after that ranks wait for each other.

torch.distributed's functions end in methods of its ProcessGroup, whatever name a library has for them; those are
watched.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed import ProcessGroup

# The first words of the names of methods that communicate, or begin a group of such calls (torch 2.5 to 2.13).
_COMMUNICATE = ("all", "reduce", "broadcast", "gather", "scatter", "send", "recv", "barrier", "start_coalescing")
_PATCHED = "envbuild_watched"


class FirstCollective:
    """Measures each step of a training on a device: on a GPU the time of its stream, on the CPU that of the clock.

    `seconds` has a number for each step that was begun and ended. A step without a collective counts as a whole.
    """

    # What all process groups of this process report to.
    current: "FirstCollective | None" = None

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._first: Any = None

    def begin(self) -> None:
        """Begin to wait for the first collective of a step."""
        _watch_collectives()
        FirstCollective.current = self
        self._began, self._first = self._mark(), None

    def communicates(self) -> None:
        """Note that a collective begins."""
        if self._first is None:
            self._first = self._mark()

    def end(self) -> None:
        """Note the time of the step."""
        self.communicates()
        FirstCollective.current = None
        if self._on_gpu:
            self._first.synchronize()
            self.seconds.append(round(self._began.elapsed_time(self._first) / 1000, 6))
        else:
            self.seconds.append(round(self._first - self._began, 6))

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _watch_collectives() -> None:
    """Have every ProcessGroup of this process report its collectives, once."""
    if getattr(ProcessGroup, _PATCHED, False):
        return
    for name in dir(ProcessGroup):
        if name.strip("_").startswith(_COMMUNICATE) and not name.startswith("__"):
            setattr(ProcessGroup, name, _reporting(getattr(ProcessGroup, name)))
    setattr(ProcessGroup, _PATCHED, True)


def _reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def reporting(*arguments: Any, **named: Any) -> Any:
        if FirstCollective.current is not None:
            FirstCollective.current.communicates()
        return method(*arguments, **named)

    return reporting
