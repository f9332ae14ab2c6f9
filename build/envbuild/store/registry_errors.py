"""The errors of requests to a registry: what it answered, why, and what helps."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuild.core import jsonread
from envbuild.core.errors import NetworkError
from envbuild.store.address import Address
from envbuild.store.docker_config import Credentials

if TYPE_CHECKING:
    from urllib3.exceptions import HTTPError

RETRIES = 5
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How errors speak of a registry.

    Attributes:
        noun: what it is to those who read them.
        otherwise: how to go on without it.
    """

    noun: str
    otherwise: str = ""


STORE = Wording(noun="store", otherwise=" ENVBUILD_STORE=off goes on without it.")


@dataclass(frozen=True)
class RegistryErrors:
    """Makes the errors of one repository."""

    address: Address
    wording: Wording

    @property
    def name(self) -> str:
        """What errors call the registry."""
        return f"the {self.wording.noun} {self.address}"

    def unreachable(self, request: str, error: HTTPError) -> NetworkError:
        """That there is no answer, however often it was tried."""
        cause = getattr(error, "reason", None) or error
        # Without the object's address, which urllib3's texts begin with.
        text = re.sub(r"<[^>]*object at 0x[0-9a-f]+>:? ?", "", str(cause))[:MESSAGE_CHARACTERS]
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return NetworkError(
                f"{self.name} is not trusted",
                why=f"{request}: {text}",
                fix="This machine does not trust the CA of its TLS certificate. Name that CA's file: ca_bundle in the "
                "configuration, or SSL_CERT_FILE.",
            )
        return NetworkError(
            f"{self.name} cannot be reached",
            why=f"{request}: {text}; tried {RETRIES + 1} times.",
            fix="Check the address, the network and the proxy. Run the same command again: what was transferred "
            f"whole is kept.{self.wording.otherwise}",
        )

    def too_slow(self, request: str, count: int, size_bytes: int, seconds: float) -> NetworkError:
        """That a file is not there after the time that is enough for its size."""
        return NetworkError(
            f"{self.name} is too slow",
            why=f"{request}: {count} of {size_bytes} bytes after {seconds:.0f} s.",
            fix="Check the network and the proxy. Run the same command again: a .sqsh goes on where it ended."
            f"{self.wording.otherwise}",
        )

    def without_tls(self, realm: urllib.parse.SplitResult) -> NetworkError:
        """That credentials would be sent in the clear."""
        return NetworkError(
            f"{self.name} asks for credentials at a place without TLS",
            why=f"Its tokens come from {realm.scheme}://{realm.netloc}.",
            fix="Nothing was sent there. Have the registry's administrators name a place with https.",
        )

    def no_token(self, realm: urllib.parse.SplitResult) -> NetworkError:
        """That its token server's answer has no token."""
        return NetworkError(
            f"{self.name} gives no token",
            why=f"The answer of {realm.netloc} has none in it.",
            fix=f"Its administrators have to look at it.{self.wording.otherwise}",
        )

    def refused(
        self, request: str, status: int, body: bytes, credentials: Credentials | None, elsewhere: str = ""
    ) -> NetworkError:
        """That it answered with an error.

        Args:
            credentials: as whom it was asked.
            elsewhere: the host that answered, where the registry redirects to it.
        """
        tried = f", tried {RETRIES + 1} times" if status in TRANSIENT else ""
        detail = f" Its message: {message}" if (message := _message(body)) else ""
        if elsewhere:
            return NetworkError(
                f"{elsewhere}, to which {self.name} redirects, refuses: status {status}",
                why=f"{request} was redirected there{tried}.{detail} The registry itself allowed it.",
                fix="Such an address is signed for some minutes: check this machine's clock, and whether network and "
                f"proxy let {elsewhere} through; then run the same command again.{self.wording.otherwise}",
            )
        account = f"as {credentials.user} (from {credentials.source})" if credentials else "without a name"
        host = self.address.host
        login = f"Log in: docker login {host} (or podman, skopeo, oras: their files are read)."
        fixes = {
            401: login if credentials is None else f"The credentials are refused; {login[0].lower()}{login[1:]}",
            403: f"Give the account the right to this repository, or use another one. {login}",
            404: "Correct the address of the repository; some registries want it made first.",
            405: "It takes no uploads: it is read-only, in maintenance, or a mirror. Name one that takes them.",
            413: "A proxy before it refuses large requests: have its limit raised to 64 MiB at least.",
            507: "Its disk or quota is full: free some there, or have it raised; what was sent whole is kept.",
            429: "It is overloaded, or its limit is used up: run the same command again later.",
        }
        return NetworkError(
            f"{self.name} refuses: status {status}",
            why=f"{request}, {account}{tried}.{detail}",
            fix=f"{fixes.get(status, 'Run the same command again later.')}{self.wording.otherwise}",
        )


def _message(body: bytes) -> str:
    """What a registry reports of an error (OCI distribution-spec, "Error Codes"), on one line."""
    try:
        errors = jsonread.foreign(body)["errors"]
        text = "; ".join(str(error.get("message") or error.get("code")) for error in errors)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text)[:MESSAGE_CHARACTERS]
