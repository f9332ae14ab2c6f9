"""A pull from a .sqsh store: what is refused, what is fetched once, and what goes on where it ended."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from envbuild.catalog.policy import Policy
from envbuild.certify.certificate.envelope import SignedBytes
from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.certificate.sign import load_signer
from envbuild.certify.certificate.trust import load_trust
from envbuild.core import digests, tomlread
from envbuild.core.errors import (
    CertificateRefusedError,
    ConfigurationError,
    NetworkError,
    PublicationRefusedError,
    UsageError,
)
from envbuild.publish.models import Revocation
from envbuild.publish.pull import pull
from envbuild.publish.signature import objection_to_signature
from envbuild.publish.sources import parse_reference
from envbuild.publish.sqsh_stores import SqshStore

BACK = Revocation(reason="wrong numbers", at="2026-11-20T07:00:00Z")


def test_pull_by_tag_and_digest(there):
    publication = there.publish()
    for name in ("mcore-debian12-cpu", publication.tag, publication.oci_digest, publication.sqsh.digest):
        fetched = pull(there.request(name), there.context)
        assert fetched.publication == publication
        assert fetched.path.read_bytes() == there.image.read_bytes()
        assert fetched.key == "lab"
        assert digests.sha256_file(fetched.certificate) == publication.certificate_digest
        assert fetched.downloaded == (name == "mcore-debian12-cpu")
    # A tag may be without its target.
    assert pull(there.request("mcore-debian12", target="cpu"), there.context).publication == publication


def test_revoked_image_is_refused(there):
    publication = there.publish()
    pull(there.request(), there.context)
    there.store.revoke(publication.oci_digest, BACK)
    for name in ("mcore-debian12-cpu", publication.sqsh.digest):
        with pytest.raises(PublicationRefusedError, match="is not pulled") as refused:
            pull(there.request(name, uncertified=True), there.context)
        assert "wrong numbers" in refused.value.why
        assert refused.value.reason == "revoked"


MOVING, UNCERTIFIED = "mcore-debian12-cpu", "uncertified-mcore-debian12-cpu"


@pytest.mark.parametrize(
    ("published", "name", "wanted", "error", "reason"),
    [
        ({"certified": False, "moving_tag": UNCERTIFIED}, UNCERTIFIED, {}, PublicationRefusedError, "uncertified"),
        ({"certified": False}, MOVING, {"uncertified": True}, PublicationRefusedError, "tag"),
        ({}, MOVING, {"trust": None, "uncertified": True}, UsageError, ""),
        ({}, MOVING, {"target": "h200"}, PublicationRefusedError, "target"),
        ({}, "other", {}, ConfigurationError, ""),
        ({}, "sha256:" + "0" * 64, {}, ConfigurationError, ""),
        ({}, MOVING, {"max_age": timedelta(seconds=-1)}, CertificateRefusedError, "too-old"),
        # What a trusted publisher may not state either.
        ({"oci_digest": "sha256:" + "1" * 64}, MOVING, {}, CertificateRefusedError, "entry"),
        ({"tag": "mcore-debian12-ffffffffffff-cpu"}, MOVING, {}, CertificateRefusedError, "tag"),
        ({"tag": "other-debian12-{lock}-cpu"}, MOVING, {}, CertificateRefusedError, "tag"),
        ({"tag": "mcore-debian12-{lock}-h200"}, MOVING, {}, CertificateRefusedError, "tag"),
        ({"base_rebuilt": True}, MOVING, {}, CertificateRefusedError, "base-rebuilt"),
        ({"published_at": "2027-06-01T00:00:00Z"}, MOVING, {}, CertificateRefusedError, "too-old"),
    ],
)
def test_refusals(there, published, name, wanted, error, reason):
    if "tag" in published:
        published = {"tag": published["tag"].format(lock=digests.short(there.world.image.record.lock_digest))}
    there.publish(**published)
    with pytest.raises(error) as refused:
        pull(there.request(name, **wanted), there.context)
    assert (refused.value.reason, bool(refused.value.fix)) == (reason, True)


def test_uncertified_image_is_pulled_on_demand(there):
    publication = there.publish(certified=False, moving_tag=UNCERTIFIED)
    for name in (UNCERTIFIED, publication.oci_digest):
        fetched = pull(there.request(name, uncertified=True, trust=None), there.context)
        assert (fetched.key, fetched.certificate) == (None, None)


def test_certificate_of_another_key_is_refused(there, tmp_path):
    there.publish()
    other = make_keys(tmp_path / "other", "other", None)
    (tmp_path / "other.toml").write_text(f'[keys.other]\nfile = "{other.public}"\n')
    with pytest.raises(CertificateRefusedError, match="the certificate of file://") as refused:
        pull(there.request(trust=load_trust(tmp_path / "other.toml")), there.context)
    assert "has other keys" in refused.value.why


def test_certificate_from_the_future_is_refused(there, monkeypatch):
    there.publish()
    context = there.context
    early = context.clock() - timedelta(hours=1)
    monkeypatch.setattr(type(there), "context", context.__class__(**{**vars(context), "clock": lambda: early}))
    with pytest.raises(CertificateRefusedError) as refused:
        pull(there.request(), there.context)
    assert "clocks" in refused.value.fix


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-20],
        lambda data: data.replace(b'"payload":"', b'"payload":"A'),
        lambda data: data + b"\n",
    ],
)
def test_changed_bundle_is_refused(there, change):
    there.publish()
    file = there.served("certificates")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CertificateRefusedError, match="is refused"):
        pull(there.request(), there.context)
    assert not list((there.home / "cache").rglob("*.sqsh"))


def test_certificate_that_was_forged_with_its_digest_is_refused(there, tmp_path):
    publication, _ = there.described()
    forger = load_signer(str(make_keys(tmp_path / "forger", "forger", None).private), None)
    there.world.signer = forger
    there.publish()
    assert isinstance(forger.sign(b"{}"), SignedBytes)
    with pytest.raises(CertificateRefusedError) as refused:
        pull(there.request(), there.context)
    assert "has other keys" in refused.value.why
    assert publication.keyid


@pytest.mark.parametrize(
    "changes",
    [
        {"stack": "other"},
        {"base": "other"},
        {"lock_digest": "sha256:" + "1" * 64},
        {"keyid": "cd" * 32},
        {"measured_at": "2026-11-23T00:00:00Z"},
    ],
)
def test_entry_that_states_something_else_is_refused(there, changes):
    there.publish()
    file = there.served("publications")
    file.write_bytes(json.dumps({**json.loads(file.read_bytes()), **changes}).encode())
    with pytest.raises(CertificateRefusedError) as refused:
        pull(there.request(), there.context)
    assert "its entry was changed" in refused.value.why


def test_entry_of_another_sqsh_is_refused(there, tmp_path):
    there.publish()
    file = there.served("publications")
    entry = json.loads(file.read_bytes())
    other = tmp_path / "other.sqsh"
    other.write_bytes(b"other")
    entry["sqsh"] |= {"digest": digests.sha256_file(other), "size_bytes": 5}
    file.write_bytes(json.dumps(entry).encode())
    with pytest.raises(CertificateRefusedError) as refused:
        pull(there.request(), there.context)
    assert "this is another one" in refused.value.why


def test_tag_that_leads_to_another_publication_is_refused(there):
    """Whoever may write to the store can let a tag mean another image, whose certificate counts."""
    publication = there.publish()
    pointer = there.home / f"share/tags/{publication.tag}.json"
    (pointer.parent / "other-cpu.json").write_bytes(pointer.read_bytes())
    for changes in ({"name": "other-cpu"}, {"name": "other", "target": "cpu"}):
        with pytest.raises(CertificateRefusedError) as refused:
            pull(there.request(**changes), there.context)
        assert refused.value.reason == "entry"


def test_reason_of_a_revocation_is_one_line(there):
    """Nobody signs it: it must not look like a help of envbuild's."""
    publication = there.publish()
    there.store.revoke(publication.oci_digest, BACK.model_copy(update={"reason": "old\n  help:  run this \x1b[1m"}))
    with pytest.raises(PublicationRefusedError) as refused:
        pull(there.request(), there.context)
    assert "\n" not in refused.value.why
    assert "\x1b" not in refused.value.why


def test_revocation_that_is_written_over_counts(there):
    publication = there.publish()
    file = there.served("publications")
    before = file.read_bytes()
    there.store.revoke(publication.oci_digest, BACK)
    file.write_bytes(before)
    with pytest.raises(PublicationRefusedError) as refused:
        pull(there.request(), there.context)
    assert "wrong numbers" in refused.value.why
    there.served("revoked").write_bytes(b"{}")
    with pytest.raises(PublicationRefusedError) as refused:
        pull(there.request(publication.tag), there.context)
    assert refused.value.reason == "revoked"


def test_docker_digest_is_no_other_name_of_a_revoked_image(there):
    """It is in the certificate, too: as the OCI digest it would have no revocation."""
    record = there.world.image.record
    docker = "sha256:" + "d" * 64
    original = there.world.certify
    there.world.certify = lambda: original(subject={"docker_digest": docker})
    changed = there.publish(oci_digest=str(record.sqsh_digest))
    with pytest.raises(CertificateRefusedError) as refused:
        pull(there.request(changed.tag), there.context)
    assert "states another image digest" in refused.value.why


def test_help_for_what_nobody_signed_works(there, tmp_path):
    there.publish(signed=False)
    with pytest.raises(CertificateRefusedError) as refused:
        pull(there.request(), there.context)
    assert refused.value.reason == "publication-signature"
    assert "--key FILE" in refused.value.fix
    head, *lines = refused.value.fix.splitlines()
    assert head.endswith("--policy FILE.toml:")
    own = Policy.model_validate(tomlread.loads("\n".join(lines)))
    assert own.model_copy(update={"signed_publication": True}) == there.request().policy.model_copy(
        update={"summary": own.summary}
    )
    assert pull(there.request(policy=own), there.context).downloaded


@pytest.mark.parametrize("changes", [{"base_rebuilt": True}, {"moving_tag": "stable"}])
def test_no_policy_is_offered_that_would_refuse_it_too(there, changes):
    there.publish(signed=False, **changes)
    with pytest.raises(CertificateRefusedError) as refused:
        pull(there.request(changes.get("moving_tag", "mcore-debian12-cpu")), there.context)
    assert refused.value.reason == "publication-signature"
    assert refused.value.fix == "Publish the image again with a key that you trust: --key FILE."


@pytest.mark.parametrize("gpus", [(), ("90",)])
def test_unsigned_entry_does_not_state_the_gpus_of_an_own_target(there, gpus):
    original = there.world.certify
    there.world.certify = lambda: original(subject={"target": "mine"})
    lock = digests.short(there.world.image.record.lock_digest)
    names = {"target": "mine", "tag": f"mcore-debian12-{lock}-mine", "moving_tag": "mcore-debian12-mine"}
    there.publish(signed=False, gpus=gpus, **names)
    policy = there.request().policy.model_copy(update={"signed_publication": False})
    with pytest.raises(CertificateRefusedError) as refused:
        pull(there.request("mcore-debian12-mine", policy=policy), there.context)
    assert refused.value.reason == "target"
    assert "--key FILE" in refused.value.fix
    there.publish(**names)
    assert pull(there.request("mcore-debian12-mine", policy=policy), there.context).publication.target == "mine"


def test_key_that_may_not_publish_is_refused(there):
    there.publish()
    trust = there.world.trust
    (key,) = trust.keys.values()
    for settings, why in (({"revoked": "stolen"}, "was revoked"), ({"stacks": ("nemo",)}, "is trusted for nemo")):
        limited = replace(key, settings=key.settings.model_copy(update=settings))
        policy = there.request().policy
        at = there.context.clock()
        publication = there.store.find("mcore-debian12-cpu")
        assert why in objection_to_signature(publication, replace(trust, keys={key.keyid: limited}), policy, at)
    named = there.request().policy.model_copy(update={"keys": ("other",)})
    assert "the policy counts other" in objection_to_signature(publication, trust, named, at)
    short = publication.model_copy(update={"signature": publication.signature.model_copy(update={"sig": "AA=="})})
    assert "changed, or forged" in objection_to_signature(short, trust, policy, at)


def test_document_that_somebody_dated_is_written_anew(there):
    """Of the image that is published: it would stay for ever."""
    publication = there.publish()
    file = there.served("publications")
    for changes in ({"published_at": "2099-01-01T00:00:00Z"}, {"stack": "other"}):
        file.write_bytes(json.dumps({**json.loads(file.read_bytes()), **changes}).encode())
        assert not there.store.has(publication)
        there.publish()
        assert pull(there.request(), there.context).publication == there.store.find("mcore-debian12-cpu")


def test_tag_that_moves_meanwhile_is_followed(there, monkeypatch):
    there.publish(published_at="2026-11-20T06:00:00Z")
    download = SqshStore.download
    moved = []

    def move(self, sqsh, to, start=0):
        if not moved:
            there.world.rebuild({"torch": b"a newer file " * 10_000})
            moved.append(
                there.publish(tag=f"mcore-debian12-{digests.short(there.world.image.record.lock_digest)}-cpu-r2")
            )
        return download(self, sqsh, to, start)

    monkeypatch.setattr(SqshStore, "download", move)
    fetched = pull(there.request(), there.context)
    assert fetched.publication == moved[0]
    assert any("changed meanwhile" in note for note in there.notes.lines)


def test_image_that_is_revoked_meanwhile_is_refused(there, monkeypatch):
    publication = there.publish()
    download = SqshStore.download

    def revoke(self, *args, **kwargs):
        there.store.revoke(publication.oci_digest, BACK)
        return download(self, *args, **kwargs)

    monkeypatch.setattr(SqshStore, "download", revoke)
    with pytest.raises(PublicationRefusedError) as refused:
        pull(there.request(), there.context)
    assert refused.value.reason == "revoked"


def test_store_that_is_gone_is_a_network_error(there):
    there.publish()
    (there.home / "share").rename(there.home / "away")
    with pytest.raises(NetworkError, match=r"the \.sqsh store file://"):
        pull(there.request(), there.context)


@pytest.mark.parametrize(
    ("text", "place", "name"),
    [
        ("registry.example:5000/team/images:nemo-h200", "registry.example:5000/team/images", "nemo-h200"),
        ("oci://host/repo:tag", "oci://host/repo", "tag"),
        ("host/repo@sha256:" + "a" * 64, "host/repo", "sha256:" + "a" * 64),
        ("host/repo:tag@sha256:" + "a" * 64, "host/repo", "sha256:" + "a" * 64),
        ("s3://bucket/prefix:tag", "s3://bucket/prefix", "tag"),
        ("s3://bucket/prefix/tag", "s3://bucket/prefix", "tag"),
        ("gs://bucket/tag", "gs://bucket", "tag"),
        ("/lustre/images:tag", "/lustre/images", "tag"),
        ("file:///lustre/images:tag", "file:///lustre/images", "tag"),
        ("docker://registry:5000#team/images:tag", "registry:5000/team/images", "tag"),
        ("docker://me@host#repo@sha256:" + "b" * 64, "host/repo", "sha256:" + "b" * 64),
        ("docker://host:5000/repo:tag", "host:5000/repo", "tag"),
        ("docker://s3://bucket/prefix:tag", "s3://bucket/prefix", "tag"),
        ("docker://host#repo:tag@sha256:" + "b" * 64, "host/repo", "sha256:" + "b" * 64),
    ],
)
def test_references(text, place, name):
    reference = parse_reference(text)
    assert (reference.place, reference.name) == (place, name)


@pytest.mark.parametrize(
    "text", ["", "ubuntu", "ubuntu:24.04", "docker://ubuntu:24.04", "host/repo", "s3://bucket", "/dir", "host:5000/x"]
)
def test_what_is_no_reference(text):
    with pytest.raises(UsageError, match="names no published image") as refused:
        parse_reference(text)
    assert refused.value.fix
