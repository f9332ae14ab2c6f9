"""The docker daemon: which one it is, what is asked of it, and what its failures mean."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.core import locks
from envbuild.core.digests import Json
from envbuild.core.errors import EnvbuildError, MachineError, NetworkError
from envbuild.core.exit_status import mask

if TYPE_CHECKING:
    from docker import APIClient

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
# For everything but builds, loads and saves, which take as long as they take.
TIMEOUT_SECONDS = 60
# What is done first: a daemon that does not answer then is not there; later it went away.
CONNECT, VERSION = "connect", "ask for its version"
NO_SPACE = "no space left on device"
# On every container that a build starts: the lock file that it holds.
HELD_LABEL = "org.envbuild.held"
START = (
    "Start one (systemctl start docker), or name another with DOCKER_HOST or `docker context use`; podman's socket "
    "works too (systemctl start podman.socket; DOCKER_HOST=unix:///run/podman/podman.sock)."
)
# What does without a daemon, where an image is built.
NATIVE = "--builder native"


@dataclass(frozen=True, kw_only=True)
class FoundDaemon:
    """An image in the daemon: its ID (the digest of its configuration) and its labels."""

    id: str
    labels: Mapping[str, str]


class Engine:
    """A daemon that answered.

    Attributes:
        otherwise: the options of the command at hand that do without a daemon; its failures advise them.
    """

    def __init__(self, api: APIClient, address: str, otherwise: str = NATIVE) -> None:
        self._api = api
        self.address = address
        self.otherwise = otherwise
        with self.errors(VERSION):
            version = api.version()
        components = {item["Name"]: item["Version"] for item in version.get("Components", ())}
        self.is_podman = "Podman Engine" in components
        self.version = f"{'podman' if self.is_podman else 'docker'} {version.get('Version', 'of unknown version')}"
        self.api_version = str(version.get("ApiVersion", ""))

    @property
    def api(self) -> APIClient:
        """The SDK's client; its calls belong into :meth:`errors`."""
        return self._api

    @property
    def is_rootless(self) -> bool:
        """Whether root in its containers is the account that runs it."""
        with self.errors("ask how it runs"):
            return any("rootless" in str(item) for item in self._api.info().get("SecurityOptions") or ())

    def find(self, name: str) -> FoundDaemon | None:
        """An image by its tag or ID."""
        from docker.errors import ImageNotFound

        with self.errors(f"look for image {name}"):
            try:
                found = self._api.inspect_image(name)
            except ImageNotFound:
                return None
        return FoundDaemon(id=str(found["Id"]), labels=(found.get("Config") or {}).get("Labels") or {})

    def find_labelled(self, label: str, value: str) -> str | None:
        """The ID of an image with a label that has a name, too: it was finished."""
        with self.errors("look for an image"):
            found = self._api.images(filters={"label": f"{label}={value}"})
        return next((str(item["Id"]) for item in found if _tags(item)), None)

    def tag(self, image_id: str, name: str) -> None:
        """Give an image a name."""
        repository, _, tag = name.rpartition(":")
        with self.errors(f"tag image {name}"):
            self._api.tag(image_id, repository, tag)

    def remove(self, image_id: str) -> None:
        """Remove an image, if nothing else names or uses it."""
        from docker.errors import APIError

        with self.errors("remove an image"), contextlib.suppress(APIError):
            self._api.remove_image(image_id)

    def pull(self, reference: str) -> None:
        """Fetch an image by its digest, with the credentials of docker's own configuration.

        Raises:
            NetworkError: the registry cannot be reached, or refuses.
        """
        if self.find(reference) is not None:
            return
        with self.errors(f"pull {reference}"):
            for message in self._api.pull(reference, stream=True, decode=True):
                if "error" in message:
                    raise pull_failed(str(message["error"]))

    def build(self, context: Iterable[bytes], parameters: Mapping[str, Json]) -> Iterator[dict[str, Any]]:
        """Build from a context, streamed as a tar; what the daemon says, message by message."""
        yield from self._stream("/build", context, {"version": "2", **parameters}, "build the image")

    def load(self, archive: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        """Load a docker archive, streamed."""
        yield from self._stream("/images/load", archive, {}, "load the image")

    def save(self, image_id: str) -> Iterator[bytes]:
        """An image as a docker archive, streamed."""
        with self.errors("save the image"):
            url = self._api._url("/images/{0}/get", image_id)
            response = self._api._get(url, stream=True, timeout=None)
            try:
                self._api._raise_for_status(response)
                yield from response.iter_content(1 << 20)
            finally:
                response.close()

    def free_bytes(self) -> int | None:
        """What is free on the disk of the daemon, where that is this machine's."""
        if not self.address.startswith("unix:"):
            return None
        with contextlib.suppress(OSError, EnvbuildError), self.errors("ask where its files are"):
            usage = os.statvfs(self._api.info().get("DockerRootDir") or "/")
            return usage.f_bavail * usage.f_frsize
        return None

    def _stream(
        self, path: str, body: Iterable[bytes], parameters: Mapping[str, Json], doing: str
    ) -> Iterator[dict[str, Any]]:
        # The SDK's own build() speaks to the builder before BuildKit alone (its `version` is the API's), and both
        # build() and load_image() stop waiting after the client's time limit.
        with self.errors(doing):
            response = self._api._post(
                self._api._url(path),
                params={key: value for key, value in parameters.items() if value not in (None, "")},
                data=body,
                headers={"Content-Type": "application/x-tar"},
                stream=True,
                timeout=None,
            )
            try:
                self._api._raise_for_status(response)
                yield from self._api._stream_helper(response, decode=True)
            finally:
                response.close()

    @contextlib.contextmanager
    def box(self, image_id: str, held: Path) -> Iterator[Box]:
        """A container of an image that does nothing, to run things in; without a network, gone with the block.

        Args:
            held: a lock file that this process holds until then: a container whose lock nobody holds was left by a
                process that was killed, and goes first.
        """
        self._end_left_over(held)
        with self.errors("start a container"):
            # What is told to end does so at once: nothing in it is worth waiting for.
            made = self._api.create_container(
                image_id,
                entrypoint=["/bin/sh", "-c", "while :; do sleep 1000; done"],
                command=[],
                network_disabled=True,
                labels={HELD_LABEL: str(held)},
                host_config=self._api.create_host_config(network_mode="none", init=False),
                stop_signal="SIGKILL",
            )
        name = str(made["Id"])
        try:
            with self.errors("start a container"):
                self._api.start(name)
            yield Box(self._api, self, name)
        finally:
            with contextlib.suppress(EnvbuildError), self.errors("remove a container"):
                self._api.remove_container(name, force=True)

    def _end_left_over(self, held: Path) -> None:
        from docker.errors import NotFound

        with self.errors("remove a container"):
            for left in self._api.containers(all=True, filters={"label": HELD_LABEL}):
                lock = Path(left["Labels"][HELD_LABEL])
                with locks.exclusive_if_free(lock) as free, contextlib.suppress(NotFound):
                    if free or lock == held:
                        self._api.remove_container(left["Id"], force=True)

    @contextlib.contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Around calls of the SDK: its failures, in our words."""
        with daemon_errors(self.address, doing, self.otherwise):
            yield


def _tags(item: Mapping[str, Any]) -> list[str]:
    return [tag for tag in item.get("RepoTags") or () if tag != "<none>:<none>"]


class Box:
    """A running container."""

    def __init__(self, api: APIClient, engine: Engine, name: str) -> None:
        self._api = api
        self._engine = engine
        self._name = name

    def put(self, folder: str, archive: bytes) -> None:
        """Unpack a tar into a folder that is there."""
        with self._engine.errors("copy into a container"):
            self._api.put_archive(self._name, folder, archive)

    def run(self, argv: list[str], environment: Mapping[str, str], timeout_seconds: float | None) -> tuple[int, bytes]:
        """Run a program; its exit status and output. One that takes too long has status -9: the container is ended."""
        late = threading.Event()

        def end() -> None:
            late.set()
            with contextlib.suppress(Exception):
                self._api.kill(self._name)

        timer = threading.Timer(timeout_seconds, end) if timeout_seconds else None
        with self._engine.errors("run a program in a container"):
            made = self._api.exec_create(self._name, argv, environment=dict(environment))["Id"]
            if timer:
                timer.start()
            try:
                output = b"".join(self._api.exec_start(made, stream=True))
            finally:
                if timer:
                    timer.cancel()
            status = self._api.exec_inspect(made)["ExitCode"]
        return (-9 if late.is_set() or status is None else int(status)), output


def open_engine(environ: Mapping[str, str] = os.environ, *, otherwise: str = NATIVE) -> Engine:
    """The daemon of DOCKER_HOST, of docker's current context, or of the default socket.

    ``otherwise`` names the options of the command at hand that do without a daemon.

    Raises:
        MachineError: none answers there, or this account may not use it.
    """
    try:
        from docker import APIClient
        from docker.context import ContextAPI
        from docker.errors import DockerException
        from docker.tls import TLSConfig
        from docker.utils import kwargs_from_env
    except ImportError as error:
        raise MachineError(
            "a docker daemon is asked with the package docker, which cannot be imported",
            why=str(error),
            fix=f"Install envbuild with its dependencies again, or use {otherwise}.",
        ) from error
    settings: dict[str, Any]
    try:
        if environ.get("DOCKER_HOST"):
            settings = kwargs_from_env(environment=environ)
        else:
            name = environ.get("DOCKER_CONTEXT")
            found = ContextAPI.get_context(name)
            if found is None:
                raise _no_context(name or "the current one")
            tls: TLSConfig | None = found.TLSConfig
            settings = {"base_url": found.Host or DEFAULT_SOCKET, **({"tls": tls} if tls else {})}
            settings["base_url"] = settings["base_url"].replace("http+unix://", "unix://")
    except DockerException as error:
        raise MachineError(
            "docker's settings cannot be used",
            why=mask(str(error)),
            fix="Correct DOCKER_HOST, DOCKER_TLS_VERIFY, DOCKER_CERT_PATH or docker's context. Without a daemon: "
            f"{otherwise}.",
        ) from error
    address = str(settings.get("base_url") or DEFAULT_SOCKET)
    with daemon_errors(address, CONNECT, otherwise):
        return Engine(APIClient(**settings, version="auto", timeout=TIMEOUT_SECONDS), address, otherwise)


def _no_context(name: str) -> MachineError:
    return MachineError(
        f"there is no docker context {name}",
        why="DOCKER_CONTEXT, or currentContext of docker's config.json, names it.",
        fix="`docker context ls` lists them; or name a daemon with DOCKER_HOST.",
    )


@contextlib.contextmanager
def daemon_errors(address: str, doing: str, otherwise: str) -> Iterator[None]:
    """Around calls of the SDK: its failures, and those of what it is made of, in our words."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except EnvbuildError:
        raise
    except APIError as error:
        raise api_failed(str(error.explanation or error), doing, otherwise) from error
    except (DockerException, RequestException, HTTPError, OSError) as error:
        raise _no_answer(address, doing, otherwise, error) from error


def api_failed(why: str, doing: str, otherwise: str) -> EnvbuildError:
    """The error for a request that the daemon refused."""
    if NO_SPACE in why:
        return daemon_disk_full(why)
    if doing.startswith("pull "):
        return pull_failed(why)
    return MachineError(
        f"the docker daemon cannot {doing}",
        why=mask(why),
        fix=f"The words are the daemon's; its log (journalctl -u docker) has more. Without a daemon: {otherwise}.",
    )


def pull_failed(why: str) -> NetworkError:
    """The error for an image that the daemon could not fetch."""
    return NetworkError(
        "the docker daemon cannot pull the base image",
        why=mask(why),
        fix="Check the base's digest, the daemon's network, proxy and registry mirrors, and `docker login`.",
    )


def daemon_disk_full(why: str) -> MachineError:
    """The error for a daemon without space."""
    return MachineError(
        "the disk of the docker daemon is full",
        why=mask(why),
        fix="Free some space there (docker system df; docker builder prune; docker image prune), or move its "
        "data-root. Finished steps are in its cache: run the same command again.",
    )


def _no_answer(address: str, doing: str, otherwise: str, error: BaseException) -> MachineError:
    """The error for a daemon that is not there, does not let us, or went away."""
    number = next((item.errno for item in _causes(error) if isinstance(item, OSError) and item.errno), 0)
    why = mask(str(error))
    if number in (errno.EACCES, errno.EPERM):
        return MachineError(
            f"no permission to use the docker daemon at {mask(address)}",
            why=os.strerror(number),
            fix="Ask for this account to be put into the socket's group (usermod -aG docker USER; whoever is in it is "
            f"as good as root), use rootless docker or podman, or {otherwise}.",
        )
    if doing in (CONNECT, VERSION):
        reason = os.strerror(number) if number else why
        socket = Path(address.removeprefix("unix://"))
        if number == errno.ENOENT and address.startswith("unix://"):
            reason = f"there is no socket {socket}"
        return MachineError(
            f"no docker daemon answers at {mask(address)}", why=reason, fix=f"{START} Without a daemon: {otherwise}."
        )
    return MachineError(
        f"the docker daemon at {mask(address)} went away: it did not {doing}",
        why=why,
        fix="See its log (journalctl -u docker), start it again, and run the same command: steps that were finished "
        "are in its cache, and nothing half-done was kept.",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came from, and what these hold as arguments (requests and urllib3 wrap so)."""
    seen: list[BaseException] = []
    pending = [error]
    while pending:
        one = pending.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        yield one
        pending += [one.__cause__, one.__context__, *(item for item in one.args if isinstance(item, BaseException))]
        pending.append(
            getattr(one, "reason", None) if isinstance(getattr(one, "reason", None), BaseException) else None
        )
