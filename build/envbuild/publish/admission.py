"""The conditions of a pull: those of the gate once more, since whoever may push could write an entry that no gate saw.

They are about certificate, entry and policy; :mod:`envbuild.publish.sources` looks up revocations.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import moment_of
from envbuild.catalog.policy import Policy
from envbuild.certify.certificate.trust import Trust
from envbuild.certify.certificate.verify import VerifiedCertificate, oldest_measurement
from envbuild.publish.gate import Objection, objections
from envbuild.publish.models import Publication
from envbuild.publish.signature import objection_to_signature
from envbuild.publish.tags import wrong_tag

LOOK_AT_IT = "Find out who changed the publication, and publish the image again."
SIGN_IT = "Publish the image again with a key that you trust: --key FILE."
TAKE_UNSIGNED = "To take what nobody signed, write these lines to a file, and name it, --policy FILE.toml:"
OTHER_POLICY = "Pull another image, or name the file of the policy that it was published under: --policy FILE.toml."


def objections_to(
    publication: Publication, verified: VerifiedCertificate, policy: Policy, trust: Trust, at: datetime
) -> Iterator[Objection]:
    """Objections to a publication whose certificate counts: of its entry first, then of the policy.

    Args:
        at: now.
    """
    if differs := _difference(publication, verified):
        why = f"Its entry states another {differs} than its certificate: its entry was changed."
        yield Objection("entry", why, LOOK_AT_IT)
    signed = policy.signed_publication or publication.signature is not None
    if signed and (why := objection_to_signature(publication, trust, policy, at)):
        fix = _help_for_unsigned(publication, verified, policy, trust, at)
        yield Objection("publication-signature", why, fix)
    if tag := wrong_tag(publication, derived=not signed):
        why = f"{tag} is not a tag of lock {publication.lock_digest} of {publication.stack} for {publication.target}."
        yield Objection("tag", why, LOOK_AT_IT if signed else SIGN_IT)
    # A policy's age is that of the day of publication; nobody signed the day of an entry without a signature.
    published = moment_of(publication.published_at) if signed else at
    oldest = oldest_measurement(verified.statement)
    if published - moment_of(oldest) > policy.max_age:
        limit = f"{policy.max_age / timedelta(days=1):g} days"
        why = f"Its oldest numbers are from {oldest}; the policy allowed {limit} when it was published."
        yield Objection("too-old", why, OTHER_POLICY)
    sms = publication.gpus if signed else _shipped_sms(publication.target)
    if sms is None:
        why = f"Target {publication.target} is not one that envbuild ships, and nobody signed what GPUs it has."
        yield Objection("target", why, SIGN_IT)
        return
    rebuilt = publication.base_rebuilt
    for objection in objections(verified.statement, verified.key, policy, sms=sms, base_rebuilt=rebuilt):
        yield objection._replace(fix=OTHER_POLICY)


def _difference(publication: Publication, verified: VerifiedCertificate) -> str:
    """The first field that differs between a publication and its certificate; empty if none does."""
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


def _help_for_unsigned(
    publication: Publication, verified: VerifiedCertificate, policy: Policy, trust: Trust, at: datetime
) -> str:
    """The help for a missing signature; it offers another policy only if that would accept the publication."""
    if publication.signature is not None:
        return SIGN_IT  # one that is there counts under every policy
    own = policy.model_copy(update={"summary": "also what nobody signed", "signed_publication": False})
    if any(objections_to(publication, verified, own, trust, at)):
        return SIGN_IT
    return f"{SIGN_IT} {TAKE_UNSIGNED}\n{own.as_toml()}"


def _shipped_sms(target: str) -> tuple[str, ...] | None:
    catalog = Catalog.shipped()
    return catalog.target(target).sm if target in catalog.names("targets") else None
