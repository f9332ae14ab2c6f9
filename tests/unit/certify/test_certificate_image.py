"""A certificate is held to the bytes of an image: its .sqsh, its OCI layout blob by blob, and its lock's files."""

import json
from datetime import datetime, timezone

import pytest
from helpers.certificates import SUBJECT, case_of, statement
from helpers.certify_world import World
from helpers.locks import MAIN, make_lock

from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.certificate.sign import load_signer, write_certificate
from envbuild.certify.certificate.trust import load_trust
from envbuild.certify.certificate.verify import About, verify
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CertificateRefusedError, CheckRefusedError, ConfigurationError
from envbuild.image.sbom.cyclonedx import MEDIA_TYPE as CYCLONEDX
from envbuild.oci.models import REF_NAME, RunConfig
from envbuild.oci.write import make_oci, write_layout
from envbuild.rootfs.layer import Layer


@pytest.fixture
def check(world: World, tmp_path):
    """Verifies a certificate of the world's image and lock against what is named."""
    keys = make_keys(tmp_path / "keys", "lab", None)
    record = world.image.record
    digests = {"oci_digest": record.oci_digest, "sqsh_digest": record.sqsh_digest, "lock_digest": record.lock_digest}
    path = tmp_path / "certificate"
    signer = load_signer(str(keys.private), None)
    write_certificate(path, statement(subject=SUBJECT | digests, cases=[case_of("gpt-fp32-tp2")]), signer)
    (tmp_path / "trust.toml").write_text(f'[keys.lab]\nfile = "{keys.public}"\n')
    trust = load_trust(tmp_path / "trust.toml")
    return lambda **about: verify(path, trust, About(**about), at=datetime.now(timezone.utc)).compared


def test_image_in_every_form_and_the_lock_are_compared(world, check):
    folder, record = world.image.path, world.image.record
    assert check(image=folder / "image.sqsh")[0].endswith(f".sqsh, {record.sqsh_digest}")
    assert check(image=folder / "oci")[0].endswith(f".oci, {record.oci_digest}")
    assert len(check(image=folder)) == 2
    assert check(lock=world.lock.path) == (f"the lock in {world.lock.path}: {record.lock_digest}",)
    assert len(check(image=folder, lock=world.lock.path, digest=record.oci_digest)) == 4


@pytest.mark.parametrize("named", ["image.sqsh", ".", "link"])
def test_image_with_one_byte_changed_is_another_one(world, check, named):
    file = world.image.path / "image.sqsh"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (world.image.path / "link").symlink_to(file)
    with pytest.raises(CertificateRefusedError) as caught:
        check(image=world.image.path / named)
    shown = world.image.path / ("link" if named == "link" else "image.sqsh")
    assert f"another one: {shown}, sha256:" in caught.value.why


def test_layout_with_one_byte_changed_in_any_blob_is_refused(world, check):
    blobs = list((world.image.path / "oci/blobs/sha256").iterdir())
    assert len(blobs) == 3  # manifest, configuration, one layer
    for blob in blobs:
        data = blob.read_bytes()
        blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CheckRefusedError):
            check(image=world.image.path / "oci")
        blob.write_bytes(data)
    check(image=world.image.path / "oci")


def test_layout_of_another_image_is_refused(world, check, tmp_path):
    """Whole in itself, and not what was certified."""
    (layer,) = world.image.record.layers
    file = world.image.path / "oci/blobs/sha256" / layer.digest.removeprefix("sha256:")
    other = make_oci(RunConfig(workdir="/elsewhere"), "linux/amd64", [layer], 1)
    write_layout(tmp_path / "other", other, [Layer(layer, file)], tag="mcore")
    with pytest.raises(CertificateRefusedError) as caught:
        check(image=tmp_path / "other")
    assert other.digest in caught.value.why


def test_image_of_several_in_a_layout_is_named_by_its_tag(world, check):
    """As the error for such a layout shows."""
    (layer,) = world.image.record.layers
    layout = world.image.path / "oci"
    content = json.loads((layout / "index.json").read_text())
    other = make_oci(RunConfig(workdir="/elsewhere"), "linux/amd64", [layer], 1)
    for data in (other.config, other.manifest):
        (layout / "blobs/sha256" / sha256_bytes(data).removeprefix("sha256:")).write_bytes(data)
    more = {**content["manifests"][0], "digest": other.digest, "annotations": {REF_NAME: "other"}}
    (layout / "index.json").write_text(json.dumps({**content, "manifests": [*content["manifests"], more]}))
    with pytest.raises(CheckRefusedError) as caught:
        check(image=layout)
    assert "It has 2 images" in caught.value.why
    assert "FOLDER:TAG" in caught.value.fix
    for named in (layout, world.image.path):
        [compared] = check(image=f"{named}:mcore")
        assert compared.startswith(f"the OCI layout {layout}:mcore: ")
        assert compared.endswith(f".oci, {world.image.record.oci_digest}")
        with pytest.raises(CertificateRefusedError) as caught:
            check(image=f"{named}:other")
        assert f"another one: the OCI layout {layout}:other, {other.digest}" in caught.value.why
    for named in (f"{layout}:none", "none:mcore"):
        with pytest.raises((CheckRefusedError, ConfigurationError)):
            check(image=named)
    with pytest.raises(ConfigurationError) as refused:
        check(image=f"{world.image.path / 'image.sqsh'}:mcore")
    assert "is a file, and has no tags" in refused.value.why


def test_layout_whose_tag_is_that_of_another_image_is_refused(world, check):
    """The genuine image is there without a tag, and what is copied by the tag is the other one."""
    (layer,) = world.image.record.layers
    other = make_oci(RunConfig(workdir="/elsewhere"), "linux/amd64", [layer], 1)
    for data in (other.config, other.manifest):
        (world.image.path / "oci/blobs/sha256" / sha256_bytes(data).removeprefix("sha256:")).write_bytes(data)
    index = world.image.path / "oci/index.json"
    content = json.loads(index.read_text())
    [image] = content["manifests"]
    tagged = {**image, "digest": other.digest, "size": len(other.manifest), "artifactType": CYCLONEDX}
    del image["annotations"]
    index.write_text(json.dumps({**content, "manifests": [tagged, image]}))
    for named in ("oci", "."):
        with pytest.raises(CheckRefusedError) as caught:
            check(image=world.image.path / named)
        assert f"{other.digest} is neither the image, {world.image.record.oci_digest}" in caught.value.why


def test_lock_that_is_another_one_is_refused(world, check, tmp_path):
    make_lock(tmp_path / "lock", main=MAIN.replace("0.30", "0.31"), inputs=world.lock.lock.inputs)
    with pytest.raises(CertificateRefusedError) as caught:
        check(lock=tmp_path / "lock")
    assert "another one" in caught.value.why


def test_missing_image_or_lock_is_a_configuration_error(check, tmp_path):
    for about in ({"image": tmp_path / "none"}, {"image": tmp_path}, {"lock": tmp_path}):
        with pytest.raises(ConfigurationError):
            check(**about)
