"""A certificate counts for the key that is trusted, in its time, about the thing that was named; each refusal."""

import json
import os
from datetime import datetime, timedelta, timezone

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa, x25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from helpers.certificates import SHA, case_of, measured, statement

from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.certify.certificate.envelope import SignedBytes, decode, encode
from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.certificate.sign import load_signer, write_certificate
from envbuild.certify.certificate.statement import seal_of
from envbuild.certify.certificate.trust import load_trust
from envbuild.certify.certificate.verify import About, verify
from envbuild.cli.main import run
from envbuild.core.digests import canonical_json
from envbuild.core.errors import CertificateRefusedError, ConfigurationError

NOW = datetime.now(timezone.utc)
SMALL = [case_of("gpt-fp32-baseline"), case_of("gpt-fp32-tp2")]


def moment(**ago):
    return (NOW - timedelta(**ago)).strftime(MOMENT_FORMAT)


def stated(issued=None, reused_from=None, **changes):
    """A statement of the moment that these tests count from, however long after it they run.

    ``reused_from`` is when the last case was measured, in certificates of versions that reused single verdicts.
    """
    made = statement(**changes)
    if reused_from:
        made["predicate"]["cases"][-1]["reused"] = {"from": reused_from, "run": "r"}
    made["predicate"]["issued_at"] = issued or moment()
    made["predicate"]["seal"] = seal_of(made)
    return made


def signature_of(path):
    return json.loads(path.read_bytes())["signatures"][0]["sig"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keys of two signers, and a certificate that the first one signed."""
    place = tmp_path_factory.mktemp("signed")
    for name in ("lab", "other"):
        make_keys(place, name, None)
    signer, number = load_signer(str(place / "lab.key"), None), 0
    # One whose signature has a character that base64 writes in two ways.
    while not number or not set("+/") & set(signature_of(place / "certificate")):
        number += 1
        write_certificate(place / "certificate", stated(cases=SMALL, nonce=f"{number:032x}"), signer)
    return place


def trust_of(folder, tmp_path, settings="", name="lab", key="lab"):
    path = tmp_path / "trust.toml"
    path.write_text(f'[keys.{name}]\nfile = "{folder / key}.pub"\n{settings}\n')
    return load_trust(path)


def check_refused(path, trust, words, about=About(), at=NOW, **options):  # noqa: B008
    with pytest.raises(CertificateRefusedError, match="is refused") as caught:
        verify(path, trust, about, at=at, **options)
    assert caught.value.exit_code == 12
    assert words in caught.value.why, caught.value.why
    assert caught.value.fix


def signed(folder, tmp_path, made, signer="lab"):
    path = tmp_path / "certificate"
    write_certificate(path, made, load_signer(str(folder / f"{signer}.key"), None))
    return path


def test_certificate_of_a_trusted_key_counts(folder, tmp_path):
    result = verify(folder / "certificate", trust_of(folder, tmp_path), About(), at=NOW)
    assert (result.key.name, result.compared) == ("lab", ())
    assert [case.id for case in result.statement.predicate.cases] == ["gpt-fp32-baseline", "gpt-fp32-tp2"]


def test_every_byte_counts(folder, tmp_path):
    """One byte changed anywhere in the file, in a bit or in its case in turn: it does not verify."""
    data, trust = (folder / "certificate").read_bytes(), trust_of(folder, tmp_path)
    path = tmp_path / "changed"
    path.write_bytes(data)
    counted = 0
    # In place: to truncate and write anew waits for the disk each time.
    with path.open("r+b", buffering=0) as file:
        for position, byte in enumerate(data):
            # Of the payload, which is one text in base64, some do.
            if 100 < position < len(data) - 400 and position % 31:
                continue
            mask = 1 << position // 2 % 8 if position % 2 else 0x20
            os.pwrite(file.fileno(), bytes([byte ^ mask]), position)
            try:
                verify(path, trust, About(), at=NOW)
                counted += 1
            except CertificateRefusedError:
                pass
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert (counted, len(data) > 3000) == (0, True)
    verify(path, trust, About(), at=NOW)
    for cut in (data[:-1], data + b"\n", data + b" ", b"\xef\xbb\xbf" + data, b""):
        path.write_bytes(cut)
        check_refused(path, trust, "")


def rewritten(folder, tmp_path, change):
    envelope = json.loads((folder / "certificate").read_bytes())
    text = change(envelope)
    path = tmp_path / "rewritten"
    path.write_text(text if isinstance(text, str) else json.dumps(envelope, separators=(",", ":")) + "\n")
    return path


def put(*place, value):
    def change(envelope):
        for key in place[:-1]:
            envelope = envelope[key]
        envelope[place[-1]] = value

    return change


def second_signature(envelope):
    envelope["signatures"].append(dict(envelope["signatures"][0]))


def spaces_in_base64(envelope):
    envelope["payload"] = envelope["payload"][:8] + "\n" + envelope["payload"][8:]


def twice(envelope):
    text = json.dumps(envelope, separators=(",", ":")) + "\n"
    return text.replace('{"payloadType"', '{"payload":"e30=","payloadType"', 1)


def urlsafe(envelope):
    envelope["signatures"][0]["sig"] = envelope["signatures"][0]["sig"].replace("+", "-").replace("/", "_")
    assert set("-_") & set(envelope["signatures"][0]["sig"])


def own_key(envelope):
    envelope["publicKey"] = "-----BEGIN PUBLIC KEY-----"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("payloadType", value="application/json"), "Its payloadType is 'application/json'"),
        (put("signatures", value=[]), "It is not signed"),
        (put("signatures", value={}), "must be a list"),
        (put("signatures", 0, "sig", value="AAAA"), "has 3 bytes"),
        (put("signatures", 0, "sig", value=None), "is not text"),
        (put("signatures", 0, "keyid", value=""), "It names key ''"),
        (put("signatures", 0, "keyid", value=7), "a keyid and a sig"),
        (put("payload", value="e30"), "not base64"),
        (second_signature, "2 signatures"),
        (urlsafe, "not base64"),
        (spaces_in_base64, "not base64"),
        (twice, "has a key twice"),
        (own_key, "signatures alone"),
        (json.dumps, "not in the form that envbuild writes"),
        (lambda envelope: "[" * 100000, "not valid JSON"),
        (lambda envelope: "null\n", "not a DSSE envelope"),
    ],
)
def test_envelope_of_another_form_is_refused(folder, tmp_path, change, words):
    check_refused(rewritten(folder, tmp_path, change), trust_of(folder, tmp_path), words)


def test_signature_of_another_key_is_refused_also_under_the_id_of_a_trusted_one(folder, tmp_path):
    mine, theirs = (signed(folder, tmp_path, stated(cases=SMALL), name).read_bytes() for name in ("lab", "other"))
    path, trust = tmp_path / "certificate", trust_of(folder, tmp_path)
    check_refused(path, trust, "has other keys: lab (")
    keyid, other = (json.loads(envelope)["signatures"][0]["keyid"].encode() for envelope in (mine, theirs))
    path.write_bytes(theirs.replace(other, keyid))
    check_refused(path, trust, "Its signature is not key lab's")


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"{}", "Its payload is not a certificate"),
        (b"not JSON", "Its payload is not a certificate"),
        (b'{"_type": 1, "_type": 2}', "a key twice"),
        (b"[" * 100000, "Its payload is not a certificate"),
        (canonical_json({**stated(), "predicateType": "https://slsa.dev/provenance/v1"}), "predicateType"),
        (canonical_json({**stated(), "_type": "https://in-toto.io/Statement/v0.1"}), "_type"),
        (canonical_json(stated()).replace(b"certify-full", b"certify-huge"), "Its seal is"),
        (canonical_json(stated()).replace(b'"whole_matrix":true', b'"whole_matrix":1'), "whole_matrix"),
    ],
)
def test_signed_payload_must_be_a_certificate(folder, tmp_path, payload, words):
    path = tmp_path / "certificate"
    path.write_bytes(encode(load_signer(str(folder / "lab.key"), None).sign(payload)))
    check_refused(path, trust_of(folder, tmp_path), words)


def test_payload_is_not_read_before_its_signature_is_verified(folder, tmp_path):
    content = decode((folder / "certificate").read_bytes())
    path = tmp_path / "certificate"
    path.write_bytes(encode(SignedBytes(b"[" * 100000, content.signed)))
    check_refused(path, trust_of(folder, tmp_path), "Its signature is not")


# ---- time


def test_key_counts_in_its_time_alone(folder, tmp_path):
    def trust(before, after):
        return trust_of(folder, tmp_path, f'not_before = "{before}"\nnot_after = "{after}"')

    path = folder / "certificate"
    verify(path, trust(moment(days=1), moment(days=-1)), About(), at=NOW)
    check_refused(path, trust(moment(days=9), moment(days=1)), "Key lab expired: it counts until")
    check_refused(path, trust(moment(days=-1), moment(days=-9)), "Key lab counts from")


def backdated(folder, tmp_path, **ago):
    """What a thief of the key writes: an old moment of issue."""
    made = stated(moment(**ago), cases=SMALL, measured=measured(started_at=moment(**ago), finished_at=moment(**ago)))
    return signed(folder, tmp_path, made)


def test_expired_key_does_not_count_for_a_backdated_certificate(folder, tmp_path):
    path = backdated(folder, tmp_path, days=5)
    trust = trust_of(folder, tmp_path, f'not_after = "{moment(days=1)}"')
    check_refused(path, trust, "is verified for")
    # Whoever knows that the file was there then may say so.
    verify(path, trust, About(), at=NOW - timedelta(days=2))
    check_refused(path, trust_of(folder, tmp_path, f'not_before = "{moment(days=4)}"'), "was issued at")


def test_certificate_from_after_the_moment_does_not_count(folder, tmp_path):
    check_refused(folder / "certificate", trust_of(folder, tmp_path), "after the moment", at=NOW - timedelta(days=1))
    # The last moment that there is has none after it.
    last = datetime.max.replace(tzinfo=timezone.utc, microsecond=0)
    assert verify(folder / "certificate", trust_of(folder, tmp_path), About(), at=last).key.name == "lab"
    verify(folder / "certificate", trust_of(folder, tmp_path), About(), at=NOW - timedelta(minutes=4))


def test_age_is_that_of_the_oldest_number_in_it(folder, tmp_path):
    recent = measured(started_at=moment(hours=2), finished_at=moment(hours=1))
    day, trust = timedelta(days=1), trust_of(folder, tmp_path)
    path = signed(folder, tmp_path, stated(cases=SMALL, measured=recent))
    verify(path, trust, About(), at=NOW, max_age=day)
    check_refused(path, trust, "Its oldest numbers are from", max_age=timedelta(hours=1))
    path = signed(folder, tmp_path, stated(cases=SMALL, measured=recent, reused_from=moment(days=40)))
    check_refused(path, trust, f"Its oldest numbers are from {moment(days=40)}", max_age=day)
    verify(path, trust, About(), at=NOW, max_age=41 * day)


def test_numbers_from_after_the_certificate_do_not_count(folder, tmp_path):
    trust = trust_of(folder, tmp_path)
    later = measured(started_at=moment(hours=2), finished_at=moment(days=-40))
    check_refused(signed(folder, tmp_path, stated(cases=SMALL, measured=later)), trust, "Its newest numbers are from")
    recent = measured(started_at=moment(hours=2), finished_at=moment(hours=1))
    path = signed(folder, tmp_path, stated(cases=SMALL, measured=recent, reused_from=moment(days=-40)))
    check_refused(path, trust, "after it was issued", max_age=timedelta(days=1))


# ---- trust


def test_revoked_key_is_refused_and_does_not_go_on_under_another_name(folder, tmp_path):
    trust = trust_of(folder, tmp_path, 'revoked = "the laptop was stolen"')
    words = "Key lab was revoked: the laptop was stolen"
    check_refused(folder / "certificate", trust, words, at=NOW - timedelta(days=300))
    file = f'file = "{folder}/lab.pub"\n'
    (tmp_path / "trust.toml").write_text(f'[keys.revoked]\n{file}revoked = "stolen"\n[keys.fine]\n{file}')
    with pytest.raises(ConfigurationError, match="one key under two names"):
        load_trust(tmp_path / "trust.toml")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('stacks = ["nemo"]', "about stack mcore; key lab is trusted for nemo"),
        ('targets = ["cpu", "h100"]', "about target h200; key lab is trusted for cpu, h100"),
        ('stacks = ["mcore"]\ntargets = ["h200"]', None),
    ],
)
def test_key_counts_for_the_stacks_and_targets_it_is_trusted_with(folder, tmp_path, settings, words):
    trust = trust_of(folder, tmp_path, settings)
    if words:
        check_refused(folder / "certificate", trust, words)
    else:
        verify(folder / "certificate", trust, About(), at=NOW)


def test_key_may_stand_in_the_trust_file_itself(folder, tmp_path):
    path = tmp_path / "trust.toml"
    path.write_text(f'[keys.lab]\npublic = """\n{(folder / "lab.pub").read_text()}"""\n')
    assert verify(folder / "certificate", load_trust(path), About(), at=NOW).key.name == "lab"
    # By its path from the trust file's folder.
    (tmp_path / "mine.pub").write_bytes((folder / "lab.pub").read_bytes())
    path.write_text('[keys.lab]\nfile = "mine.pub"\n')
    assert verify(folder / "certificate", load_trust(path), About(), at=NOW).key.name == "lab"


def test_two_keys_under_one_name_are_refused(folder, tmp_path):
    """Only the first would count, without a warning."""
    both, path = "".join((folder / f"{name}.pub").read_text() for name in ("lab", "other")), tmp_path / "trust.toml"
    (tmp_path / "both.pub").write_text(both)
    for settings in ('file = "both.pub"', f'public = """\n{both}"""'):
        path.write_text(f"[keys.lab]\n{settings}\n")
        with pytest.raises(ConfigurationError, match="is not a public key") as caught:
            load_trust(path)
        assert "of one Ed25519 key" in caught.value.why


@pytest.mark.parametrize("spoil", ["missing", "folder", "bytes", "text"])
def test_public_key_that_cannot_be_read_is_to_be_got_from_its_owner(tmp_path, spoil):
    path = tmp_path / "lab.pub"
    if spoil == "folder":
        path.mkdir()
    elif spoil != "missing":
        path.write_bytes(b"\xff" if spoil == "bytes" else b"lab")
    (tmp_path / "trust.toml").write_text('[keys.lab]\nfile = "lab.pub"\n')
    with pytest.raises(ConfigurationError) as caught:
        load_trust(tmp_path / "trust.toml")
    assert "from its owner" in caught.value.fix
    assert "keygen" not in caught.value.fix


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "keys"),
        ("[keys]\n", "keys"),
        ("[keys.lab]\n", "either `public`"),
        ('[keys.lab]\npublic = "x"\nfile = "y"\n', "either `public`"),
        ('[keys.lab]\nfile = "x"\nnot_after = "2026-01-01"\n', "not_after"),
        (
            '[keys.lab]\nfile = "x"\nnot_before = "2026-02-01T00:00:00Z"\nnot_after = "2026-01-01T00:00:00Z"\n',
            "earlier",
        ),
        ('[keys.lab]\nfile = "x"\nnot_afer = "2026-01-01T00:00:00Z"\n', "did you mean 'not_after'"),
        ('[keys.lab]\nfile = "x"\nrevoked = false\n', "revoked"),
        ('[keys.lab]\nfile = "x"\nstacks = []\n', "stacks"),
        ('[keys.lab]\nfile = "none.pub"\n', "does not exist"),
        ('[keys.lab]\nfile = "x"\n[keys."lab"]\nrevoked = "stolen"\n', "lab"),
        ('[keys.lab]\nfile = "x"\n[keys.LAB]\nfile = "y"\n', "LAB"),
    ],
)
def test_trust_file_that_is_wrong_is_refused(tmp_path, text, words):
    path = tmp_path / "trust.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_trust(path)
    assert words in f"{caught.value.what} {caught.value.why}"


@pytest.mark.parametrize(
    "settings",
    [
        'public = """\n{private}"""',
        'file = "{folder}/lab.key"',
        'public = """\n{public}{private}"""',
        'public = """\n{private}"""\nfile = "x"',
        'public = """\n{private}"""\nnot_after = "soon"',
        'public = ["""\n{private}"""]',
        'publik = """\n{private}"""',
        'public = """\n{private}""',
    ],
)
def test_private_key_in_a_trust_file_is_refused_and_never_shown(folder, tmp_path, settings):
    private, path = (folder / "lab.key").read_text(), tmp_path / "trust.toml"
    public = (folder / "lab.pub").read_text()
    path.write_text("[keys.lab]\n" + settings.format(private=private, public=public, folder=folder))
    with pytest.raises(ConfigurationError) as caught:
        load_trust(path)
    message = json.dumps(caught.value.as_json())
    assert not [line for line in private.splitlines()[1:-1] if line[:20] in message]


@pytest.mark.parametrize(
    "key",
    [
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP256R1()),
        x25519.X25519PrivateKey.generate(),
    ],
    ids=["rsa", "ecdsa", "x25519"],
)
def test_key_of_another_kind_is_neither_trusted_nor_signs(tmp_path, key):
    path = tmp_path / "trust.toml"
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    path.write_text(f'[keys.lab]\npublic = """\n{pem}"""\n')
    with pytest.raises(ConfigurationError, match="is not a public key"):
        load_trust(path)
    private = tmp_path / "lab.key"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    private.chmod(0o600)
    with pytest.raises(ConfigurationError, match="cannot be used") as caught:
        load_signer(str(private), None)
    assert "one private Ed25519 key" in caught.value.why


@pytest.mark.parametrize("place", ["keyid", "payloadType", "field"])
def test_refused_certificate_prints_no_control_characters(folder, tmp_path, capsys, place):
    """Anyone may have written them before the signature is verified, and the signer after it."""
    evil, path = "\x1b[2J\x1b]0;owned\x07verified\r\n\u202e", tmp_path / "certificate"
    if place == "field":
        payload = canonical_json({**stated(), evil: 1, "_type": evil})
        path.write_bytes(encode(load_signer(str(folder / "lab.key"), None).sign(payload)))
    else:
        where = ("payloadType",) if place == "payloadType" else ("signatures", 0, "keyid")
        path = rewritten(folder, tmp_path, put(*where, value=evil))
    trust = tmp_path / "trust.toml"
    trust.write_text(f'[keys.lab]\nfile = "{folder / "lab.pub"}"\n')
    for words in (["verify", str(path), "--trust", str(trust)], ["show", str(path)]):
        assert run(["certificate", *words]) == (0 if (words[0], place) == ("show", "keyid") else 12)
        output, errors = capsys.readouterr()
        assert "owned" in output + errors
        assert all(char.isprintable() or char == "\n" for char in output + errors)
        assert not [line for line in (output + errors).splitlines() if line.startswith("verified")]


# ---- what it is about


def test_digest_must_be_one_of_its_subjects(folder, tmp_path):
    trust, path = trust_of(folder, tmp_path), folder / "certificate"
    result = verify(path, trust, About(digest=SHA["oci"]), at=NOW)
    assert result.compared == (f"the digest that was named: mcore-ubuntu2404-cu130-h200.oci, {SHA['oci']}",)
    check_refused(path, trust, "another one", About(digest=SHA["lock"]))
