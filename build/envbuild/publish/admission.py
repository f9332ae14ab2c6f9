"""What must hold before a published image is pulled: what the gate held it to, once more, since whoever may push could
write an entry that no gate saw.

Certificate, entry and policy; whether it was taken back, :mod:`envbuild.publish.sources` looks up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import moment_of
from envbuild.catalog.policy import Policy
from envbuild.certify.certificate.trust import Trust
from envbuild.certify.certificate.verify import VerifiedCertificate, oldest_measurement
from envbuild.publish.gate import objections
from envbuild.publish.models import Publication
from envbuild.publish.signature import objection_to_signature
from envbuild.publish.tags import wrong_tag

LOOK_AT_IT = "Have the publication looked at; publish the image again."
SIGN_IT = (
    "Publish the image again with a key that you trust (--key FILE). To take what nobody signed, name a policy with "
    "signed_publication = false: --policy NAME."
)
OTHER_POLICY = "Pull another image, or name the policy that it was published under: --policy NAME."


@dataclass(frozen=True, kw_only=True)
class Objection:
    """Why a published image is not pulled.

    Attributes:
        reason: one word, for programs.
    """

    reason: str
    why: str
    fix: str


def objections_to(
    publication: Publication, verified: VerifiedCertificate, policy: Policy, trust: Trust, at: datetime
) -> Iterator[Objection]:
    """What speaks against a publication whose certificate counts: the entry's own first, then the policy's.

    Args:
        at: now.
    """
    if differs := _difference(publication, verified):
        why = f"Its entry states another {differs} than its certificate: its entry was changed."
        yield Objection(reason="entry", why=why, fix=LOOK_AT_IT)
    signed = policy.signed_publication or publication.signature is not None
    if signed and (why := objection_to_signature(publication, trust, policy, at)):
        yield Objection(reason="publication-signature", why=why, fix=SIGN_IT)
    if tag := wrong_tag(publication, derived=not signed):
        why = f"{tag} is not a tag of lock {publication.lock_digest} of {publication.stack} for {publication.target}."
        yield Objection(reason="tag", why=why, fix=LOOK_AT_IT if signed else SIGN_IT)
    # A policy's age is that of the day of publication; nobody signed the day of an entry without a signature.
    published = moment_of(publication.published_at) if signed else at
    oldest = oldest_measurement(verified.statement)
    if published - moment_of(oldest) > policy.max_age:
        limit = f"{policy.max_age / timedelta(days=1):g} days"
        why = f"Its oldest numbers are from {oldest}; the policy allowed {limit} when it was published."
        yield Objection(reason="too-old", why=why, fix=OTHER_POLICY)
    sms = publication.gpus if signed else _shipped_sms(publication)
    rebuilt = publication.base_rebuilt
    for reason, why in objections(verified.statement, verified.key, policy, sms=sms, base_rebuilt=rebuilt):
        yield Objection(reason=reason, why=why, fix=OTHER_POLICY)


def _difference(publication: Publication, verified: VerifiedCertificate) -> str:
    """Which field of a publication its certificate does not have so; empty when there is none."""
    statement = verified.statement
    predicate, forms = statement.predicate, statement.by_form()
    stated = {
        "stack": (publication.stack, predicate.stack),
        "base": (publication.base, predicate.base),
        "target": (publication.target, predicate.target),
        "lock": (publication.lock_digest, predicate.lock_digest),
        "key": (publication.keyid, verified.key.keyid),
        "moment of issue": (publication.certified_at, predicate.issued_at),
        "moment of measurement": (publication.measured_at, oldest_measurement(statement)),
        # Each by its form: docker's digest in the place of the OCI one would be another name of a revoked image.
        "image digest": (publication.oci_digest, forms.get("oci")),
        ".sqsh": (publication.sqsh.digest, forms.get("sqsh")) if publication.sqsh else ("", ""),
        "docker manifest": (publication.docker_digest, forms.get("docker", publication.docker_digest)),
        "place of its run": (predicate.form == "none", False),
    }
    return next((name for name, (one, other) in stated.items() if one != other), "")


def _shipped_sms(publication: Publication) -> tuple[str, ...]:
    catalog = Catalog.shipped()
    known = publication.target in catalog.names("targets")
    return catalog.target(publication.target).sm if known else publication.gpus
