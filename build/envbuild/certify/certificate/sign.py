"""Signs statements with securesystemslib, and writes the file of a certificate.

securesystemslib is imported where it is needed, by :func:`_import_signers`: most commands would wait for nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from envbuild.certify.certificate.envelope import PAYLOAD_TYPE, SignatureOf, SignedBytes, encode
from envbuild.certify.certificate.keys import keyid_of, load_private
from envbuild.core.digests import Json, canonical_json
from envbuild.core.files import write_atomic

UNSIGNED = "This certificate is not signed: it proves nothing about who measured it."


def _import_signers() -> None:
    """Import securesystemslib without boto3, which it brings along where it is installed: 0.1 s of each verification.

    Keys of Amazon's are none that count here.
    """
    if "boto3" in sys.modules:
        return
    # To Python that is a module which cannot be imported; securesystemslib goes on without it.
    sys.modules["boto3"] = None  # type: ignore[assignment]
    try:
        import securesystemslib.signer  # noqa: F401
    finally:
        del sys.modules["boto3"]


class Signer:
    def __init__(self, key: Ed25519PrivateKey) -> None:
        _import_signers()
        from securesystemslib.signer import CryptoSigner, SSlibKey

        self.public = key.public_key()
        self.keyid = keyid_of(self.public)
        # With its ID: securesystemslib would make another one, of the key in JSON.
        self._signer = CryptoSigner(key, SSlibKey.from_crypto(self.public, self.keyid))

    def sign(self, payload: bytes) -> SignedBytes:
        """The payload with this key's signature."""
        from securesystemslib.dsse import Envelope

        signature = Envelope(payload, PAYLOAD_TYPE, {}).sign(self._signer)
        # securesystemslib keeps signatures as hex digits; DSSE has the bytes in base64.
        return SignedBytes(payload, SignatureOf(self.keyid, bytes.fromhex(signature.signature)))


def load_signer(reference: str, password: str | None, environ: Mapping[str, str] = os.environ) -> Signer:
    """The signer for a key that a user named; see :func:`envbuild.certify.certificate.keys.load_private`."""
    return Signer(load_private(reference, password, environ))


def write_certificate(path: Path, statement: Mapping[str, Json], signer: Signer | None) -> None:
    """Write a certificate; without a signer its envelope has no signature, and nothing verifies it."""
    payload = canonical_json(dict(statement))
    write_atomic(path, encode(signer.sign(payload) if signer else SignedBytes(payload, None)))


def verifies(content: SignedBytes, key: Ed25519PublicKey) -> bool:
    """Whether the signature is this key's, of just these bytes."""
    if content.signed is None:
        return False
    _import_signers()
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import Signature, SSlibKey

    # The caller chose the key: in DSSE the ID is an unauthenticated hint. Key and signature both get it here, since
    # securesystemslib tries no key with another ID (its issue 416).
    keyid = content.signed.keyid
    signature = Signature(keyid, content.signed.signature.hex())
    envelope = Envelope(content.payload, PAYLOAD_TYPE, {keyid: signature})
    try:
        envelope.verify([SSlibKey.from_crypto(key, keyid)], 1)
    except VerificationError:
        return False
    return True
