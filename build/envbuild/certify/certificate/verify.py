"""Whether a certificate counts: whose signature it has, when, and what it is about.

The rules, in this order; each refuses with words of its own:

1. the file has the one form that envbuild writes, with one signature;
2. its key is in the trust file, and is not revoked;
3. the signature is that key's, of just these bytes; nothing in the file is believed before;
4. the moment of verification and the moment of issue both lie within the key's time. Either alone would not do: the
   signer writes the moment of issue, so that a stolen key would write an old one, and a new trust file proves
   nothing about an older certificate;
5. the certificate is not from the future, and not older than allowed;
6. its stack and target are those that the key is trusted for;
7. it is about the image, digest or lock that was named, which is hashed here and now.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from envbuild.catalog.fields import MOMENT_FORMAT, moment_of
from envbuild.certify.certificate.envelope import SignedBytes
from envbuild.certify.certificate.file import CertificateFile, open_certificate
from envbuild.certify.certificate.sign import verifies
from envbuild.certify.certificate.statement import Certificate
from envbuild.certify.certificate.trust import Trust, TrustedKey
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CertificateRefusedError, ConfigurationError
from envbuild.core.files import machine_errors
from envbuild.image.inspect.open import place_and_tag
from envbuild.image.output import OCI_DIR, SQSH_FILE
from envbuild.lock.lockfile import read_lock
from envbuild.oci.files import FolderFiles
from envbuild.oci.layout import open_layout
from envbuild.oci.models import INDEX_FILE


@dataclass(frozen=True)
class VerifiedCertificate:
    """A certificate that counts.

    Attributes:
        key: whose signature it has.
        compared: descriptions of what was hashed here and is what the certificate is about.
        content: of the file, as it was verified.
    """

    statement: Certificate
    key: TrustedKey
    compared: tuple[str, ...]
    content: SignedBytes


@dataclass(frozen=True, kw_only=True)
class About:
    """What the certificate must be about; None where anything is allowed. An image may be ``FOLDER:TAG``."""

    image: Path | None = None
    digest: str | None = None
    lock: Path | None = None


def verify(
    path: Path, trust: Trust, about: About, *, at: datetime, max_age: timedelta | None = None
) -> VerifiedCertificate:
    """Verify a certificate.

    Args:
        at: the moment of verification: now, or an earlier one at which the verifier knows that it was there.
        max_age: how old its numbers may be, reused ones included.

    Raises:
        CertificateRefusedError: it does not count.
        ConfigurationError: a file is not there.
    """
    # In this order: the statement is parsed only after its signature, so that no one but a trusted signer writes it.
    file = open_certificate(path)
    key = _signed_by(file, trust)
    statement = file.statement()
    _check_times(file, statement, key, at, max_age)
    _check_limits(file, statement, key)
    return VerifiedCertificate(statement, key, _check_subject(file, statement, about), file.content)


def _signed_by(file: CertificateFile, trust: Trust) -> TrustedKey:
    signed = file.content.signed
    if signed is None:
        raise file.refuse(
            "It is not signed: it proves nothing about who measured its numbers.",
            "Certify with a key (envbuild certify --key FILE). `envbuild certificate show` prints it.",
            "not-signed",
        )
    key = trust.keys.get(signed.keyid)
    if key is None:
        raise file.refuse(
            f"It names key {signed.keyid!r:.80}; {trust.path} has other keys: {trust.names()}.",
            "If you trust the signer, get the public key from them (not from next to the certificate) and add it.",
            "unknown-key",
        )
    if key.settings.revoked is not None:
        raise file.refuse(
            f"Key {key.name} was revoked: {key.settings.revoked}. Nothing that it signed counts, whenever that was.",
            "Get a certificate that another key signed.",
            "revoked-key",
        )
    if not verifies(file.content, key.key):
        why = f"Its signature is not key {key.name}'s for this content: it was changed, or forged."
        raise file.refuse(why, reason="signature")
    return key


def _check_times(
    file: CertificateFile, statement: Certificate, key: TrustedKey, at: datetime, max_age: timedelta | None
) -> None:
    issued = moment_of(statement.predicate.issued_at)
    for moment, what in ((issued, "was issued at"), (at, "is verified for")):
        if outside := key.outside(moment):
            raise file.refuse(
                f"{outside[0].upper()}{outside[1:]}; the certificate {what} {moment.strftime(MOMENT_FORMAT)}.",
                "Get one that was signed by a key in its time. If you know that this file was there while the key "
                "counted, verify it for that moment: --at.",
                "key-time",
            )
    if future := statement.future(at):
        raise file.refuse(
            f"{future[0].upper()}{future[1:]}.",
            "Look at the clocks of both machines, and at --at; get one from a machine whose clock is right.",
            "from-the-future",
        )
    # The moment of issue alone would make reused numbers look fresh.
    oldest = oldest_measurement(statement)
    if max_age is not None and at - moment_of(oldest) > max_age:
        raise file.refuse(
            f"Its oldest numbers are from {oldest}; at most {max_age / timedelta(days=1):g} days are allowed.",
            "Certify again, with --fresh.",
            "too-old",
        )


def oldest_measurement(statement: Certificate) -> str:
    """When the oldest numbers in it were measured."""
    return min([*statement.measurements(), statement.predicate.issued_at])


def _check_limits(file: CertificateFile, statement: Certificate, key: TrustedKey) -> None:
    predicate, settings = statement.predicate, key.settings
    for what, actual, allowed in (
        ("stack", predicate.stack, settings.stacks),
        ("target", predicate.target, settings.targets),
    ):
        if allowed is not None and actual not in allowed:
            raise file.refuse(
                f"It is about {what} {actual}; key {key.name} is trusted for {', '.join(allowed)}.",
                "Get one from a signer whom you trust with that.",
                "key-scope",
            )


def _check_subject(file: CertificateFile, statement: Certificate, about: About) -> tuple[str, ...]:
    compared = []
    if about.digest is not None:
        compared.append(_same(file, statement, about.digest, "the digest that was named"))
    if about.image is not None:
        compared += [_same(file, statement, digest, what) for what, digest in _image_digests(about.image).items()]
    if about.lock is not None:
        # Not one of the subjects: the certificate of an image is about the image's lock, too.
        locked = read_lock(about.lock).lock.digest
        if locked != statement.predicate.lock_digest:
            stated = f"{statement.predicate.lock_digest} (its lock)"
            raise _about_another(file, stated, f"the lock in {about.lock}", locked)
        compared.append(f"the lock in {about.lock}: {locked}")
    return tuple(compared)


def _same(file: CertificateFile, statement: Certificate, digest: str, what: str) -> str:
    for name, stated in statement.digests().items():
        if stated == digest:
            return f"{what}: {name}, {digest}"
    stated = ", ".join(f"{name} {digest}" for name, digest in statement.digests().items())
    raise _about_another(file, stated, what, digest)


def _about_another(file: CertificateFile, stated: str, what: str, actual: str) -> CertificateRefusedError:
    return file.refuse(
        f"It is about {stated}; this is another one: {what}, {actual}.",
        "Get the certificate of this one, or this certificate's own image.",
        "another-image",
    )


def _image_digests(named: Path) -> dict[str, str]:
    """The digest of each form of an image, from its bytes: a .sqsh, an OCI layout, or a folder of out/images.

    Args:
        named: with the tag of an image in a layout: ``FOLDER:TAG``.
    """
    path, tag = place_and_tag(str(named))
    with machine_errors(path, "read"):
        if path.is_file() and not tag:
            return {str(path): sha256_file(path)}
        digests = {}
        for layout in (path, path / OCI_DIR):
            if (layout / INDEX_FILE).is_file():
                digests[f"the OCI layout {layout}{tag and f':{tag}'}"] = _layout_digest(layout, tag)
        if not tag and (path / SQSH_FILE).is_file():
            digests[str(path / SQSH_FILE)] = sha256_file(path / SQSH_FILE)
    if not digests:
        raise ConfigurationError(
            f"there is no image {named}",
            why=f"{path} is a file, and has no tags."
            if path.is_file()
            else f"{path} is not an OCI layout, and has neither {OCI_DIR}/ nor {SQSH_FILE}.",
            fix="Name a .sqsh file, an OCI layout (FOLDER or FOLDER:TAG), or a folder of out/images.",
        )
    return digests


def _layout_digest(path: Path, tag: str) -> str:
    """The manifest's digest, after every blob was held to its own; CheckRefusedError where one differs."""
    image = open_layout(FolderFiles(path), tag)
    for layer in image.layers:
        if layer.check:
            layer.check()
    return image.digest
