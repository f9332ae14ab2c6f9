"""An index is refused where what goes by a tag or a platform could take another image than the one that is opened."""

import json
from pathlib import Path

import pytest
from helpers.errors import error_of
from helpers.layer_tars import file, layout_of

from envbuild.core.digests import canonical_json, sha256_bytes
from envbuild.core.errors import CheckRefusedError
from envbuild.image.inspect.open import open_image
from envbuild.image.sbom.reports import Attachment, attach
from envbuild.oci.models import MANIFEST_TYPE, REF_NAME, RunConfig
from envbuild.oci.write import make_oci

SBOM = "application/vnd.cyclonedx+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LINUX = {"os": "linux", "architecture": "amd64"}


class Layout:
    """An OCI layout with an image, its SBOM and another report; and, in no index yet, another image."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "oci"
        folder.mkdir()
        image, record = layout_of(folder, file("etc/x", b"content"))
        attach(
            self.path,
            folder,
            [Attachment(file="s", media_type=SBOM, content=b'{"components": []}'),
             Attachment(file="p", media_type="application/vnd.in-toto+json", content=b"{}")],
            "1970-01-01T00:00:00Z",
        )  # fmt: skip
        self.digest = image.digest
        self.other = make_oci(RunConfig(workdir="/evil"), "linux/amd64", [record], 0)
        self.put(self.other.config)
        self.put(self.other.manifest)

    @property
    def entries(self) -> list:
        return json.loads((self.path / "index.json").read_text())["manifests"]

    def write(self, entries, **more) -> None:
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries, **more}))

    def blob(self, digest) -> Path:
        return self.path / "blobs/sha256" / digest.removeprefix("sha256:")

    def put(self, data: bytes) -> str:
        self.blob(sha256_bytes(data)).write_bytes(data)
        return sha256_bytes(data)

    def another(self, *, annotations=None, **fields):
        """The entry of the other image; ``fields`` are those of its manifest."""
        manifest = canonical_json({**json.loads(self.other.manifest), **fields})
        found = {"mediaType": MANIFEST_TYPE, "digest": self.put(manifest), "size": len(manifest)}
        return found if annotations is None else found | {"annotations": annotations}

    def about(self):
        return {key: self.entries[0][key] for key in ("mediaType", "digest", "size")}


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path / "image")


@pytest.fixture
def opened(layout, tmp_path):
    (tmp_path / "scratch").mkdir()
    return lambda tag="": open_image(f"{layout.path}{tag}", tmp_path / "scratch")


def untagged(entry):
    return {**entry, "annotations": {key: value for key, value in entry["annotations"].items() if key != REF_NAME}}


@pytest.mark.parametrize("tag", ["", ":mcore"])
def test_image_with_its_reports(opened, layout, tag):
    image = opened(tag)
    assert image.digest == layout.digest
    assert [report.artifact_type for report in image.reports] == [SBOM, "application/vnd.in-toto+json"]


def tag_at_another_image(layout, entry):
    """The entry has the tag of the genuine one, which has none any more."""
    image, *reports = layout.entries
    layout.write([{**entry, "annotations": {REF_NAME: "mcore"}}, untagged(image), *reports])


def as_a_report(layout):
    """A report by the index, an image by its manifest."""
    tag_at_another_image(layout, {**layout.another(), "artifactType": SBOM})


def as_a_report_in_its_manifest(layout):
    entry = layout.another(artifactType=SBOM, subject=layout.about())
    tag_at_another_image(layout, {**entry, "artifactType": SBOM})


def as_an_attestation(layout):
    tag_at_another_image(layout, {**layout.another(), "platform": {"os": "unknown", "architecture": "unknown"}})


def as_nothing_known(layout):
    tag_at_another_image(layout, {**layout.another(), "mediaType": "application/octet-stream"})


def at_the_sbom(layout):
    image, sbom, report = layout.entries
    layout.write([untagged(image), {**sbom, "annotations": {**sbom["annotations"], REF_NAME: "mcore"}}, report])


def in_containerds_words(layout):
    entry = layout.another(artifactType=SBOM, subject=layout.about(), annotations={"io.containerd.image.name": "m"})
    layout.write([*layout.entries, {**entry, "artifactType": SBOM}])


def without_a_tag(layout):
    layout.write([*layout.entries, {**layout.another(), "artifactType": SBOM}])


def about_another_image(layout):
    entry = layout.another(artifactType=SBOM, subject={**layout.about(), "digest": layout.other.digest})
    layout.write([*layout.entries, {**entry, "artifactType": SBOM}])


def chosen_by_its_platform(layout):
    """In an index in the index, out of which the platform is chosen."""
    image, *_ = layout.entries
    entry = layout.another(artifactType=SBOM, subject=layout.about())
    inner = canonical_json({"manifests": [image, {**entry, "artifactType": SBOM, "platform": LINUX}]})
    found = {"mediaType": INDEX, "digest": layout.put(inner), "size": len(inner), "annotations": {REF_NAME: "mcore"}}
    layout.write([found])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (as_a_report, "nor a report about it: it has the tag 'mcore', and a report has none"),
        (as_a_report_in_its_manifest, "it has the tag 'mcore', and a report has none"),
        (as_an_attestation, "it has the tag 'mcore', and a report has none"),
        (as_nothing_known, "it has the tag 'mcore', and a report has none"),
        (at_the_sbom, "it has the tag 'mcore', and a report has none"),
        (in_containerds_words, "it has the tag 'm', and a report has none"),
        (without_a_tag, "its manifest is that of no report"),
        (about_another_image, "it is about sha256:"),
        (chosen_by_its_platform, "it has a platform, as an image has"),
    ],
)
def test_entry_that_could_be_taken_for_the_image(opened, layout, spoil, why):
    spoil(layout)
    error = error_of(CheckRefusedError, opened)
    assert why in error.why
    assert "by its tag" in error.fix


@pytest.mark.parametrize("spoil", [as_a_report, as_an_attestation, as_nothing_known, at_the_sbom])
def test_wanted_tag_of_a_report_is_refused(opened, layout, spoil):
    spoil(layout)
    assert error_of(CheckRefusedError, opened, ":mcore").why.startswith("Tag 'mcore' is that of sha256:")


def test_one_of_two_images_is_opened_by_its_tag(opened, layout):
    layout.write([*layout.entries, layout.another(annotations={REF_NAME: "other"})])
    assert "It has 2 images" in error_of(CheckRefusedError, opened).why
    assert (opened(":mcore").digest, len(opened(":mcore").reports)) == (layout.digest, 2)
    assert (opened(":other").digest, opened(":other").reports) == (layout.other.digest, ())
    layout.write([*layout.entries, layout.another(annotations={REF_NAME: "mcore"})])
    assert "It has 2 images with tag 'mcore'" in error_of(CheckRefusedError, opened, ":mcore").why


def test_one_image_may_have_two_tags(opened, layout):
    image, *reports = layout.entries
    layout.write([image, {**image, "annotations": {REF_NAME: "latest"}}, *reports])
    assert opened().digest == opened(":latest").digest == layout.digest


@pytest.mark.parametrize("key", ["Manifests", "manife\u017fts"])
def test_index_with_an_ambiguous_key_is_refused(opened, layout, key):
    layout.write(layout.entries, **{key: [layout.another(annotations={REF_NAME: "mcore"})]})
    assert "which other programs read as 'manifests'" in error_of(CheckRefusedError, opened).why


def test_index_entry_with_an_ambiguous_key_is_refused(opened, layout):
    image, *reports = layout.entries
    hidden = {**layout.another(artifactType=SBOM, subject=layout.about()), "Annotations": {REF_NAME: "mcore"}}
    layout.write([untagged(image), {**hidden, "artifactType": SBOM}, *reports])
    assert "'Annotations', which other programs read as 'annotations'" in error_of(CheckRefusedError, opened).why


@pytest.mark.parametrize("entry", ["text", {"annotations": "text"}, {"platform": ["linux"]}])
def test_malformed_index_entry_is_refused(opened, layout, entry):
    layout.write([*layout.entries, entry])
    assert "Its index cannot be read: manifests.3" in error_of(CheckRefusedError, opened).why


def test_every_blob_of_a_report_is_read(opened, layout):
    """Also the empty configuration, which all of them share."""
    manifests = [json.loads(layout.blob(entry["digest"]).read_text()) for entry in layout.entries[1:]]
    digests = {item["digest"] for manifest in manifests for item in (manifest["config"], *manifest["layers"])}
    assert len(digests) == 2  # the empty one, which is the second report's content too; and the SBOM
    for digest in digests:
        kept = layout.blob(digest).read_bytes()
        layout.blob(digest).write_bytes(kept + b" ")
        assert f"{digest.removeprefix('sha256:')} has the digest" in error_of(CheckRefusedError, opened).why
        layout.blob(digest).write_bytes(kept)
    opened()
