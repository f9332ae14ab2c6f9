"""Certificates in the forms that other programs verify: sigstore bundles, and an in-toto test result.

Formats: https://github.com/sigstore/protobuf-specs (sigstore_bundle.proto, version 0.3) and
https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md (0.1).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from envbuild.certify.certificate.envelope import PAYLOAD_TYPE, SignatureOf, SignedBytes, base64_of, encode
from envbuild.certify.certificate.sign import Signer
from envbuild.certify.certificate.statement import STATEMENT_TYPE, Certificate
from envbuild.core import jsonread
from envbuild.core.digests import Json, canonical_json, hex_of
from envbuild.core.errors import CertificateRefusedError

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
TEST_RESULT_TYPE = "https://in-toto.io/attestation/test-result/v0.1"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle, and the predicate that its statement has."""

    content: bytes
    predicate_type: str

    def annotations(self, created: str) -> dict[str, str]:
        """The annotations by which cosign finds the artifact that holds a bundle."""
        # cosign, specs/BUNDLE_SPEC.md, "Annotations": by these it tells an image's bundles apart without fetching them.
        return {
            "org.opencontainers.image.created": created,
            "dev.sigstore.bundle.content": "dsse-envelope",
            "dev.sigstore.bundle.predicateType": self.predicate_type,
        }


def make_bundle(content: SignedBytes, predicate_type: str) -> Bundle:
    """The bundle of a signed statement; the key is named by its ID, since there is no X.509 certificate.

    Raises:
        ValueError: it is not signed.
    """
    if content.signed is None:
        raise ValueError("a statement without a signature has no bundle")
    signature = {"sig": base64_of(content.signed.signature), "keyid": content.signed.keyid}
    bundle: dict[str, Json] = {
        "mediaType": BUNDLE_TYPE,
        # No transparency log: sites without a way out verify it, too.
        "verificationMaterial": {"publicKey": {"hint": content.signed.keyid}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64_of(content.payload),
            "payloadType": PAYLOAD_TYPE,
            # A bundle's envelope has one (in-toto attestation, spec/v1/envelope.md, "Alternative Envelope schemas").
            "signatures": [dict(signature)],
        },
    }
    return Bundle(content=canonical_json(bundle), predicate_type=predicate_type)


def certificate_in(bundle: bytes, where: str) -> bytes:
    """The certificate's file, byte for byte, out of its bundle. Its signature is not checked.

    Args:
        where: what holds the bundle, for the error.

    Raises:
        CertificateRefusedError: it is not a bundle that envbuild writes.
    """
    try:
        envelope = jsonread.loads(bundle)["dsseEnvelope"]
        (signature,) = envelope["signatures"]
        # Without `validate` Python drops what is not base64, so that many texts would be one certificate.
        signed = SignatureOf(str(signature["keyid"]), base64.b64decode(signature["sig"], validate=True))
        content = SignedBytes(base64.b64decode(envelope["payload"], validate=True), signed)
        made = make_bundle(content, "")
    except (ValueError, KeyError, TypeError) as error:
        raise CertificateRefusedError(
            f"the certificate in {where} is refused",
            why=f"It is not a sigstore bundle with a certificate: {error!r:.200}",
            fix="Publish the image again; its certificate was changed or damaged there.",
        ) from error
    # The signature covers the payload, and the publication's digest the certificate's file: whatever else the bundle
    # says, nobody vouches for it, and other programs would read it.
    if made.content != bundle:
        raise CertificateRefusedError(
            f"the certificate in {where} is refused",
            why="The bundle is not in the form that envbuild writes: something was added or laid out anew.",
            fix="Publish the image again; its certificate was changed or damaged there.",
        )
    return encode(content)


def result_bundle(certificate: Certificate, signer: Signer) -> Bundle:
    """The certificate as an in-toto test result, which policy engines read, signed by ``signer``."""
    predicate = certificate.predicate
    # in-toto's DigestSet: the digits alone, under the algorithm's name.
    configuration: list[Json] = [
        {"name": f"matrix {predicate.matrix}", "digest": {"sha256": hex_of(predicate.matrix_digest)}},
        {"name": "lock", "digest": {"sha256": hex_of(predicate.lock_digest)}},
        {"name": "plan", "digest": {"sha256": hex_of(predicate.plan_digest)}},
    ]
    # Sorted, and Ed25519 signs the same bytes alike (RFC 8032, 5.1.6): published again, the bundle is not sent.
    passed: list[Json] = [*sorted({case.id for case in predicate.cases})]
    warned: list[Json] = [*sorted(entry.name for entry in predicate.not_vouched)]
    statement: dict[str, Json] = {
        "_type": STATEMENT_TYPE,
        "subject": [entry.model_dump(mode="json") for entry in certificate.subject],
        "predicateType": TEST_RESULT_TYPE,
        "predicate": {
            # A certificate exists only where every case passed; what it does not vouch for is a warning.
            "result": "WARNED" if predicate.not_vouched else "PASSED",
            "configuration": configuration,
            "passedTests": passed,
            "warnedTests": warned,
            "failedTests": [],
        },
    }
    return make_bundle(signer.sign(canonical_json(statement)), TEST_RESULT_TYPE)
