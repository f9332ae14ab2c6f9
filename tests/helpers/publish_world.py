"""A placed image of a few layers, its lock, and certificates of it that a trusted key signed: all that is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from helpers.certificates import case_of, measured, now, statement
from helpers.locks import MAIN, inputs_of, make_lock
from helpers.notes import Notes
from unit.image.test_record import RECORD

from envbuild.catalog.catalog import Catalog, HostDistribution, Selection, select
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.certificate.sign import Signer, load_signer, write_certificate
from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.certify.certificate.trust import Trust, load_trust
from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.progress import SilentReporter
from envbuild.image.output import OCI_DIR, SQSH_FILE, PlacedImage, image_path
from envbuild.image.record import CYCLONEDX_FILE, ImageRecord, SqshRecord
from envbuild.image.sbom.cyclonedx import MEDIA_TYPE as CYCLONEDX
from envbuild.image.sbom.referrers import Attachment, attach
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.oci.models import RunConfig
from envbuild.oci.write import make_oci, write_layout
from envbuild.publish.draft import PublishRequest
from envbuild.publish.models import Publication
from envbuild.publish.publish import publish
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.store import entry_index
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump

GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
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
            "stack": record.stack, "base": record.base, "target": record.target, "in": "sqsh",
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
        found = list((self.project / "out" / "certificates").rglob(CERTIFICATE_FILE))
        fields: dict[str, Any] = {
            "image": self.image,
            "lock": self.lock,
            "selection": self.selection,
            "to": to,
            "certificate": found[0] if found else None,
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
            _lock(self.project, self.selection, main)
            self.lock = read_lock(self.lock.path)
        self.image = place_image(self.project / "out", self.lock, {**LAYERS, **(layers or {})})


def measured_now(**changes: Any) -> dict[str, Any]:
    """What a run measured just now."""
    return measured(**({"started_at": now(), "finished_at": now(), "machine": None, "devices": []} | changes))


def make_publish_world(project: Path) -> PublishWorld:
    selection = select(
        Catalog.open(project), "mcore", "cpu", "debian12", HostDistribution(distribution="debian", release="12")
    )
    _lock(project, selection)
    lock = read_lock(project / "lockfiles" / "mcore" / "debian12")
    keys = make_keys(project / "keys", "lab", None)
    (project / "trust.toml").write_text(f'[keys.lab]\nfile = "{keys.public}"\n')
    return PublishWorld(
        project=project,
        selection=selection,
        lock=lock,
        image=place_image(project / "out", lock, LAYERS),
        signer=load_signer(str(keys.private), None),
        trust=load_trust(project / "trust.toml"),
        key=keys.private,
    )


def _lock(project: Path, selection: Selection, main: str | None = None) -> None:
    more = {} if main is None else {"main": main}
    make_lock(project / "lockfiles" / "mcore" / "debian12", inputs=inputs_of(selection), **more)


def place_image(out_dir: Path, lock: LockDirectory, layers: Mapping[str, bytes], sqsh: bytes = b"") -> PlacedImage:
    """An OCI layout with an SBOM attached, a .sqsh made of the same bytes, and their record, sealed as in the store."""
    path = image_path(out_dir, "mcore", "debian12", "cpu")
    path.mkdir(parents=True, exist_ok=True)
    made = []
    for name, content in layers.items():
        file = path.parent / f"layer-{name}"
        file.write_bytes(content)
        record = LayerRecord(
            name=name,
            digest=sha256_bytes(content),
            diff_id=sha256_bytes(content + b"tar"),
            size_bytes=len(content),
            unpacked_bytes=len(content),
            entries=1,
        )
        made.append(Layer(record, file))
    image = make_oci(RunConfig(), "linux/amd64", [layer.record for layer in made], 1)
    write_layout(path / OCI_DIR, image, made, tag="mcore")
    for layer in made:
        layer.file.unlink()
    report = Attachment(file=CYCLONEDX_FILE, media_type=CYCLONEDX, content=b'{"bomFormat": "CycloneDX"}')
    reports = attach(path / OCI_DIR, path, [report], "1970-01-01T00:00:01Z")
    (path / SQSH_FILE).write_bytes(sqsh or b"squashfs of " + b"".join(layers.values()))
    record = _record(lock, image.digest, image.config_digest, [layer.record for layer in made], path)
    record = record.model_copy(update={"reports": reports})
    (path / RECORD_FILE).write_bytes(dump(record))
    entry_index.write_index(path)
    return PlacedImage(path, record, "mcore")


def _record(
    lock: LockDirectory, oci_digest: str, config_digest: str, layers: list[LayerRecord], path: Path
) -> ImageRecord:
    sqsh = path / SQSH_FILE
    return RECORD.model_copy(
        update={
            "lock_digest": lock.lock.digest,
            "oci_digest": oci_digest,
            "config_digest": config_digest,
            "layers": tuple(layers),
            "base_rebuilt": False,
            "base_digest": sha256_bytes(b"base"),
            "sqsh": SqshRecord(
                digest=sha256_file(sqsh),
                size_bytes=sqsh.stat().st_size,
                packed_by="mksquashfs 4.5.1",
                compression="zstd",
            ),
        }
    )


def with_record(image: PlacedImage, **changes: Any) -> PlacedImage:
    """The image with other values in its record."""
    return replace(image, record=image.record.model_copy(update=changes))
