"""The runner's side of the fork server: starts it, has it start rank processes, and signals those."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from envbuild_smoke.plan.models import Device, Plan
from envbuild_smoke.ranks.ipc import Channel, Message
from envbuild_smoke.ranks.program import RankProgram

# How long the fork server may take to end once the connection is closed; it does not read it while it imports.
_END_SECONDS = 2.0

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ForkServerError(Exception):
    """The libraries cannot be imported, or the fork server died."""


class ForkServer:
    """A running fork server. `lock` is a descriptor that it and its ranks keep open as long as they live."""

    def __init__(self, program: RankProgram, plan: Plan, log: Path, *, lock: int, variables: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        # A file without a name: the plan that ranks parse cannot be changed or removed while the run goes on.
        content = os.memfd_create("plan.json")
        with os.fdopen(os.dup(content), "wb") as file:
            file.write(plan.content)
        command = [sys.executable, *_interpreter_options(), str(entry_point()), "forkserver"]
        command += ["--program", program.as_argument()]
        command += ["--plan-descriptor", str(content), "--control", str(theirs.fileno())]
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, **rank_variables(plan.device), **variables},
                pass_fds=(content, theirs.fileno(), lock),
                # Ctrl-C in a terminal reaches the whole foreground group; killing is the runner's decision.
                start_new_session=True,
            )
        theirs.close()
        os.close(content)
        self.channel = Channel(ours)

    def start_rank(self, key: int, *, fork: bool, log: Path) -> Channel:
        """Have a rank process started, and return the runner's end of its channel.

        A "started" and an "exit" event follow on the fork server's own channel.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command: Message = {"start": key, "how": "fork" if fork else "execute", "log": str(log)}
            if not self.channel.send(command, (theirs.fileno(),)):
                ours.close()
                raise ForkServerError("the fork server is gone")
        return Channel(ours)

    def close(self) -> int:
        """End the fork server and its ranks; return its exit status, negative for a signal."""
        # The closed connection is the command to end, and also what remains of a runner that was killed.
        self.channel.close()
        try:
            return self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def rank_variables(device: Device) -> dict[str, str]:
    """Return the variables that have to be set before a rank's libraries are imported."""
    # One thread a process: the ranks share the machine's cores, and sums keep one order.
    environment = dict.fromkeys(_THREAD_VARIABLES, "1")
    # Megatron's overlap of communication needs kernels to start in the order in which they were queued. That order
    # hides streams that do not wait for each other: who trains with CUDA's own 8 queues sets it for the run too.
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Libraries ask torch.cuda.is_available() as they are imported. Answered through NVML, this does not
    # start CUDA, which a process that is to be forked must not have done.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # gloo otherwise looks for its address by the host's name, which in a container may not resolve.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        # Megatron has torch compile a few small functions, which takes longer than to train a case, and a compiler.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    else:
        # cuBLAS gives the same digits in every run only with a fixed workspace.
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        # Transformer Engine's attention is to do so, too; Megatron's deterministic mode insists on it.
        environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        # Without it NCCL keeps the cause of "unhandled cuda error" to itself.
        environment["NCCL_DEBUG"] = os.environ.get("NCCL_DEBUG", "WARN")
    return environment


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, and the number for a signal without a name."""
    try:
        # Real-time signals have no name in Python but SIGRTMIN and SIGRTMAX.
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def request_stacks(pid: int) -> None:
    """Have a rank process write its stacks to its log; not its group: helpers of libraries would die of the signal."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)


def groups_with_others(pids: set[int]) -> set[int]:
    """Return those of the rank processes whose process group has other processes in it."""
    # No library for this: psutil may be absent from the environment under test.
    groups = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) in pids:
            continue
        with suppress(OSError):
            # State, parent and group follow the name, which may hold anything but ends with the last bracket.
            state, _, group = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX" and int(group) in pids:
                groups.add(int(group))
    return groups


def entry_point() -> Path:
    """Return what Python has to run to get this very smoke: the zipapp, or the folder of the sources."""
    return zipapp_path() or Path(__file__).resolve().parents[2]


def zipapp_path() -> Path | None:
    """Return the zipapp this module was loaded from, or None when it comes from files."""
    # zipimport's loader has the path of its archive; the loader of files has no such attribute.
    archive = getattr(__spec__.loader, "archive", None) if __spec__ else None
    return Path(archive).resolve() if archive else None


def _interpreter_options() -> list[str]:
    """Return the options that decide which packages are found, as this interpreter was started with."""
    # Not sys.orig_argv: the command line of the runner has its own subcommand and options.
    flags = sys.flags
    given = {"-I": flags.isolated, "-E": flags.ignore_environment, "-s": flags.no_user_site}
    return [option for option, is_set in given.items() if is_set]
