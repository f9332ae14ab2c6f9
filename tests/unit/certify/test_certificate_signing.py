"""Keys and signatures: made, named, refused; and a second verifier, written from DSSE's own text."""

import base64
import hashlib
import json
import os
import stat

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from helpers.certificates import statement

from envbuild.catalog.site import load_site
from envbuild.certify.certificate.keys import load_private, make_keys, parse_public, secret_of
from envbuild.certify.certificate.sign import Signer, load_signer, write_certificate
from envbuild.core.errors import ConfigurationError, UsageError


def verify_as_dsse_says(envelope: bytes, public_pem: bytes) -> dict:
    """PAE and Ed25519, with nothing of ours: what cosign's `verify-blob-attestation --key` does with an envelope."""
    document = json.loads(envelope)
    assert document["payloadType"] == "application/vnd.in-toto+json"
    payload = base64.b64decode(document["payload"], validate=True)
    kind = document["payloadType"].encode()
    pae = b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])
    key = serialization.load_pem_public_key(public_pem)
    assert isinstance(key, ed25519.Ed25519PublicKey)
    (signature,) = document["signatures"]
    key.verify(base64.b64decode(signature["sig"], validate=True), pae)
    return json.loads(payload)


@pytest.fixture
def keys(tmp_path):
    return make_keys(tmp_path / "keys", "lab", None)


def test_signature_is_one_by_dsses_own_rules_and_of_these_bytes_alone(tmp_path, keys):
    made = statement()
    path = tmp_path / "certificate"
    write_certificate(path, made, load_signer(str(keys.private), None))
    envelope, public = path.read_bytes(), keys.public.read_bytes()
    assert verify_as_dsse_says(envelope, public) == made
    other = make_keys(tmp_path / "keys", "other", None).public.read_bytes()
    with pytest.raises(InvalidSignature):
        verify_as_dsse_says(envelope, other)
    changed = json.loads(envelope)
    changed["payload"] = base64.b64encode(
        base64.b64decode(changed["payload"]).replace(b"passed", b"PASSED", 1)
    ).decode()
    with pytest.raises(InvalidSignature):
        verify_as_dsse_says(json.dumps(changed).encode(), public)


def test_keyid_is_the_sha256_of_the_key_in_der(keys):
    der = serialization.load_pem_public_key(keys.public.read_bytes()).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    digest = hashlib.sha256(der).hexdigest()
    assert digest == keys.keyid == Signer(load_private(str(keys.private), None)).keyid


def test_keys_are_pem_files_with_the_private_one_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        made = make_keys(tmp_path / "new" / "folder", "a", None)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.private.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.public.stat().st_mode) == 0o644
    assert made.private.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")
    assert made.public.read_text().startswith("-----BEGIN PUBLIC KEY-----\n")


@pytest.mark.parametrize("existing", ["lab.key", "lab.pub", "a link to nothing"])
def test_no_key_is_overwritten(tmp_path, existing):
    if existing.startswith("lab"):
        (tmp_path / existing).write_text("old")
    else:
        (tmp_path / "lab.key").symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="exists already"):
        make_keys(tmp_path, "lab", None)
    assert [path.name for path in tmp_path.iterdir()] in (["lab.key"], ["lab.pub"])
    assert not (tmp_path / "nothing").exists()


def test_locked_key_needs_its_password_named_by_reference(tmp_path):
    made = make_keys(tmp_path, "lab", "s3cret")
    assert "ENCRYPTED" in made.private.read_text()
    (tmp_path / "password").write_text("s3cret\n")
    assert load_signer(str(made.private), f"file:{tmp_path / 'password'}").keyid == made.keyid
    assert load_signer(str(made.private), "env:WORD", {"WORD": "s3cret"}).keyid == made.keyid
    for password, environ, words in (
        (None, {}, "is locked with a password"),
        ("env:WORD", {"WORD": "wrong"}, "cannot be used"),
        ("env:WORD", {}, "does not exist"),
        ("s3cret", {}, "is not named as it should be"),
    ):
        with pytest.raises(ConfigurationError, match=words) as caught:
            load_signer(str(made.private), password, environ)
        message = f"{caught.value.what} {caught.value.why} {caught.value.fix}"
        assert "s3cret" not in message
        assert "wrong." not in message.replace("password is wrong", "")
        assert "keygen" not in message
        assert ("Name the right password" in message) == (environ == {"WORD": "wrong"})


def test_key_may_be_in_a_variable(keys):
    assert load_signer("env:KEY", None, {"KEY": keys.private.read_text()}).keyid == keys.keyid
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_signer("env:KEY", None, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a PEM file with one private Ed25519 key"),
        ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "not a PEM file"),
        (
            "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED SIGSTORE PRIVATE KEY-----",
            "not a PEM file",
        ),
        ("\udcff", "is not text"),
        ("x" * (65 << 10), "larger than"),
    ],
)
def test_file_without_a_signing_key_is_refused(tmp_path, text, words):
    path = tmp_path / "key"
    path.write_bytes(text.encode(errors="surrogateescape"))
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="cannot be used") as caught:
        load_private(str(path), None)
    assert words in caught.value.why


def test_key_that_others_can_read_is_refused(keys):
    for mode in (0o640, 0o604):
        keys.private.chmod(mode)
        with pytest.raises(ConfigurationError, match="others can read") as caught:
            load_private(str(keys.private), None)
        assert caught.value.fix == f"chmod 600 {keys.private}"
    # Of a public key that is not what is wrong.
    with pytest.raises(ConfigurationError, match="cannot be used") as caught:
        load_private(str(keys.public), None)
    assert "one private Ed25519 key" in caught.value.why


def test_password_for_an_unlocked_key_is_refused(keys):
    with pytest.raises(ConfigurationError, match="is not locked"):
        load_private(str(keys.private), "env:WORD", {"WORD": "x"})
    with pytest.raises(ConfigurationError, match="does not exist") as caught:
        load_private(str(keys.private) + ".none", None)
    assert "envbuild certificate keygen" in caught.value.fix


def test_private_key_among_public_ones_is_refused_without_showing_it(keys):
    text = keys.private.read_text()
    with pytest.raises(ConfigurationError, match="is a private key") as caught:
        parse_public(text, "key lab of trust.toml")
    assert text.splitlines()[1] not in f"{caught.value.what}{caught.value.why}{caught.value.fix}"
    with pytest.raises(ConfigurationError, match="is not a public key"):
        parse_public("lab", "key lab")


def test_secret_is_a_file_or_a_variable(tmp_path):
    (tmp_path / "word").write_text(" two words \r\n")
    assert secret_of(f"file:{tmp_path / 'word'}", "it", {}) == " two words "
    assert secret_of("env:A", "it", {"A": "b"}) == "b"


@pytest.mark.parametrize(
    ("reference", "why", "fix"),
    [
        ("file:{}/none", "none does not exist.", "env:NAME or file:PATH"),
        ("file:{}", "is a folder and no plain file.", "env:NAME or file:PATH"),
        ("file:{}/bytes", "bytes is not text.", "env:NAME or file:PATH"),
        ("env:", "Behind env: no variable is named.", "env:NAME or file:PATH"),
        ("file:", "Behind file: no file is named.", "env:NAME or file:PATH"),
        ("env:NONE", "The variable NONE is unset or empty.", "Set NONE"),
        ("word", "A secret is named and never written out.", "env:NAME or file:PATH"),
    ],
)
def test_unreadable_password_is_refused_with_how_to_name_one(tmp_path, keys, reference, why, fix):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for read in (lambda name: secret_of(name, "it", {}), lambda name: load_private(str(keys.private), name, {})):
        with pytest.raises(ConfigurationError) as caught:
            read(reference.format(tmp_path))
        assert why in caught.value.why
        assert fix in caught.value.fix
        assert "keygen" not in caught.value.fix


@pytest.mark.parametrize("reference", ["env:", "file:"])
def test_reference_without_a_name_is_refused(reference):
    with pytest.raises(ConfigurationError, match="is not named as it should be") as caught:
        load_private(reference, None, {})
    assert caught.value.why.startswith(f"Behind {reference} no ")


def test_file_of_two_keys_is_refused(tmp_path, keys):
    """Only the first would count, without a warning."""
    more = make_keys(tmp_path, "more", None)
    both = tmp_path / "both"
    both.write_text(keys.private.read_text() + more.private.read_text())
    both.chmod(0o600)
    with pytest.raises(ConfigurationError, match="cannot be used") as caught:
        load_private(str(both), None)
    assert "one private Ed25519 key" in caught.value.why


def test_site_names_key_password_and_trust_by_reference(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('[signing]\nkey = "~/lab.key"\npassword = "env:WORD"\ntrust = "~/trust.toml"\n')
    environ = {"HOME": str(tmp_path), "ENVBUILD_CONFIG": str(config)}
    signing = load_site(environ).signing
    assert (signing.key, signing.password, signing.trust) == (
        str(tmp_path / "lab.key"), "env:WORD", str(tmp_path / "trust.toml"),
    )  # fmt: skip
    environ |= {"ENVBUILD_SIGNING_KEY": "env:K", "ENVBUILD_SIGNING_PASSWORD": "file:/p", "ENVBUILD_TRUST": "/t"}
    signing = load_site(environ).signing
    assert (signing.key, signing.password, signing.trust) == ("env:K", "file:/p", "/t")
