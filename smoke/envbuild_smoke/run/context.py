"""What the steps of a run share: the plan, the output directory, the processes, the options."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from envbuild_smoke.environment.imported import Ready
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.options import Options
from envbuild_smoke.run.pool import FORKSERVER_LOG, RankPool
from envbuild_smoke.run.results import Emit, now

# Importing from the network disk of a cold node takes minutes.
IMPORT_LIMIT_SECONDS = 600.0
# The end of a rank wakes the runner at once; steps and time limits are checked this often.
POLL_SECONDS = 0.05


# For the last case to be recorded, and the ranks to end.
MARGIN_SECONDS = 30.0


class RunInterruptedError(Exception):
    """The run was stopped by a signal."""


class OutOfTimeError(Exception):
    """The time that the run has is over before this was started."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """A run under way. `emit` gets the progress events; once `stop` is set the run ends.

    Each node has `on_node` devices, GPUs or slots for processes on the CPU; they are counted over the nodes. `began` is
    on the monotonic clock, in seconds; `started_at` is the time of day as results have it.
    """

    plan: Plan
    out: Path
    options: Options
    pool: RankPool
    emit: Emit
    stop: threading.Event
    on_node: int
    began: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=now)

    def wait_for_fork_server(self, meanwhile: Callable[[], None] | None = None) -> Ready:
        """Return what the fork server reports once it has imported everything; raises ForkServerError."""
        self.pool.start_server()
        limit = time.monotonic() + IMPORT_LIMIT_SECONDS
        while time.monotonic() < limit:
            if self.stop.is_set():
                raise RunInterruptedError
            event = self.pool.server_event
            if event is None:
                (meanwhile or partial(self.pool.wait, POLL_SECONDS))()
            elif event["event"] == "ready":
                return read_object(Ready, {name: value for name, value in event.items() if name != "event"}, "ready")
            elif event["event"] == "unusable":
                raise ForkServerError(f"the libraries cannot be imported: {event['error']}")
            else:
                raise ForkServerError(f"the fork server died while it imported the libraries; see {FORKSERVER_LOG}")
        raise ForkServerError(f"importing the libraries took more than {IMPORT_LIMIT_SECONDS:g} s")

    def device_ids(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the devices as results have them: nvidia-smi's index of a GPU, a number on the CPU."""
        gpus = self.options.gpus
        return tuple(gpus[device % self.on_node].index if gpus else device for device in devices)
