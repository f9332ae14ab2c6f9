"""Addresses of remote stores, as people write them: ``oci://``, ``s3://``, ``gs://`` and ``file://``."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from dataclasses import dataclass

from envbuild.core.errors import ConfigurationError
from envbuild.core.exit_status import mask

FORMS = {
    "oci": "oci://HOST[:PORT]/REPOSITORY",
    "s3": "s3://BUCKET[/PREFIX]",
    "gs": "gs://BUCKET[/PREFIX]",
    "file": "file:///DIRECTORY",
}
# Of stores that hold objects in buckets.
BUCKET_SCHEMES = ("s3", "gs")
BUCKET_PREFIXES = tuple(f"{scheme}://" for scheme in BUCKET_SCHEMES)
# OCI distribution-spec 1.1, "Pulling manifests"
_REPOSITORY = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
# Google takes up to 222 characters where a name has dots; S3 takes 63.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
# A name or an IPv4 address, or an IPv6 address in brackets (RFC 3986, 3.2.2); and a port.
_HOST = re.compile(r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a remote store is.

    Attributes:
        host: of a registry with its port, or the bucket; empty for directories.
        path: the repository, the prefix, or the directory.
    """

    scheme: str
    host: str
    path: str

    def __str__(self) -> str:
        path = self.path.lstrip("/")
        return f"{self.scheme}://{self.host}/{path}" if path or not self.host else f"{self.scheme}://{self.host}"

    @property
    def is_loopback(self) -> bool:
        """Whether the host is this machine itself, which needs no TLS."""
        return is_loopback(urllib.parse.urlsplit(f"//{self.host}").hostname or "")


def is_loopback(host: str) -> bool:
    """Whether a host's name or number means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> Address:
    """The address that ``text`` is.

    Raises:
        ConfigurationError: it is none, or has a password in it.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in FORMS:
        raise _wrong(text, "It begins with none of " + ", ".join(f"{name}://" for name in FORMS) + ".")
    if "@" in rest.partition("/")[0]:
        raise ConfigurationError(
            f"the address of the store {mask(text)} holds a user name or password",
            why="Addresses are printed and written into logs.",
            fix="Leave it out. Credentials come from the docker configuration (oci), AWS_* and ~/.aws (s3), or "
            "GOOGLE_APPLICATION_CREDENTIALS (gs).",
        )
    if re.search(r"[\s?#\x00-\x1f\x7f]", rest):
        raise _wrong(text, "It has a space, a control character, '?' or '#' in it.")
    host, _, path = rest.partition("/")
    path = path.strip("/")
    if scheme == "file":
        if host or not path:
            raise _wrong(text, "It names a directory by its path from the root, after three slashes.")
        return Address(scheme=scheme, host="", path=f"/{urllib.parse.unquote(path)}")
    if any(part in ("", ".", "..") for part in path.split("/") if path):
        raise _wrong(text, "Its path has an empty part, '.' or '..'.")
    if scheme == "oci" and not (_HOST.fullmatch(host) and _REPOSITORY.fullmatch(path)):
        raise _wrong(text, "It needs a host and a repository in small letters, digits, '.', '_', '-' and '/'.")
    if scheme == "oci" and (port := re.search(r":(\d+)$", host)) and not 0 < int(port[1]) < 1 << 16:
        raise _wrong(text, f"{port[1]} is not a port: ports are 1 to 65535.")
    if scheme in BUCKET_SCHEMES and not _BUCKET.fullmatch(host):
        raise _wrong(text, f"{host!r} is not a bucket name.")
    return Address(scheme=scheme, host=host, path=path)


def _wrong(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{mask(text)!r} is not the address of a store",
        why=f"{why}\nAddresses are: {', '.join(FORMS.values())}.",
        fix="Correct it where it is set: the option (--store, --to, --sqsh-to, --state), ENVBUILD_STORE, or "
        "[stores.NAME] of the configuration file.",
    )
