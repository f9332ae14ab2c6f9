"""The launcher ``docker``: tasks in a container of docker, or of podman."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from envbuild.core.errors import CertificationCannotRunError, CertificationFailedError, EnvbuildError, MachineError
from envbuild.core.exit_status import mask
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished
from envbuild.core.progress import Reporter
from envbuild.image.docker.engine import Engine, open_engine
from envbuild.image.docker.load import load_image
from envbuild.image.output import image_tag
from envbuild.launch.bwrap import ImageExecutor, manifest_of
from envbuild.launch.executors import IMAGE_DIR, PLAN, RESULTS, RUNNER, UNBUFFERED, LaunchRequest, Task

# How long the runner may take to end its ranks when it is told to stop.
STOP_SECONDS = 10
# Messages of dockerd, of NVIDIA's container runtime hook, and of CDI.
NO_GPU_SUPPORT = ("could not select device driver", "nvidia-container-cli", "unresolvable CDI devices")
MOUNTED = f"{IMAGE_DIR}/manifest.json"
# On every container: the folder that its task writes to.
RESULTS_LABEL = "org.envbuild.results"
# How an image is certified without a Docker daemon.
WITHOUT_DAEMON = "--in sqsh or --in oci"


@dataclass(frozen=True, kw_only=True)
class DockerExecutor(ImageExecutor):
    """Runs a task in a container without a network, and removes it; the runner hashes the image's manifest.

    Attributes:
        tag: the image's name, where it has to be loaded into the daemon.
        gpus: whether containers have the machine's GPUs.
    """

    engine: Engine
    tag: str
    reporter: Reporter
    gpus: bool = False

    @property
    def name(self) -> str:
        return self.engine.version

    def run(self, task: Task) -> Finished:
        if not self.engine.address.startswith("unix:"):
            raise CertificationCannotRunError(
                f"the docker daemon at {mask(self.engine.address)} may be on another machine",
                why="A daemon reached over a network does not see the plan and the runner, files of this machine.",
                fix="Use the daemon of this machine (its socket), or --plan-out DIR there and --judge DIR here.",
                reason="no-runtime",
            )
        if self.engine.find(self.image.record.config_digest) is None:
            load_image(self.engine, self.image.path, self.image.record, self.tag, self.reporter)
        words = [*task.words_inside(self.python, MOUNTED), "--end-with-stdin"]
        started = time.monotonic()
        with _log(task.log) as log, self._container(task, words) as name:
            status, output = self._follow(name, task, log)
        return Finished(status=status, output=output, seconds=time.monotonic() - started)

    def remove_orphans(self, results: Path) -> None:
        """Remove the containers of a killed envbuild that write to these results; the caller has locked the folder."""
        from docker.errors import NotFound

        api = self.engine.api
        label = f"{RESULTS_LABEL}={results.resolve()}"
        with self.engine.errors("remove a container"):
            # all: the API lists running ones alone by default, and one whose envbuild was killed ends by itself and
            # stays.
            for left in api.containers(all=True, filters={"label": label}):
                self.reporter.note(f"note: removing a container of a killed envbuild: {left['Id'][:12]}")
                with contextlib.suppress(NotFound):
                    api.remove_container(left["Id"], force=True)

    @contextlib.contextmanager
    def _container(self, task: Task, words: list[str]) -> Iterator[str]:
        api, engine = self.engine.api, self.engine
        # In a rootless container root is the account that runs it; any other is a subordinate one, which may not write
        # results.
        rootless = engine.is_podman or engine.is_rootless
        try:
            with engine.errors("start a container"):
                made = api.create_container(
                    self.image.record.config_digest,
                    entrypoint=words[:1],
                    command=words[1:],
                    # Results belong to the account that runs this, not to root.
                    user="" if rootless else f"{os.getuid()}:{os.getgid()}",
                    # The account has no home in the image, and the root is read-only: Triton keeps what it compiles
                    # below HOME.
                    environment={"HOME": "/tmp", **self.extra, **UNBUFFERED},  # noqa: S108 - inside
                    working_dir="/",
                    labels={RESULTS_LABEL: str(task.results.resolve())},
                    # The daemon closes it when this process ends, however it ends; the runner then ends itself.
                    stdin_open=True,
                    network_disabled=True,
                    host_config=api.create_host_config(**self._host_config(task)),
                )
                name = str(made["Id"])
                try:
                    # With stdin_open the SDK sets StdinOnce: standard input ends with its first client, which has to be
                    # this one.
                    stdin = api.attach_socket(name, params={"stdin": 1, "stream": 1})
                    api.start(name)
                except BaseException:
                    api.remove_container(name, force=True)
                    raise
        except MachineError as error:
            if any(text in error.why for text in NO_GPU_SUPPORT):
                raise _no_gpu_support(error) from error
            raise
        try:
            yield name
        finally:
            with contextlib.suppress(EnvbuildError), engine.errors("stop a container"):
                api.stop(name, timeout=STOP_SECONDS)
            # By itself: what cannot be stopped can still be removed by force.
            with contextlib.suppress(EnvbuildError), engine.errors("remove a container"):
                api.remove_container(name, force=True)
            with contextlib.suppress(OSError):
                stdin.close()

    def _host_config(self, task: Task) -> dict[str, Any]:
        from docker.types import DeviceRequest, Ulimit

        inside = {task.plan: PLAN, task.runner: RUNNER, manifest_of(self.image): MOUNTED}
        binds = {str(path.resolve()): {"bind": target, "mode": "ro"} for path, target in inside.items()}
        binds[str(task.results.resolve())] = {"bind": RESULTS, "mode": "rw"}
        request = DeviceRequest(count=-1, capabilities=[["gpu"]]) if self.gpus else None
        return {
            "network_mode": "none",
            "read_only": True,
            "binds": binds,
            # exec: without it docker mounts a tmpfs noexec (moby, daemon/oci_linux.go), and libraries that Triton
            # compiles there cannot be loaded.
            "tmpfs": {"/tmp": "mode=1777,exec", "/run": "mode=755"},  # noqa: S108 - inside, and private
            "init": False,
            # Half of the memory, Linux's own default; docker's 64 MiB are too few for NCCL.
            "shm_size": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2,
            **({"device_requests": [request]} if request else {}),
            # NCCL pins memory, as do GPUs.
            **({"ulimits": [Ulimit(name="memlock", soft=-1, hard=-1)]} if request else {}),
        }

    def _follow(self, name: str, task: Task, log: TextIO) -> tuple[int, str]:
        """Wait for a container; return its exit status and output."""
        api, late = self.engine.api, threading.Event()

        def end() -> None:
            late.set()
            with contextlib.suppress(Exception):
                api.kill(name)

        # Reading the log blocks while the container prints nothing, so a thread of its own ends the container.
        timer = threading.Timer(task.timeout_seconds, end) if task.timeout_seconds else None
        lines: list[str] = []
        with self.engine.errors("follow a container"):
            if timer:
                timer.start()
            try:
                for line in in_lines(api.logs(name, stream=True, follow=True)):
                    log.write(f"{mask(line)}\n")
                    lines.append(line)
                    if task.on_line:
                        task.on_line(line)
                status = int(api.wait(name)["StatusCode"])
            finally:
                if timer:
                    timer.cancel()
        if late.is_set():
            raise CertificationFailedError(
                f"cannot train the cases inside the image: the runner ran longer than {task.timeout_seconds:.0f} s",
                fix="See the log for where it stopped, then run again.",
                log=task.log,
            )
        return status, "".join(f"{line}\n" for line in lines)


def open_executor(request: LaunchRequest) -> DockerExecutor:
    """The daemon of this machine; containers of a killed envbuild that write to the same results are removed.

    Raises:
        MachineError: there is no daemon.
    """
    image = request.require_image()
    executor = DockerExecutor(
        image=image,
        engine=open_engine(otherwise=WITHOUT_DAEMON),
        tag=image_tag(image.lock_name, image.record.base, image.record.target),
        reporter=request.reporter,
        gpus=request.on_gpus,
        extra=request.extra,
    )
    # The caller holds the lock of the results' folder: a container that still writes there is left over.
    executor.remove_orphans(request.results)
    return executor


def in_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Pieces of output as lines, as they become whole."""
    # The daemon streams pieces of any length, which may end inside of a character.
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[TextIO]:
    """The log of a task, written line by line."""
    path = path or Path(os.devnull)
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", buffering=1) as stream:
            yield stream


def _no_gpu_support(error: MachineError) -> CertificationCannotRunError:
    return CertificationCannotRunError(
        "the docker daemon cannot give GPUs to containers",
        why=error.why,
        fix="Install NVIDIA's container toolkit on its machine (nvidia-ctk runtime configure --runtime=docker), or use "
        "--in sqsh.",
        reason="no-runtime",
    )
