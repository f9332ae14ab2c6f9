"""Reads the file of a certificate. Its signature is checked by ``verify``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from envbuild.certify.certificate.envelope import (
    LARGEST_BYTES,
    NotAnEnvelopeError,
    SignedBytes,
    decode,
)
from envbuild.certify.certificate.statement import Certificate, in_current_form, seal_of
from envbuild.core import jsonread
from envbuild.core.errors import CertificateRefusedError, ConfigurationError
from envbuild.core.files import NotPlainFileError, machine_errors, read_plain
from envbuild.core.validation import describe_errors

AGAIN = "Get the file again from where it was made, as it was written, or run `envbuild certify`: it makes a new one."


@dataclass(frozen=True)
class CertificateFile:
    """The file of a certificate, taken apart."""

    path: Path
    content: SignedBytes

    @property
    def keyid(self) -> str | None:
        """The key that it names as its signer's; None without a signature."""
        return self.content.signed.keyid if self.content.signed else None

    def refuse(self, why: str, fix: str = AGAIN, reason: str = "") -> CertificateRefusedError:
        return refusal(self.path, why, fix, reason)

    def statement(self) -> Certificate:
        """Its statement.

        Raises:
            CertificateRefusedError: it is not the statement of a certificate, or its seal is broken.
        """
        try:
            raw = jsonread.loads(self.content.payload)
            # strict: else 1 would pass for true.
            statement = Certificate.model_validate_json(json.dumps(in_current_form(raw)), strict=True)
            expected = seal_of(raw)
        except ValidationError as error:
            raise self.refuse(f"Its payload is not a certificate: {describe_errors(error)}.") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.refuse(f"Its payload is not a certificate: {error}.") from error
        if statement.predicate.seal != expected:
            raise self.refuse(f"Its seal is {statement.predicate.seal}, its content has {expected}.")
        return statement


def refusal(path: Path, why: str, fix: str = AGAIN, reason: str = "") -> CertificateRefusedError:
    """The error for a certificate that does not count."""
    return CertificateRefusedError(f"the certificate {path} is refused", why=why, fix=fix, reason=reason)


def open_certificate(path: Path) -> CertificateFile:
    """The file of a certificate.

    Raises:
        ConfigurationError: there is no such file.
        CertificateRefusedError: it is not the file of a certificate.
    """
    with machine_errors(path, "read"):
        try:
            data = read_plain(path, LARGEST_BYTES)
        except FileNotFoundError:
            raise ConfigurationError(
                f"there is no certificate {path}",
                why="The file does not exist.",
                fix="`envbuild certify` writes one and ends with its path.",
            ) from None
        except NotPlainFileError as error:
            raise refusal(path, f"{error}.", "Name the file that `envbuild certify` wrote.") from error
    try:
        return CertificateFile(path, decode(data))
    except NotAnEnvelopeError as error:
        raise refusal(path, f"{str(error)[0].upper()}{str(error)[1:]}.") from error


def read_certificate(path: Path) -> tuple[Certificate, CertificateFile]:
    """The statement of a certificate, and its file; the signature is not checked.

    Raises:
        ConfigurationError: there is no such file.
        CertificateRefusedError: it was edited, is damaged, or was written by another version of envbuild.
    """
    file = open_certificate(path)
    return file.statement(), file
