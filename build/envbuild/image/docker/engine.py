"""The docker daemon: which one it is, and its failures as errors of envbuild. Podman's socket works as well."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.core.errors import EnvbuildError, MachineError
from envbuild.core.exit_status import mask

if TYPE_CHECKING:
    from docker import APIClient

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
# For every request but a load, which may take as long as it takes.
TIMEOUT_SECONDS = 60
# The first two requests: a daemon that does not answer them is not running; later, it went away.
CONNECT, VERSION = "connect", "report its version"
NO_SPACE = "no space left on device"
START = (
    "Start one (systemctl start docker), or name another with DOCKER_HOST or `docker context use`; podman's socket "
    "works too (systemctl start podman.socket; DOCKER_HOST=unix:///run/podman/podman.sock)."
)


class Engine:
    """A daemon that answered.

    Attributes:
        api: the SDK's client; wrap its calls in :meth:`errors`.
        otherwise: the options with which the command needs no daemon; the help of errors names them.
    """

    def __init__(self, api: APIClient, address: str, otherwise: str) -> None:
        self.api = api
        self.address = address
        self.otherwise = otherwise
        with self.errors(VERSION):
            version = api.version()
        components = {component["Name"] for component in version.get("Components", ())}
        # Podman answers the same requests; the components that it lists tell it from docker.
        self.is_podman = "Podman Engine" in components
        self.version = f"{'podman' if self.is_podman else 'docker'} {version.get('Version', 'of unknown version')}"

    @property
    def is_rootless(self) -> bool:
        """Whether root in its containers is the account that runs it."""
        with self.errors("report how it runs"):
            return any("rootless" in str(option) for option in self.api.info().get("SecurityOptions") or ())

    def find(self, name: str) -> str | None:
        """The ID of an image (the digest of its configuration), by its tag or ID."""
        from docker.errors import ImageNotFound

        with self.errors(f"look for image {name}"), contextlib.suppress(ImageNotFound):
            return str(self.api.inspect_image(name)["Id"])
        return None

    def tag(self, image_id: str, name: str) -> None:
        repository, _, tag = name.rpartition(":")
        with self.errors(f"tag image {name}"):
            self.api.tag(image_id, repository, tag)

    def load(self, archive: Iterable[bytes]) -> str:
        """Load a docker archive while it is generated; return the daemon's error message, empty on success."""
        with self.errors("load the image"):
            # A load takes as long as the image is large; the SDK's limit is for each request.
            self.api.timeout = None
            try:
                errors = [str(message["error"]) for message in self.api.load_image(archive) if message.get("error")]
            finally:
                self.api.timeout = TIMEOUT_SECONDS
        return errors[-1] if errors else ""

    def errors(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Turn failures of the SDK's calls into errors of envbuild."""
        return daemon_errors(self.address, doing, self.otherwise)


def open_engine(environ: Mapping[str, str] = os.environ, *, otherwise: str) -> Engine:
    """The daemon of DOCKER_HOST, of docker's current context, or of the default socket.

    Args:
        otherwise: the options with which the command needs no daemon.

    Raises:
        MachineError: no daemon answers, or this account may not use it.
    """
    from docker import APIClient
    from docker.errors import DockerException

    try:
        settings = _settings(environ)
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


def _settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """The SDK's arguments for the daemon that the docker command line would use."""
    from docker.context import ContextAPI
    from docker.utils import kwargs_from_env

    if environ.get("DOCKER_HOST"):
        return dict(kwargs_from_env(environment=environ))
    name = environ.get("DOCKER_CONTEXT")
    context = ContextAPI.get_context(name)
    if context is None:
        raise MachineError(
            f"there is no docker context {name or 'with the name of the current one'}",
            why="DOCKER_CONTEXT, or currentContext of docker's config.json, names it.",
            fix="`docker context ls` lists them; or name a daemon with DOCKER_HOST.",
        )
    # Contexts have the address in the SDK's spelling (docker.utils.parse_host); messages have that of DOCKER_HOST.
    address = (context.Host or DEFAULT_SOCKET).replace("http+unix://", "unix://")
    return {"base_url": address, **({"tls": context.TLSConfig} if context.TLSConfig else {})}


@contextlib.contextmanager
def daemon_errors(address: str, doing: str, otherwise: str) -> Iterator[None]:
    """Turn failures of the SDK, and of the libraries that it uses, into errors of envbuild."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    try:
        yield
    # An error of the archive that is sent comes through the SDK, and is not the daemon's.
    except EnvbuildError:
        raise
    except APIError as error:
        why = str(error.explanation or error)
        if NO_SPACE in why:
            raise disk_full(why) from error
        raise MachineError(
            f"the docker daemon cannot {doing}",
            why=mask(why),
            fix=f"See the daemon's log (journalctl -u docker). Without a daemon: {otherwise}.",
        ) from error
    except (DockerException, RequestException, HTTPError, OSError) as error:
        raise _no_answer(address, doing, otherwise, error) from error


def disk_full(why: str) -> MachineError:
    """The error for a daemon whose disk is full."""
    return MachineError(
        "the disk of the docker daemon is full",
        why=mask(why),
        fix="Free some space there (docker system df; docker builder prune; docker image prune), or move its "
        "data-root, and run the same command again.",
    )


def _no_answer(address: str, doing: str, otherwise: str, error: BaseException) -> MachineError:
    """The error for a daemon that does not run, refuses this account, or went away."""
    number = next((cause.errno for cause in _causes(error) if isinstance(cause, OSError) and cause.errno), 0)
    why = mask(str(error))
    if number in (errno.EACCES, errno.EPERM):
        return MachineError(
            f"no permission to use the docker daemon at {mask(address)}",
            why=os.strerror(number),
            fix="Add this account to the socket's group (usermod -aG docker USER; its members are as good as root), "
            f"use rootless docker or podman, or {otherwise}.",
        )
    if doing in (CONNECT, VERSION):
        reason = os.strerror(number) if number else why
        if number == errno.ENOENT and address.startswith("unix://"):
            reason = f"there is no socket {Path(address.removeprefix('unix://'))}"
        return MachineError(
            f"no docker daemon answers at {mask(address)}", why=reason, fix=f"{START} Without a daemon: {otherwise}."
        )
    return MachineError(
        f"the docker daemon at {mask(address)} went away: it did not {doing}",
        why=why,
        fix="See its log (journalctl -u docker), start it again, and run the same command.",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its causes, and the errors in their arguments (requests and urllib3 wrap errors in these ways)."""
    seen: list[BaseException] = []
    pending: list[object] = [error]
    while pending:
        one = pending.pop()
        if isinstance(one, BaseException) and one not in seen:
            seen.append(one)
            yield one
            pending += [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]
