"""The keys that a user trusts: an explicit file, and nothing else. A certificate never brings its own key along."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from envbuild.catalog import toml
from envbuild.catalog.fields import moment_of
from envbuild.catalog.trust import TrustedKeySettings, TrustFile
from envbuild.certify.certificate.keys import keyid_of, parse_public, read_public
from envbuild.core.errors import ConfigurationError, UsageError

WANTED = toml.Wanted(
    "the trust file",
    why="It names the keys that you trust; without it no certificate counts.",
    fix="Name the one that you have (--trust FILE, or signing.trust of the configuration), or write it with a public "
    'key that you got from its owner (docs/reference/certificate.md has more):\n[keys.lab]\nfile = "lab.pub"',
)


@dataclass(frozen=True)
class TrustedKey:
    """A key whose signatures count, as far as its settings say."""

    name: str
    keyid: str
    key: Ed25519PublicKey
    settings: TrustedKeySettings

    def outside(self, moment: datetime) -> str:
        """Why it does not count at a moment; empty when it does."""
        if self.settings.not_before and moment < moment_of(self.settings.not_before):
            return f"key {self.name} counts from {self.settings.not_before} on"
        if self.settings.not_after and moment > moment_of(self.settings.not_after):
            return f"key {self.name} expired: it counts until {self.settings.not_after}"
        return ""


@dataclass(frozen=True)
class Trust:
    """The keys of a trust file by their ID."""

    path: Path
    keys: dict[str, TrustedKey]

    def names(self) -> str:
        """The keys for people."""
        return ", ".join(f"{key.name} ({key.keyid[:16]})" for key in self.keys.values())


def require_trust(trust: Trust | None) -> Trust:
    """The trusted keys that a user named.

    Raises:
        UsageError: none are named.
    """
    if trust is None:
        raise UsageError(
            "no trusted keys are named",
            why="There is neither --trust nor signing.trust in the configuration.",
            fix="Name a file of public keys: --trust trust.toml (docs/reference/certificate.md shows one).",
        )
    return trust


def load_trust(path: Path) -> Trust:
    """Read a trust file.

    Raises:
        ConfigurationError: it is not there, not as it should be, or has a key twice.
    """
    keys: dict[str, TrustedKey] = {}
    for name, settings in toml.load(path, TrustFile, WANTED).keys.items():
        what = f"key {name} of {path}"
        if settings.public is not None:
            key = parse_public(settings.public, what)
        else:
            # An absolute path, which ~ becomes too, takes the place of the folder (pathlib).
            key = read_public(path.parent / Path(settings.file or "").expanduser(), what)
        keyid = keyid_of(key)
        if keyid in keys:
            # A revoked key must not go on under another name.
            raise ConfigurationError(
                f"{path} has one key under two names",
                why=f"{keys[keyid].name} and {name} are the same key.",
                fix="Leave one of them out.",
            )
        keys[keyid] = TrustedKey(name, keyid, key, settings)
    return Trust(path, keys)
