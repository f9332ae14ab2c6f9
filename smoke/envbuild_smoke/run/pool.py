"""The rank processes of a run: at most one for each device, kept between cases unless they have to be fresh."""

import selectors
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.ranks.forkserver_main import kill_group
from envbuild_smoke.ranks.ipc import Channel, Done, Message
from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.run.forkserver import ForkServer, ForkServerError, groups_with_others, signal_name

FORKSERVER_LOG = "forkserver.log"
# SIGKILL leaves a process no choice, but one that waits for a disk or a driver may not die at once.
DEATH_LIMIT_SECONDS = 30.0


@dataclass
class RankProcess:
    """A rank process as the runner knows it; `done` is its answer at the end of its last task."""

    key: int
    device: int
    channel: Channel
    fresh: bool = True
    pid: int | None = None
    done: Done | None = None
    exit_status: int | None = None
    exited_at: float | None = None
    lost: bool = False

    @property
    def gone(self) -> bool:
        """True when it ended, or when its parent, which would report that, is gone."""
        return self.exited_at is not None or self.lost


@dataclass
class Pool:
    """Starts rank processes where tasks need them; `wait` reads what they report.

    `server_event` is the fork server's last report, None until it has imported the libraries; `server_end` is how the
    last one ended.
    """

    program: RankProgram
    plan: Plan
    out: Path
    lock: int
    variables: Mapping[str, str] = field(default_factory=dict)
    live: bool = True
    server_event: Message | None = None
    server_end: str = ""
    _server: ForkServer | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _idle: dict[int, RankProcess] = field(default_factory=dict)
    _known: dict[int, RankProcess] = field(default_factory=dict)
    _last_key: int = 0

    @property
    def is_ready(self) -> bool:
        """True when the fork server has imported the libraries and can start ranks."""
        return self.server_event is not None and self.server_event["event"] == "ready"

    def start_server(self) -> None:
        """Start the fork server unless it runs."""
        if self._server is not None:
            return
        self.server_event = None
        log = self.out / FORKSERVER_LOG
        self._server = ForkServer(self.program, self.plan, log, lock=self.lock, variables=self.variables)
        self._selector.register(self._server.channel, selectors.EVENT_READ)

    def acquire(self, devices: Sequence[int], logs: Sequence[Path], *, fresh: bool = False) -> list[RankProcess]:
        """Return a process for each device: an idle one, unless it has to be fresh, or a new one.

        Raises ForkServerError when the fork server is gone.
        """
        if fresh or not self.live:
            self.retire([process for device in devices if (process := self._idle.get(device))])
        self._wait_until_gone(set(devices))
        processes = []
        for device, log in zip(devices, logs, strict=True):
            # CUDA's context holds memory on each GPU that a process has used: a process stays with its device.
            process = self._idle.pop(device, None)
            if process is None or process.gone:
                process = self._start(device, log)
            process.done = None
            processes.append(process)
        return processes

    def release(self, processes: Sequence[RankProcess]) -> None:
        """Keep processes whose task was done for the next one, except those that left children running."""
        # A child that lives on may hold the GPU's memory, or print into the log of the next case.
        dirty = groups_with_others({process.pid for process in processes if process.pid is not None})
        for process in processes:
            if self.live and not process.gone and process.pid not in dirty:
                process.fresh = False
                self._idle[process.device] = process
            else:
                self.retire([process])

    def retire(self, processes: Iterable[RankProcess]) -> None:
        """Kill processes and all that they started; `wait` notes their end."""
        for process in processes:
            if self._idle.get(process.device) is process:
                del self._idle[process.device]
            if process.pid is not None:
                # Also when it has ended: what it started is still in its group.
                kill_group(process.pid)

    def wait(self, timeout_seconds: float) -> None:
        """Read what processes report; return at once when there is something, else after the timeout."""
        for key, _ in self._selector.select(timeout_seconds):
            if self._server is not None and key.fileobj is self._server.channel:
                self._read_server()
            else:
                self._read_rank(key.data)

    def close(self) -> None:
        """Kill every rank process, wait until they are gone, and end the fork server."""
        limit = time.monotonic() + DEATH_LIMIT_SECONDS
        while self._server is not None and time.monotonic() < limit:
            left = [process for process in self._known.values() if not process.gone]
            if not left:
                break
            self.retire(left)
            self.wait(0.05)
        self._end_server()
        self._selector.close()

    def _wait_until_gone(self, devices: set[int]) -> None:
        """Wait for processes on the devices that were killed: a GPU may take one process at a time alone."""
        limit = time.monotonic() + DEATH_LIMIT_SECONDS
        idle = set(map(id, self._idle.values()))
        while time.monotonic() < limit and any(
            process.device in devices and id(process) not in idle for process in self._known.values()
        ):
            self.wait(0.05)

    def _start(self, device: int, log: Path) -> RankProcess:
        if self._server is None:
            raise ForkServerError("the fork server is gone")
        self._last_key += 1
        try:
            channel = self._server.start_rank(self._last_key, fork=self.live, log=log)
        except ForkServerError:
            # Its last reports, and its end: the next call starts another one.
            while self._server is not None:
                self._read_server()
            raise
        process = RankProcess(self._last_key, device, channel)
        self._known[process.key] = process
        self._selector.register(channel, selectors.EVENT_READ, process)
        return process

    def _read_server(self) -> None:
        if self._server is None:
            return
        events, ended = self._server.channel.receive_all()
        for event in events:
            if event["event"] == "started":
                self._known[event["key"]].pid = event["pid"]
            elif event["event"] == "exit":
                self._exited(event)
            else:
                self.server_event = event
        if ended:
            self._end_server()
            for process in list(self._known.values()):
                process.lost = True
                if process.pid is not None:
                    kill_group(process.pid)
                self._forget(process)
            if self.server_event is None or self.server_event["event"] == "ready":
                self.server_event = {"event": "gone"}

    def _end_server(self) -> None:
        if self._server is not None:
            with suppress(KeyError):
                self._selector.unregister(self._server.channel)
            status = self._server.close()
            ended = f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"
            self.server_end = f"the fork server {ended}"
            self._server = None

    def _exited(self, event: Message) -> None:
        process = self._known[event["key"]]
        # It may have reported that it was done, and then died.
        # The exit comes over the fork server's channel, the "done" over the rank's: of two sockets any may be read
        # first.
        with selectors.DefaultSelector() as selector:
            selector.register(process.channel, selectors.EVENT_READ)
            if selector.select(0):
                self._read_rank(process)
        process.exit_status, process.exited_at = event["status"], event["monotonic_seconds"]
        self._forget(process)

    def _read_rank(self, process: RankProcess) -> None:
        if process.gone:
            # Its end was read in the same moment.
            return
        messages, ended = process.channel.receive_all()
        for message in messages:
            if message.pop("event") == "done":
                process.done = read_object(Done, message, "done")
        if ended:
            with suppress(KeyError):
                self._selector.unregister(process.channel)

    def _forget(self, process: RankProcess) -> None:
        self._known.pop(process.key, None)
        if self._idle.get(process.device) is process:
            del self._idle[process.device]
        with suppress(KeyError):
            self._selector.unregister(process.channel)
        process.channel.close()
