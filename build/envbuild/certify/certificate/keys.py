"""Ed25519 keys: made, read from where a user names them, and known by the digest of their public half."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.core.files import NotPlainFileError, machine_errors, read_plain
from envbuild.core.text import quoted_command

KEYGEN = "envbuild certificate keygen --out DIR"
MAKE, MAKE_FIT = f"Make one: {KEYGEN}", f"Make one that can: {KEYGEN}"
BY_REFERENCE = "Name a variable or a file that holds it: env:NAME or file:PATH."
WRONG_OR_DAMAGED = (
    "Name the right password (--key-password, or signing.password of the configuration). If the key is damaged, take "
    "your copy of it."
)
FROM_OWNER = "Get the public key (NAME.pub) from its owner, and put it there; or leave the key out of the trust file."
PEM_BLOCK = "-----BEGIN "
VARIABLE_PREFIX, FILE_PREFIX = "env:", "file:"
# A PEM file of an Ed25519 key has some 120 bytes; with a password some 300.
LARGEST_BYTES = 64 << 10


@dataclass(frozen=True)
class KeyFiles:
    """A pair of keys that was made."""

    private: Path
    public: Path
    keyid: str


def keyid_of(key: Ed25519PublicKey) -> str:
    """The SHA-256 of the key in DER: ``openssl pkey -pubin -in FILE -outform DER | sha256sum``."""
    return sha256_bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).removeprefix("sha256:")


def make_keys(folder: Path, name: str, password: str | None) -> KeyFiles:
    """Make a pair of keys in a folder: ``NAME.key``, which only its owner may read, and ``NAME.pub``.

    Raises:
        UsageError: there is such a file already.
    """
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    key = Ed25519PrivateKey.generate()
    locked: KeySerializationEncryption = NoEncryption()
    if password is not None:
        locked = BestAvailableEncryption(password.encode())
    with machine_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _create(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked), 0o600)
        try:
            _create(public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)
        except BaseException:
            # A private key alone would take the name from the next attempt.
            private.unlink()
            raise
    return KeyFiles(private, public, keyid_of(key.public_key()))


def _create(path: Path, data: bytes, mode: int) -> None:
    """Write a new file that has its mode from its first moment."""
    try:
        # With O_EXCL open(2) refuses links too, also those that lead nowhere.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise UsageError(
            f"{path} exists already",
            why="A key that was lost cannot be made again, so none is overwritten.",
            fix="Choose another --name or --out, or move the old key away yourself.",
        ) from None
    try:
        with os.fdopen(descriptor, "wb") as stream:
            # The umask may have taken bits from the mode of open(2).
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        path.unlink()
        raise


def secret_of(reference: str, what: str, environ: Mapping[str, str]) -> str:
    """What a reference stands for: ``env:NAME`` a variable, ``file:PATH`` a file without its last line end.

    Raises:
        ConfigurationError: it is neither, or there is nothing.
    """
    unnamed = {VARIABLE_PREFIX: "variable", FILE_PREFIX: "file"}.get(reference)
    if unnamed is None and reference.startswith(VARIABLE_PREFIX):
        name = reference.removeprefix(VARIABLE_PREFIX)
        if not environ.get(name):
            why = f"The variable {name} is unset or empty."
            raise ConfigurationError(f"{what} does not exist", why=why, fix=f"Set {name}, or name a file.")
        return environ[name]
    if unnamed is None and reference.startswith(FILE_PREFIX):
        path = Path(reference.removeprefix(FILE_PREFIX)).expanduser()
        # Editors and `echo` end a file with a line end that is no part of the password.
        return _text(path, what, missing=BY_REFERENCE, unfit=BY_REFERENCE).rstrip("\r\n")
    why = f"Behind {reference} no {unnamed} is named." if unnamed else "A secret is named and never written out."
    raise ConfigurationError(f"{what} is not named as it should be", why=why, fix=BY_REFERENCE)


def load_private(reference: str, password: str | None, environ: Mapping[str, str] = os.environ) -> Ed25519PrivateKey:
    """The private key of a file, or with ``env:NAME`` of a variable that holds the PEM text.

    Args:
        password: a reference (:func:`secret_of`) to the password that it is locked with.

    Raises:
        ConfigurationError: it does not exist, cannot be read, can be read by others, or is of another kind.
    """
    what = f"the signing key {reference}"
    if reference.startswith(VARIABLE_PREFIX) or reference == FILE_PREFIX:  # an empty path would be the folder
        text = secret_of(reference, what, environ)
    else:
        path = Path(reference.removeprefix(FILE_PREFIX)).expanduser()
        text = _text(path, what, missing=MAKE, unfit=MAKE_FIT)
        if "PUBLIC KEY" not in text:  # which everybody may read; it is refused for what it is
            _refuse_open_to_others(path)
    word = secret_of(password, "the password of the signing key", environ) if password else None
    try:
        key = load_pem_private_key(_one_key(text), word.encode() if word is not None else None)
        if isinstance(key, Ed25519PrivateKey):
            return key
    except TypeError as error:
        # cryptography's way to say so, in both directions.
        if word is None:
            raise ConfigurationError(
                f"{what} is locked with a password",
                why="No password was named.",
                fix="Name it with --key-password env:NAME or file:PATH (signing.password in the configuration).",
            ) from error
        raise ConfigurationError(
            f"{what} is not locked", why="A password was named for it.", fix="Leave the password out."
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        if word is not None:
            raise _unfit(what, "The password is wrong, or the key is damaged.", WRONG_OR_DAMAGED) from error
    raise _unfit(what, "It is not a PEM file with one private Ed25519 key, and nothing else.")


def _one_key(text: str) -> bytes:
    """The PEM text of a key; a ValueError where it holds several, of which a loader takes the first."""
    if text.count(PEM_BLOCK) > 1:
        raise ValueError("it holds more than one key")
    return text.strip().encode()


def _refuse_open_to_others(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigurationError(
            f"others can read the signing key {path}",
            why=f"Its mode is {mode:04o}; whoever can read it can sign as you.",
            fix=quoted_command("chmod", "600", path),
        )


def _text(path: Path, what: str, *, missing: str, unfit: str) -> str:
    """The text of a file; ``missing`` and ``unfit`` say what to do where it does not exist, or is not text."""
    with machine_errors(path, "read"):
        try:
            return read_plain(path, LARGEST_BYTES).decode()
        except FileNotFoundError:
            raise ConfigurationError(f"{what} does not exist", why=f"{path} does not exist.", fix=missing) from None
        except NotPlainFileError as error:
            raise _unfit(what, f"{error}.", unfit) from error
        except UnicodeDecodeError as error:
            raise _unfit(what, f"{path} is not text.", unfit) from error


def _unfit(what: str, why: str, fix: str = MAKE_FIT) -> ConfigurationError:
    return ConfigurationError(f"{what} cannot be used", why=why, fix=fix)


def parse_public(text: str, what: str) -> Ed25519PublicKey:
    """A public key from PEM text.

    Raises:
        ConfigurationError: it is not one.
    """
    if "PRIVATE KEY" in text:
        raise ConfigurationError(
            f"{what} is a private key",
            why="A file of trusted keys is passed around, and a private key must not be.",
            fix="Put the public key there (NAME.pub). If the file was passed on, make a new key and revoke this one.",
        )
    try:
        key = load_pem_public_key(_one_key(text))
        if isinstance(key, Ed25519PublicKey):
            return key
    except (ValueError, UnsupportedAlgorithm):
        pass
    raise ConfigurationError(
        f"{what} is not a public key", why="It is not PEM text of one Ed25519 key, and of nothing else.", fix=FROM_OWNER
    )


def read_public(path: Path, what: str) -> Ed25519PublicKey:
    """A public key from a PEM file; raises as :func:`parse_public`."""
    return parse_public(_text(path, what, missing=FROM_OWNER, unfit=FROM_OWNER), what)
