"""The gate: what must hold before an image is published. Each image is gated by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from envbuild.catalog.fields import Device
from envbuild.catalog.models import Target
from envbuild.catalog.policy import Policy
from envbuild.certify.certificate.envelope import encode
from envbuild.certify.certificate.file import open_certificate
from envbuild.certify.certificate.statement import Certificate, Predicate
from envbuild.certify.certificate.trust import Trust, TrustedKey
from envbuild.certify.certificate.verify import About, VerifiedCertificate, oldest_measurement, verify
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CertificateRefusedError, PublicationRefusedError
from envbuild.core.text import quoted_command
from envbuild.image.output import OCI_DIR, PlacedImage
from envbuild.oci.files import FolderFiles, blob_path
from envbuild.oci.write import docker_manifest

NOT_SIGNED, BASE_REBUILT = "not-signed", "base-rebuilt"
NAME_KEYS = "Name a file of public keys: --trust FILE, or signing.trust of the configuration."
CERTIFY = "Certify the image as the policy requires: {certify} --key FILE."
OTHER_MATRIX = "Certify it by a matrix that counts: {certify} --key FILE --matrix NAME."
SIGN = "Certify again and sign: {certify} --key FILE."
RECORD_BASE = (
    "Record the base in the lock by verifying it there, and put the image in place again: {lock} --verify && {image}. "
    "Or name the repository that has the lock's own base (base_repositories) and run image, or set locked_base = false "
    "in a policy of your own (envs/policies/NAME.toml, --policy NAME)."
)
# In this order they are run: what changes the image comes before what is about it.
FIXES = {BASE_REBUILT: RECORD_BASE, NOT_SIGNED: SIGN, "matrix": OTHER_MATRIX}


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A certificate that admits its image.

    Attributes:
        content: of the certificate's file, as it was verified.
        measured_at: the oldest moment at which it measured something.
    """

    certificate: Certificate
    content: bytes
    key: TrustedKey
    measured_at: str

    @property
    def digest(self) -> str:
        return sha256_bytes(self.content)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules that an image must satisfy.

    Attributes:
        target: the definition of the image's target.
        trust: None where no trust file is named, so that no key is known.
    """

    policy: Policy
    target: Target
    trust: Trust | None
    at: datetime


def admit(image: PlacedImage, certificate: Path | None, rules: Rules) -> Admitted:
    """The certificate of an image, where it admits the image's publication. Of the image its manifest is read alone.

    Raises:
        PublicationRefusedError: it does not; ``reason`` names the way.
    """
    verified = _verified(certificate, rules)
    rebuilt = image.record.base_rebuilt
    if isinstance(verified, list):
        # All at once: whoever cures one is not refused for the next.
        raise _refused(image, [*verified, *_about_base(rules.policy, rebuilt)])
    statement, key = verified.statement, verified.key
    against = objections(statement, key, rules.policy, sms=rules.target.sm, base_rebuilt=rebuilt)
    if all_of_them := [*_about_another(image, statement), *against]:
        raise _refused(image, all_of_them)
    return Admitted(
        certificate=statement,
        content=encode(verified.content),
        key=key,
        measured_at=oldest_measurement(statement),
    )


class Objection(NamedTuple):
    """A reason against publishing or pulling an image.

    Attributes:
        reason: one word, for programs.
        fix: empty: that of the reason in FIXES, or a new certificate.
    """

    reason: str
    why: str
    fix: str = ""


def _verified(certificate: Path | None, rules: Rules) -> VerifiedCertificate | list[Objection]:
    if certificate is None or not certificate.is_file():
        return [Objection("no-certificate", f"There is no certificate{f' {certificate}' if certificate else ''}.")]
    try:
        if rules.trust is None:
            objection = Objection("no-trust", "No trusted keys are named, so that no certificate counts.", NAME_KEYS)
            signed = open_certificate(certificate).keyid is not None
            return [objection] if signed else [objection, Objection(NOT_SIGNED, "The certificate is not signed.")]
        # What it is about is looked at below, with words of its own for a run outside of an image.
        return verify(certificate, rules.trust, About(), at=rules.at, max_age=rules.policy.max_age)
    except CertificateRefusedError as error:
        fix = "" if error.reason == NOT_SIGNED else error.fix
        return [Objection(error.reason or "certificate", error.why, fix)]


def _about_another(image: PlacedImage, statement: Certificate) -> Iterator[Objection]:
    """Why the certificate is not about the image."""
    predicate, record = statement.predicate, image.record
    if predicate.form == "none":
        yield Objection("outside-image", f"Its cases ran in {predicate.place}, outside of the image.")
    named = statement.by_form()
    manifest = FolderFiles(image.path / OCI_DIR).read(blob_path(record.oci_digest))
    # docker's manifest is made from the OCI one, so its digest needs no record.
    forms = {"oci": record.oci_digest, "sqsh": record.sqsh_digest, "docker": sha256_bytes(docker_manifest(manifest))}
    for form, own in forms.items():
        # A run in the OCI form is about no .sqsh, and older certificates name no docker manifest.
        if named.get(form, "" if form == "oci" else own) != own:
            about = named.get(form, "no OCI image")
            yield Objection("another-image", f"Its certificate is about {about}; the image here is {own}.")
    for reason, what, certified, wanted in (
        ("another-target", "target", predicate.target, record.target),
        ("another-stack", "stack", predicate.stack, record.stack),
        ("another-base", "base", predicate.base, record.base),
        ("another-lock", "lock", predicate.lock_digest, record.lock_digest),
    ):
        if certified != wanted:
            yield Objection(reason, f"Its certificate is for {what} {certified}; the image is for {wanted}.")


def objections(
    statement: Certificate, key: TrustedKey, policy: Policy, *, sms: tuple[str, ...], base_rebuilt: bool
) -> Iterator[Objection]:
    """The objections of a policy to an image, used when it is published and when it is pulled.

    Args:
        statement: its certificate's, which counts.
        sms: of its target; none: it is for CPUs.
    """
    predicate = statement.predicate
    if policy.keys is not None and key.name not in policy.keys:
        yield Objection("key", f"Key {key.name} signed its certificate; the policy counts {', '.join(policy.keys)}.")
    device = Device.CUDA if sms else Device.CPU
    counted = ", ".join(policy.matrices_for(device))
    if predicate.matrix not in policy.matrices_for(device):
        why = f"It passed matrix {predicate.matrix}; for {device.value} targets the policy counts {counted}."
        yield Objection("matrix", why)
    if policy.shipped_matrix and not predicate.matrix_is_shipped:
        yield Objection(
            "own-matrix", f"Matrix {predicate.matrix} was the project's own, not the one that envbuild ships."
        )
    if policy.whole_matrix and not predicate.whole_matrix:
        yield Objection("part-of-matrix", f"It passed a part of matrix {predicate.matrix}, not all of it.")
    if why := _too_many_excused(predicate, policy.max_excused_percent):
        yield Objection("excused", why)
    if policy.target_gpus and (why := _wrong_gpus(statement, sms)):
        yield Objection("gpu", why)
    if predicate.not_vouched and not policy.allow_not_vouched:
        names = ", ".join(entry.name for entry in predicate.not_vouched)
        why = f"The certificate does not vouch for {names}, and the policy does not allow that."
        yield Objection("not-vouched", why)
    yield from _about_base(policy, base_rebuilt)


def _too_many_excused(predicate: Predicate, most_percent: int) -> str:
    """Why too few cases vouch for the image; empty where there are enough."""
    excused, every = len(predicate.excused), len(predicate.excused | {case.id for case in predicate.cases})
    if excused * 100 <= every * most_percent:
        return ""
    names = ", ".join(entry.name for entry in predicate.not_vouched if entry.cases)
    return f"{excused} of {every} cases are excused by {names}; the policy allows {most_percent} percent."


def _about_base(policy: Policy, rebuilt: bool) -> Iterator[Objection]:
    if policy.locked_base and rebuilt:
        yield Objection(BASE_REBUILT, "The lock was verified on another base than the image has, or on none.")


def _wrong_gpus(statement: Certificate, sms: tuple[str, ...]) -> str:
    """Why the GPUs that the cases ran on are not the target's; empty where they are, and for targets without."""
    # 90a and 100f name code for one generation or family; a GPU's compute capability has no letter.
    wanted = {sm.rstrip("af") for sm in sms}
    if not wanted:
        return ""
    machine = statement.predicate.measured.machine
    if machine is None or not machine.gpus:
        return "The certificate names no GPU on which its cases ran."
    used = statement.predicate.measured.devices
    # Only those that were used count; results have nvidia-smi's number of each.
    gpus = [gpu for gpu in machine.gpus if not used or gpu.index in used or gpu.uuid in used] or list(machine.gpus)
    wrong = [gpu for gpu in gpus if gpu.compute_capability.replace(".", "") not in wanted]
    if not wrong:
        return ""
    names = ", ".join(sorted({f"{gpu.name} (compute capability {gpu.compute_capability})" for gpu in wrong}))
    return f"Its cases ran on {names}; the target has SM {', '.join(sms)}."


def _refused(image: PlacedImage, objections: Sequence[Objection]) -> PublicationRefusedError:
    record = image.record
    name = [] if image.lock_name == record.stack else ["--name", image.lock_name]
    lock = quoted_command("envbuild", "lock", "--stack", record.stack, "--base", record.base, *name)
    commands = {"lock": lock, "image": image.command, "certify": image.command_of("certify")}
    order = sorted(objections, key=lambda objection: objection.reason != BASE_REBUILT)
    fixes = [each.fix or FIXES.get(each.reason, CERTIFY).format(**commands) for each in order]
    return PublicationRefusedError(
        f"the image {image.name} is not published",
        why="\n".join(each.why for each in objections),
        fix=" ".join([*dict.fromkeys(fixes), "`--uncertified` publishes it under tags that say so."]),
        reason=objections[0].reason,
    )
