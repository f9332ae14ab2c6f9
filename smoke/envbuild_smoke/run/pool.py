"""The rank processes of a run: at most one for each device, kept between cases unless they have to be fresh."""

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from envbuild_smoke.plan.json_reader import PlanError, read_object
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.rank_context import RaisedFailure, Report
from envbuild_smoke.ranks.forkserver_main import kill_group
from envbuild_smoke.ranks.ipc import Channel, Done, Message, RankCommand
from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.run.forkserver import ForkServer, ForkServerError, groups_with_others, request_stacks, signal_name

FORKSERVER_LOG = "forkserver.log"
# SIGKILL leaves a process no choice, but one that waits for a disk or a driver may not die at once.
DEATH_LIMIT_SECONDS = 30.0
# Marks what a selector watches for somebody else.
WATCHED = object()


@dataclass
class RankProcess:
    """A rank process as the runner knows it, on one of its nodes.

    Of its task: `done` is its answer at the end, `raised` why it has none, `reports` what it reported and nobody has
    read; `problem` tells of a report that is not one.
    """

    key: int
    device: int
    node: int = 0
    fresh: bool = True
    # What it was when its task began.
    began_fresh: bool = True
    pid: int | None = None
    done: Done | None = None
    raised: RaisedFailure | None = None
    reports: deque[Report] = field(default_factory=deque)
    problem: str | None = None
    exit_status: int | None = None
    exited_at: float | None = None
    # It is to end, also where its start was not reported yet.
    retired: bool = False
    # Its parent is gone, or with `lost_node` the whole node, which that names.
    lost: bool = False
    lost_node: str = ""

    @property
    def gone(self) -> bool:
        """True when it ended, or when its parent, which would report that, is gone."""
        return self.exited_at is not None or self.lost

    def begin_task(self) -> None:
        """Forget what it reported in its last task."""
        self.done, self.raised, self.problem, self.began_fresh = None, None, None, self.fresh
        self.reports.clear()

    def receive(self, message: Message) -> None:
        """Note a message of the process."""
        event = message.pop("event")
        try:
            if event == "done":
                self.done = read_object(Done, message, "done")
            elif event == "raised":
                self.raised = read_object(RaisedFailure, message, "its failure")
            elif event == "report":
                self.reports.append(read_object(Report, message, "its report"))
        except PlanError as error:
            self.problem = self.problem or str(error)


class HasFileno(Protocol):
    """What a selector can watch."""

    def fileno(self) -> int:
        """Return its descriptor."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a task meet: a port that is bound, by `listener` if it is this machine's."""

    host: str
    port: int
    listener: socket.socket | None = None


class RankPool(Protocol):
    """The rank processes that a runner has tasks done by, on one node or several."""

    @property
    def plan(self) -> Plan:
        """The plan of the run."""

    @property
    def is_ready(self) -> bool:
        """True when ranks can be started."""

    @property
    def server_event(self) -> Message | None:
        """What the fork server reported last, None until it has imported the libraries."""

    @property
    def server_end(self) -> str:
        """How the last fork server ended."""

    @property
    def lost(self) -> Mapping[int, str]:
        """Why nodes are lost, by number."""

    def start_server(self) -> None:
        """Start what starts ranks, unless it runs."""

    def place(self, device: int) -> tuple[int, int]:
        """Return the node of a device, and its number there."""

    def acquire(self, devices: Sequence[int], logs: Sequence[Path], *, fresh: bool = False) -> list[RankProcess]:
        """Return a process for each device. Raises ForkServerError when none can be started."""

    def bind(self, process: RankProcess) -> Meeting:
        """Return a place that this process can listen at."""

    def send(self, process: RankProcess, command: RankCommand, meeting: Meeting) -> None:
        """Send a task to a process, and to the one that listens its socket."""

    def release(self, processes: Sequence[RankProcess]) -> None:
        """Keep processes whose task was done for the next one."""

    def retire(self, processes: Iterable[RankProcess]) -> None:
        """Kill processes and all that they started."""

    def request_stacks(self, process: RankProcess) -> None:
        """Have a process write its stacks to its log."""

    def wait(self, timeout_seconds: float) -> None:
        """Read what processes report; return at once when there is something, else after the timeout."""

    def close(self) -> None:
        """Kill every process, and end what started them."""


@dataclass
class Pool:
    """Starts rank processes where tasks need them; `wait` reads what they report.

    `server_event` is the fork server's last report, None until it has imported the libraries; `server_end` is how the
    last one ended. Its ranks are met at `host`; `on_message` is called with what they report.
    """

    program: RankProgram
    plan: Plan
    out: Path
    lock: int
    variables: Mapping[str, str] = field(default_factory=dict)
    live: bool = True
    host: str = "127.0.0.1"
    log_name: str = FORKSERVER_LOG
    on_message: Callable[[RankProcess, Message], None] | None = None
    server_event: Message | None = None
    server_end: str = ""
    _server: ForkServer | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _idle: dict[int, RankProcess] = field(default_factory=dict)
    _known: dict[int, RankProcess] = field(default_factory=dict)
    _channels: dict[int, Channel] = field(default_factory=dict)
    _last_key: int = 0

    @property
    def is_ready(self) -> bool:
        """True when the fork server has imported the libraries and can start ranks."""
        return self.server_event is not None and self.server_event["event"] == "ready"

    @property
    def lost(self) -> Mapping[int, str]:
        """No node: this one would be lost with the run."""
        return {}

    def start_server(self) -> None:
        """Start the fork server unless it runs."""
        if self._server is not None:
            return
        self.server_event = None
        log = self.out / self.log_name
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
            process.begin_task()
            processes.append(process)
        return processes

    def place(self, device: int) -> tuple[int, int]:
        """Return node 0, the only one, and the device."""
        return 0, device

    def bind(self, process: RankProcess) -> Meeting:  # noqa: ARG002 - of all processes here
        """Return a place to listen at."""
        listener = socket.create_server((self.host, 0))
        return Meeting(self.host, listener.getsockname()[1], listener)

    def send(self, process: RankProcess, command: RankCommand, meeting: Meeting) -> None:
        """Send a task to a process, and to the one that listens its socket."""
        passed = meeting.listener if command.listens else None
        descriptors = () if passed is None else (passed.fileno(),)
        if channel := self._channels.get(process.key):
            channel.send(asdict(command), descriptors)
        if passed is not None:
            passed.close()

    def request_stacks(self, process: RankProcess) -> None:
        """Have a process write its stacks to its log."""
        if process.pid is not None:
            request_stacks(process.pid)

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
            process.retired = True
            if process.pid is not None:
                # Also when it has ended: what it started is still in its group.
                kill_group(process.pid)

    def wait(self, timeout_seconds: float) -> None:
        """Read what processes report; return at once when there is something, else after the timeout."""
        for key, _ in self._selector.select(timeout_seconds):
            if key.data is WATCHED:
                continue
            if self._server is not None and key.fileobj is self._server.channel:
                self._read_server()
            else:
                self._read_rank(key.data)

    def watch(self, source: HasFileno) -> None:
        """Have `wait` return also when there is something to read from a source."""
        self._selector.register(source, selectors.EVENT_READ, WATCHED)

    def unwatch(self, source: HasFileno) -> None:
        """Watch a source no more."""
        self._selector.unregister(source)

    def is_clear(self, devices: Iterable[int]) -> bool:
        """True when no process that was killed still has one of the devices."""
        idle, wanted = set(map(id, self._idle.values())), set(devices)
        return not any(process.device in wanted and id(process) not in idle for process in self._known.values())

    def emptied(self) -> bool:
        """Kill every rank process; True when none is left."""
        left = [process for process in self._known.values() if not process.gone]
        self.retire(left)
        return not left

    def close(self) -> None:
        """Kill every rank process, wait until they are gone, and end the fork server."""
        limit = time.monotonic() + DEATH_LIMIT_SECONDS
        while self._server is not None and time.monotonic() < limit and not self.emptied():
            self.wait(0.05)
        self._end_server()
        self._selector.close()

    def _wait_until_gone(self, devices: set[int]) -> None:
        """Wait for processes on the devices that were killed: a GPU may take one process at a time alone."""
        limit = time.monotonic() + DEATH_LIMIT_SECONDS
        while time.monotonic() < limit and not self.is_clear(devices):
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
        process = RankProcess(self._last_key, device)
        self._known[process.key] = process
        self._channels[process.key] = channel
        self._selector.register(channel, selectors.EVENT_READ, process)
        return process

    def _read_server(self) -> None:
        if self._server is None:
            return
        events, ended = self._server.channel.receive_all()
        for event in events:
            if event["event"] == "started":
                process = self._known[event["key"]]
                process.pid = event["pid"]
                if process.retired:
                    kill_group(process.pid)
            elif event["event"] == "exit":
                self._exited(event)
            else:
                self.server_event = event
        if ended:
            self._end_server()
            for process in list(self._known.values()):
                self._read_rest(process)
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
        self._read_rest(process)
        process.exit_status, process.exited_at = event["status"], event["monotonic_seconds"]
        self._forget(process)

    def _read_rest(self, process: RankProcess) -> None:
        """Read what a process sent before it ended: its end comes by another socket, and may be read first."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channels[process.key], selectors.EVENT_READ)
            while selector.select(0) and not self._read_rank(process):
                pass

    def _read_rank(self, process: RankProcess) -> bool:
        """Read what a process has sent; True when nothing more will come."""
        if process.gone:
            # Its end was read in the same moment.
            return True
        channel = self._channels[process.key]
        messages, ended = channel.receive_all()
        for message in messages:
            if self.on_message is not None:
                self.on_message(process, dict(message))
            process.receive(message)
        if ended:
            with suppress(KeyError):
                self._selector.unregister(channel)
        return ended

    def _forget(self, process: RankProcess) -> None:
        self._known.pop(process.key, None)
        if self._idle.get(process.device) is process:
            del self._idle[process.device]
        channel = self._channels.pop(process.key, None)
        if channel is None:
            return
        with suppress(KeyError):
            self._selector.unregister(channel)
        channel.close()
