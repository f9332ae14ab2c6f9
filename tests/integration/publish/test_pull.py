"""Images that are pulled from docker's registry and from a bucket: verified, resumed, refused where changed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.fault_proxy import FaultProxy
from helpers.publish_world import PublishWorld
from helpers.stores import BUCKET, PASSWORD, S3_KEYS, s3_server
from integration.publish.conftest import Secure

from envbuild.certify.certificate.verify import About, verify
from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.errors import (
    CertificateRefusedError,
    CheckRefusedError,
    EnvbuildError,
    PublicationRefusedError,
)
from envbuild.ledger.models import CertificateRow, PublicationRow
from envbuild.nightly.published import rebuilt_rows
from envbuild.oci.artifact import artifact_manifest
from envbuild.oci.models import MANIFEST_TYPE
from envbuild.oci.push import Blob, push_blobs, put_manifest, read_manifest
from envbuild.oci.referrers import attach, tag_of
from envbuild.publish.bundle import BUNDLE_TYPE
from envbuild.publish.publish import publish
from envbuild.publish.pull import Pulled, PullRequest, pull
from envbuild.publish.pull_layout import pull_layout
from envbuild.publish.revoke import revoke
from envbuild.publish.sources import parse_reference
from envbuild.store.registry import Registry

LAYER = {"torch": b"torch" * 700_000}


def request(world: PublishWorld, reference: str, **changes: Any) -> PullRequest:
    return PullRequest(**{"reference": parse_reference(reference), "trust": world.trust, **changes})


def pulled(world: PublishWorld, reference: str, **changes: Any) -> Pulled:
    return pull(request(world, reference, **changes), world.context)


def check_error(error: EnvbuildError) -> None:
    text = f"{error.what}\n{error.why}\n{error.fix}"
    assert all((error.what, error.why, error.fix)), text
    assert not [secret for secret in (PASSWORD, *S3_KEYS.values()) if secret in text and secret != "us-east-1"], text


def test_a_sqsh_from_a_registry(secure: Secure, repository: str, world: PublishWorld) -> None:
    place = f"{secure.host}/{repository}"
    publication = world.publish(place)
    assert publication.sqsh is not None
    assert publication.docker_digest is not None
    names = [publication.moving_tag, "mcore-debian12", publication.tag]
    names += [publication.oci_digest, publication.docker_digest, publication.sqsh.digest]
    for name in names:
        fetched = pulled(world, f"{place}{'@' if ':' in name else ':'}{name}", target="cpu")
        assert fetched.publication == publication
        assert fetched.downloaded == (name == publication.moving_tag)
    assert fetched.path.read_bytes() == world.image.sqsh().read_bytes()
    assert fetched.certificate is not None
    verify(fetched.certificate, world.trust, About(image=fetched.path), at=world.context.clock())


def test_a_layout_that_skopeo_reads(secure: Secure, repository: str, world: PublishWorld, tmp_path: Path) -> None:
    world.rebuild(LAYER)
    place = f"{secure.host}/{repository}"
    publication = world.publish(place)
    fetched = pull_layout(request(world, f"{place}:{publication.tag}"), tmp_path / "layout", world.context)
    assert fetched.path == tmp_path / "layout"
    # None is the store's own.
    assert all(path.stat().st_nlink == 1 for path in fetched.path.rglob("*") if path.is_file())
    shown = subprocess.run(
        ["skopeo", "inspect", "--raw", f"oci:{tmp_path}/layout:{publication.tag}"], capture_output=True, check=True
    )
    assert sha256_bytes(shown.stdout) == publication.oci_digest
    layers = {layer["digest"] for layer in json.loads(shown.stdout)["layers"]}
    blobs = {f"sha256:{path.name}": path for path in (tmp_path / "layout/blobs/sha256").iterdir()}
    assert layers <= set(blobs)
    assert all(sha256_file(path) == digest for digest, path in blobs.items())
    with pytest.raises(EnvbuildError, match="is there already"):
        pull_layout(request(world, f"{place}:{publication.tag}"), tmp_path / "layout", world.context)


def test_a_revoked_image_is_not_pulled(secure: Secure, repository: str, world: PublishWorld) -> None:
    place = f"{secure.host}/{repository}"
    first = world.publish(place)
    world.rebuild({"torch": b"other" * 900})
    second = world.publish(place)
    assert pulled(world, f"{place}:{second.moving_tag}").publication == second
    revoke(place, second.oci_digest, "wrong NCCL", world.context)
    assert pulled(world, f"{place}:{second.moving_tag}").publication == first
    revoke(place, first.oci_digest, "as wrong", world.context)
    for reference in (f":{second.moving_tag}", f":{second.tag}", f"@{second.oci_digest}"):
        with pytest.raises(PublicationRefusedError) as refused:
            pulled(world, place + reference)
        assert refused.value.reason == "revoked"
        check_error(refused.value)


def test_a_layout_that_is_revoked_meanwhile_is_not_pulled(
    proxy: FaultProxy, repository: str, world: PublishWorld, tmp_path: Path
) -> None:
    place = f"{proxy.host}/{repository}"
    publication = world.publish(place)
    proxy.add(path="/blobs/", times=1, hold=lambda: revoke(place, publication.oci_digest, "wrong NCCL", world.context))
    with pytest.raises(PublicationRefusedError) as refused:
        pull_layout(request(world, f"{place}:{publication.tag}"), tmp_path / "layout", world.context)
    assert refused.value.reason == "revoked"
    assert not (tmp_path / "layout").exists()


@pytest.mark.parametrize("name", ["sqsh", "layer"])
def test_a_cut_download_goes_on(
    proxy: FaultProxy, repository: str, world: PublishWorld, tmp_path: Path, name: str
) -> None:
    world.rebuild(LAYER)
    place = f"{proxy.host}/{repository}"
    publication = world.publish(place)
    assert publication.sqsh is not None
    digest = publication.sqsh.digest if name == "sqsh" else world.image.record.layers[1].digest
    proxy.add(method="GET", path=digest, times=2, cut_after=1_500_000)
    if name == "sqsh":
        assert pulled(world, f"{place}:{publication.tag}").path.read_bytes() == world.image.sqsh().read_bytes()
    else:
        pull_layout(request(world, f"{place}:{publication.tag}"), tmp_path / "layout", world.context)
    ranges = [headers.get("Range") for method, path, headers in proxy.requests if digest in path and method == "GET"]
    assert ranges == [None, "bytes=1500000-", "bytes=3000000-"]


def test_a_damaged_blob_is_refused(proxy: FaultProxy, repository: str, world: PublishWorld) -> None:
    place = f"{proxy.host}/{repository}"
    publication = world.publish(place)
    assert publication.sqsh is not None
    proxy.add(method="GET", path=publication.sqsh.digest, swap=b"another file")
    with pytest.raises(CheckRefusedError, match="is refused") as refused:
        pulled(world, f"{place}:{publication.tag}")
    check_error(refused.value)
    assert not list((world.context.store.root / "sqsh").glob("*/sha256"))


def test_a_certificate_that_is_gone_is_missed(proxy: FaultProxy, repository: str, world: PublishWorld) -> None:
    place = f"{proxy.host}/{repository}"
    publication = world.publish(place)
    # A retention rule removed what refers to the image: its list is empty.
    proxy.add(method="GET", path=f"manifests/{publication.oci_digest.replace(':', '-')}", status=404)
    with pytest.raises(CertificateRefusedError) as refused:
        pulled(world, f"{place}:{publication.tag}")
    assert "has none in its place" in refused.value.why
    check_error(refused.value)


def attach_foreign(registry: Registry, digest: str, folder: Path, *, alone: bool = False) -> None:
    """Attach what cosign 3 signs to an image, before all that is attached already, or in its place."""
    envelope = {"payload": "e30=", "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": "AA=="}]}
    # With a certificate of X.509, and no key ID.
    material = {"certificate": {"rawBytes": "AA=="}, "tlogEntries": []}
    bundle = {"mediaType": BUNDLE_TYPE, "verificationMaterial": material, "dsseEnvelope": envelope}
    file = folder / "bundle.json"
    file.write_text(json.dumps(bundle))
    blob = Blob(digest=sha256_file(file), size_bytes=file.stat().st_size, file=file)
    push_blobs(registry, [blob])
    described = {"mediaType": BUNDLE_TYPE, "digest": blob.digest, "size": blob.size_bytes}
    subject = {"mediaType": MANIFEST_TYPE, "digest": digest, "size": 1}
    attach(registry, {BUNDLE_TYPE: [artifact_manifest(BUNDLE_TYPE, described, subject, {})]}, digest)
    listed = read_manifest(registry, tag_of(digest))
    assert listed is not None
    index = json.loads(listed.content)
    *others, own = index["manifests"]
    index["manifests"] = [own] if alone else [own, *others]
    put_manifest(registry, tag_of(digest), replace(listed, content=json.dumps(index).encode()))


@pytest.mark.slow
@pytest.mark.parametrize("certified", [True, False])
def test_bundles_of_other_programs_are_passed_over(
    proxy: FaultProxy, registry: Registry, world: PublishWorld, tmp_path: Path, certified: bool
) -> None:
    place = f"{proxy.host}/{registry.address.path}"
    if certified:
        world.certify()
    publication = publish(world.request(place, uncertified=not certified), world.context).publication
    attach_foreign(registry, publication.oci_digest, tmp_path)
    fetched = pulled(world, f"{place}:{publication.tag}", uncertified=not certified)
    assert fetched.publication == publication
    rows = rebuilt_rows(place, world.context)
    assert any(isinstance(row, CertificateRow) for row in rows) == certified


def test_a_bundle_of_another_program_is_no_certificate(
    proxy: FaultProxy, registry: Registry, world: PublishWorld, tmp_path: Path
) -> None:
    place = f"{proxy.host}/{registry.address.path}"
    publication = world.publish(place)
    attach_foreign(registry, publication.oci_digest, tmp_path, alone=True)
    with pytest.raises(CertificateRefusedError) as refused:
        pulled(world, f"{place}:{publication.tag}")
    assert "not a sigstore bundle with a certificate" in refused.value.why
    check_error(refused.value)
    # The ledger is made anew all the same, without that certificate.
    assert [type(row) for row in rebuilt_rows(place, world.context)] == [PublicationRow]


def test_a_sqsh_in_a_bucket(
    proxy: FaultProxy, repository: str, world: PublishWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.rebuild(LAYER)
    world.certify()
    place = f"{proxy.host}/{repository}"
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    with s3_server() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store = f"s3://{BUCKET}/{repository}"
        publication = publish(world.request(place, sqsh_to=store), world.context).publication
        # By the registry's index, whose entry names the bucket; and by the bucket alone.
        for reference in (f"{place}:{publication.tag}", f"{store}:{publication.moving_tag}"):
            fetched = pulled(world, reference)
            assert fetched.publication == publication
            assert fetched.path.read_bytes() == world.image.sqsh().read_bytes()
        assert publication.sqsh is not None
        assert proxy.count("GET", publication.sqsh.digest) == 0


@pytest.mark.slow
def test_processes_of_a_machine_share_one_download(
    proxy: FaultProxy, repository: str, world: PublishWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.rebuild(LAYER)
    place = f"{proxy.host}/{repository}"
    publication = world.publish(place)
    assert publication.sqsh is not None
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = [sys.executable, "-m", "envbuild", "pull", f"{place}:{publication.tag}", "--json"]
    words += ["--trust", str(world.project / "trust.toml"), "--output"]
    ranks = [subprocess.Popen([*words, str(tmp_path / f"{rank}.sqsh")], stdout=subprocess.PIPE) for rank in range(8)]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 8
    assert proxy.count("GET", publication.sqsh.digest) == 1
    assert {json.loads(output)["digest"] for output in outputs} == {publication.sqsh.digest}
    assert {(tmp_path / f"{rank}.sqsh").read_bytes() for rank in range(8)} == {world.image.sqsh().read_bytes()}
