"""A placed image of a few layers, its lock, and certificates of it that a trusted key signed: all that is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from helpers.certificates import case_of, measured, now, statement
from helpers.locks import MAIN, lock_mcore, mcore_of
from helpers.notes import Notes
from helpers.placed_images import place_image

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.certificate.sign import Signer, load_signer, write_certificate
from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.certify.certificate.trust import Trust, load_trust
from envbuild.core.progress import SilentReporter
from envbuild.image.output import PlacedImage
from envbuild.image.record import CYCLONEDX_FILE
from envbuild.image.sbom.cyclonedx import MEDIA_TYPE as CYCLONEDX
from envbuild.image.sbom.reports import Attachment
from envbuild.lock.lockfile import LockDirectory
from envbuild.publish.draft import PublishRequest
from envbuild.publish.models import Publication
from envbuild.publish.publish import publish
from envbuild.store.local import LocalStore

SBOM = Attachment(file=CYCLONEDX_FILE, media_type=CYCLONEDX, content=b'{"bomFormat": "CycloneDX"}')
LAYERS = {"base": b"base" * 500, "torch": b"torch" * 900, "megatron-core": b"megatron" * 10}


@dataclass
class PublishWorld:
    """A project with a lock, an image and a signing key."""

    project: Path
    selection: Selection
    lock: LockDirectory
    image: PlacedImage
    signer: Signer
    trust: Trust
    key: Path
    notes: Notes = field(default_factory=Notes)

    @property
    def context(self) -> Context:
        return Context(
            store=LocalStore(self.project / "cache", SilentReporter()), site=load_site(), reporter=self.notes
        )

    def certify(self, *, signed: bool = True, subject: Mapping[str, str] | None = None, **changes: Any) -> Path:
        """Write a certificate of the image; ``changes`` are fields of its predicate."""
        record = self.image.record
        about = {
            "stack": record.stack, "base": record.base, "target": record.target, "form": "sqsh", "launcher": "bwrap",
            "lock_digest": record.lock_digest, "oci_digest": record.oci_digest,
            "sqsh_digest": record.sqsh_digest or "", **(subject or {}),
        }  # fmt: skip
        path = self.project / "out" / "certificates" / self.image.name / "0123" / CERTIFICATE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        made = statement(subject=about, **({"cases": [case_of("gpt-fp32-tp2")], "measured": measured_now()} | changes))
        write_certificate(path, made, self.signer if signed else None)
        return path

    def request(self, to: str, **changes: Any) -> PublishRequest:
        """A request; ``changes`` are its fields."""
        written = list((self.project / "out" / "certificates").rglob(CERTIFICATE_FILE))
        fields: dict[str, Any] = {
            "image": self.image,
            "lock": self.lock,
            "selection": self.selection,
            "to": to,
            "certificate": written[0] if written else None,
            "policy": self.selection.catalog.policy("default"),
            "trust": self.trust,
            "signer": self.signer,
        }
        return PublishRequest(**(fields | changes))

    def publish(self, to: str, **changes: Any) -> Publication:
        """Publish the image with a new certificate; ``changes`` are fields of the request."""
        self.certify()
        return publish(self.request(to, **changes), self.context).publication

    def renew(self) -> None:
        """The image of a newer lock in the place of this one."""
        self.rebuild({"megatron-core": b"newer"}, main=MAIN.replace("0.30", "0.31"))

    def rebuild(self, layers: Mapping[str, bytes] | None = None, main: str | None = None) -> None:
        """Another image in the place of this one: with other layers, or from another lock."""
        if main is not None:
            self.lock = lock_mcore(self.project, main)
        self.image = place_image(self.project / "out", self.lock, layers={**LAYERS, **(layers or {})}, sboms=[SBOM])


def measured_now(**changes: Any) -> dict[str, Any]:
    """What a run measured just now."""
    return measured(**({"started_at": now(), "finished_at": now(), "machine": None, "devices": []} | changes))


def make_publish_world(project: Path) -> PublishWorld:
    lock = lock_mcore(project)
    keys = make_keys(project / "keys", "lab", None)
    (project / "trust.toml").write_text(f'[keys.lab]\nfile = "{keys.public}"\n')
    return PublishWorld(
        project=project,
        selection=mcore_of(project),
        lock=lock,
        image=place_image(project / "out", lock, layers=LAYERS, sboms=[SBOM]),
        signer=load_signer(str(keys.private), None),
        trust=load_trust(project / "trust.toml"),
        key=keys.private,
    )


def with_record(image: PlacedImage, **changes: Any) -> PlacedImage:
    """The image with other values in its record."""
    return replace(image, record=image.record.model_copy(update=changes))
