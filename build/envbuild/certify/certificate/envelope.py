"""The envelope that a certificate lies in: DSSE, in the one form that envbuild writes.

Format: https://github.com/secure-systems-lab/dsse/blob/master/envelope.md

A file in any other form is refused, also where a lenient reader would find the same statement in it: two forms of one
certificate would only help an attacker.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from envbuild.core import jsonread

PAYLOAD_TYPE = "application/vnd.in-toto+json"
# A certificate of 60 cases has some 100 kB; a far larger file is refused.
LARGEST_BYTES = 32 << 20
# RFC 8032, section 5.1.6: two times 32 bytes.
SIGNATURE_BYTES = 64


class NotAnEnvelopeError(ValueError):
    """Why a file is not an envelope."""


@dataclass(frozen=True)
class SignatureOf:
    """A signature, and the key that it names."""

    keyid: str
    signature: bytes


@dataclass(frozen=True)
class SignedBytes:
    """The content of an envelope: the statement's bytes, and the signature; None without one."""

    payload: bytes
    signed: SignatureOf | None


def encode(content: SignedBytes) -> bytes:
    """The file of an envelope: one line, which makes it a bundle (``.intoto.jsonl``) of one."""
    signatures = []
    if content.signed:
        signatures.append({"keyid": content.signed.keyid, "sig": base64_of(content.signed.signature)})
    envelope = {"payloadType": PAYLOAD_TYPE, "payload": base64_of(content.payload), "signatures": signatures}
    return (json.dumps(envelope, separators=(",", ":")) + "\n").encode("ascii")


def decode(data: bytes) -> SignedBytes:
    """What is in the file of an envelope.

    Raises:
        NotAnEnvelopeError: it is not, byte for byte, as :func:`encode` writes it.
    """
    try:
        envelope = jsonread.loads(data)
    except ValueError as error:
        raise NotAnEnvelopeError(f"it is not valid JSON: {error}") from None
    if not isinstance(envelope, dict) or set(envelope) != {"payloadType", "payload", "signatures"}:
        raise NotAnEnvelopeError("it is not a DSSE envelope, which has payloadType, payload and signatures alone")
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise NotAnEnvelopeError(f"its payloadType is {envelope['payloadType']!r}; a certificate has {PAYLOAD_TYPE!r}")
    content = SignedBytes(_bytes(envelope["payload"], "payload"), _signature(envelope["signatures"]))
    # Spaces, the order of keys, and base64 whose last character has unused bits set: all decode to the same content.
    if encode(content) != data:
        raise NotAnEnvelopeError("it is not in the form that envbuild writes: something was added or laid out anew")
    return content


def _signature(signatures: object) -> SignatureOf | None:
    if not isinstance(signatures, list):
        raise NotAnEnvelopeError("`signatures` must be a list")
    if len(signatures) > 1:
        raise NotAnEnvelopeError(f"it has {len(signatures)} signatures; a certificate has one")
    if not signatures:
        return None
    entry = signatures[0]
    if not isinstance(entry, dict) or set(entry) != {"keyid", "sig"} or not isinstance(entry["keyid"], str):
        raise NotAnEnvelopeError("its signature is not a keyid and a sig, and nothing else")
    signature = _bytes(entry["sig"], "sig")
    if len(signature) != SIGNATURE_BYTES:
        raise NotAnEnvelopeError(f"its sig has {len(signature)} bytes; an Ed25519 signature has {SIGNATURE_BYTES}")
    return SignatureOf(entry["keyid"], signature)


def base64_of(data: bytes) -> str:
    """Bytes as JSON documents have them."""
    return base64.b64encode(data).decode("ascii")


def _bytes(text: object, what: str) -> bytes:
    if not isinstance(text, str):
        raise NotAnEnvelopeError(f"its {what} is not text")
    try:
        # Without validate foreign characters are skipped, so that many texts would stand for the same bytes.
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise NotAnEnvelopeError(f"its {what} is not base64: {error}") from None
