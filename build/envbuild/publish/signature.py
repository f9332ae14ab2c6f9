"""Signs publications, so that nobody who may only push gives a certified image another tag, another moment or target.

The publisher's key signs, which readers must trust as those of certificates. What is taken back needs no signature.
"""

from __future__ import annotations

import base64
from datetime import datetime

from envbuild.catalog.fields import moment_of
from envbuild.catalog.policy import Policy
from envbuild.certify.certificate.envelope import SignatureOf, SignedBytes, base64_of
from envbuild.certify.certificate.sign import Signer, verifies
from envbuild.certify.certificate.trust import Trust, TrustedKey
from envbuild.publish.models import Publication, PublicationSignature


def sign_publication(publication: Publication, signer: Signer) -> Publication:
    """The publication with a key's signature. Ed25519 signs the same bytes alike: signed twice, it is the same."""
    signed = signer.sign(publication.signed_content()).signed
    if signed is None:
        raise ValueError("a signer signs")
    signature = PublicationSignature(keyid=signed.keyid, sig=base64_of(signed.signature))
    return publication.model_copy(update={"signature": signature})


def objection_to_signature(publication: Publication, trust: Trust, policy: Policy, at: datetime) -> str:
    """Why a publication's signature does not count at a moment; empty where it does."""
    signature = publication.signature
    if signature is None:
        return "Its entry is not signed, so that whoever may push there can have given it this tag."
    key = trust.keys.get(signature.keyid)
    if key is None:
        return f"Its entry names key {signature.keyid!r:.80}; {trust.path} has other keys: {trust.names()}."
    content = SignedBytes(publication.signed_content(), SignatureOf(signature.keyid, base64.b64decode(signature.sig)))
    if not verifies(content, key.key):
        return f"The signature of its entry is not key {key.name}'s for this content: the entry was changed, or forged."
    moments = (moment_of(publication.published_at), at)
    return objection_to_key(key, publication.stack, publication.target, policy, *moments)


def objection_to_key(key: TrustedKey, stack: str, target: str, policy: Policy, *moments: datetime) -> str:
    """Why a key may not sign a publication at these moments; empty where it may."""
    settings = key.settings
    if settings.revoked is not None:
        return f"Its entry is signed by key {key.name}, which was revoked: {settings.revoked}."
    for moment in moments:
        if outside := key.outside(moment):
            return f"Its entry is signed by a key that does not count: {outside}."
    if policy.keys is not None and key.name not in policy.keys:
        return f"Its entry is signed by key {key.name}; the policy counts {', '.join(policy.keys)}."
    for what, named, allowed in (("stack", stack, settings.stacks), ("target", target, settings.targets)):
        if allowed is not None and named not in allowed:
            return f"Its entry is about {what} {named}; key {key.name} is trusted for {', '.join(allowed)}."
    return ""
