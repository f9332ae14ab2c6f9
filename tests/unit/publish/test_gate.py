"""The gate: every way of not being certified is refused, each with its word."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from helpers.certificates import case_of, machine
from helpers.publish_world import PublishWorld, make_publish_world, measured_now, with_record

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.certificate.sign import load_signer
from envbuild.certify.certificate.trust import load_trust
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import PublicationRefusedError
from envbuild.publish.gate import Rules, admit

OTHER = sha256_bytes(b"another")
NOT_VOUCHED = {
    "name": "some-conflict", "versions": "a 1", "what": "tp2", "why": "wrong", "evidence": "seen", "fix": "b",
    "fixed_in": None, "cases": [],
}  # fmt: skip

TEN_CASES = [case_of(f"gpt-fp32-tp{number}") for number in range(10)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return make_publish_world(tmp_path_factory.mktemp("world") / "project")


@pytest.fixture
def world(shared):
    """One world for all: each test writes the certificate anew."""
    return replace(shared)


def rules(world: PublishWorld, **changes) -> Rules:
    """The default policy, with changes."""
    policy = world.selection.catalog.policy("default").model_copy(update=changes)
    return Rules(policy=policy, target=world.selection.target, trust=world.trust, at=datetime.now(timezone.utc))


def refused(world: PublishWorld, certificate, rule: Rules | None = None, image=None) -> PublicationRefusedError:
    with pytest.raises(PublicationRefusedError) as caught:
        admit(image or world.image, certificate, rule or rules(world))
    assert "is not published" in caught.value.what
    assert caught.value.why
    assert "--uncertified" in caught.value.fix
    return caught.value


def test_a_certified_image_is_admitted(world):
    certificate = world.certify()
    admitted = admit(world.image, certificate, rules(world))
    assert admitted.content == certificate.read_bytes()
    assert admitted.digest == sha256_bytes(certificate.read_bytes())
    assert admitted.key.name == "lab"
    assert admitted.certificate.by_form().keys() == {"oci", "sqsh"}


@pytest.mark.parametrize("named", [None, "gone"])
def test_no_certificate(world, tmp_path, named):
    assert refused(world, named and tmp_path / named).reason == "no-certificate"


def test_no_trust_file(world):
    assert refused(world, world.certify(), replace(rules(world), trust=None)).reason == "no-trust"


def test_not_signed(world):
    assert refused(world, world.certify(signed=False)).reason == "not-signed"


def test_a_file_that_is_no_certificate(world, tmp_path):
    (tmp_path / "file").write_text("{}")
    assert refused(world, tmp_path / "file").reason == "certificate"


def test_a_certificate_that_was_changed(world):
    certificate = world.certify()
    data = certificate.read_bytes()
    middle = len(data) // 2
    certificate.write_bytes(data[:middle] + (b"A" if data[middle : middle + 1] != b"A" else b"B") + data[middle + 1 :])
    assert refused(world, certificate).reason in ("signature", "certificate")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ('revoked = "stolen"', "revoked-key"),
        ('not_after = "2026-01-01T00:00:00Z"', "key-time"),
        ('stacks = ["nemo"]', "key-scope"),
        ('targets = ["h200"]', "key-scope"),
    ],
)
def test_a_key_that_does_not_count(world, tmp_path, settings, reason):
    (tmp_path / "trust.toml").write_text(f'[keys.lab]\nfile = "{world.key.with_suffix(".pub")}"\n{settings}\n')
    rule = replace(rules(world), trust=load_trust(tmp_path / "trust.toml"))
    assert refused(world, world.certify(), rule).reason == reason


def test_an_unknown_key(world, tmp_path):
    keys = make_keys(tmp_path, "other", None)
    certificate = replace(world, signer=load_signer(str(keys.private), None)).certify()
    assert refused(world, certificate).reason == "unknown-key"


def test_a_key_that_the_policy_does_not_count(world):
    assert refused(world, world.certify(), rules(world, keys=("release",))).reason == "key"
    assert admit(world.image, world.certify(), rules(world, keys=("release", "lab")))


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ({"oci_digest": OTHER}, "another-image"),
        ({"sqsh_digest": OTHER}, "another-image"),
        ({"target": "h200"}, "another-target"),
        ({"stack": "nemo"}, "another-stack"),
        ({"base": "ubuntu2204"}, "another-base"),
        ({"lock_digest": OTHER}, "another-lock"),
        ({"form": "none", "launcher": "venv"}, "outside-image"),
    ],
)
def test_a_certificate_of_something_else(world, subject, reason):
    assert refused(world, world.certify(subject=subject)).reason == reason


def test_too_old(world):
    long_ago = (datetime.now(timezone.utc) - timedelta(days=31)).strftime(MOMENT_FORMAT)
    certificate = world.certify(measured=measured_now(started_at=long_ago, finished_at=long_ago))
    assert refused(world, certificate).reason == "too-old"
    assert admit(world.image, certificate, rules(world, max_age_days=32)).measured_at == long_ago


def test_from_the_future(world):
    tomorrow = (datetime.now(timezone.utc) + timedelta(days=1)).strftime(MOMENT_FORMAT)
    assert refused(world, world.certify(issued_at=tomorrow)).reason == "from-the-future"


@pytest.mark.parametrize(
    ("fields", "reason", "allowing"),
    [
        ({"whole_matrix": False}, "part-of-matrix", {"whole_matrix": False}),
        ({"matrix_is_shipped": False}, "own-matrix", {"shipped_matrix": False}),
        ({"matrix": "recipe-layouts"}, "matrix", {"cpu_matrices": ("recipe-layouts",)}),
        ({"not_vouched": [NOT_VOUCHED]}, "not-vouched", {"allow_not_vouched": True}),
    ],
)
def test_what_the_policy_forbids_and_what_allows_it(world, fields, reason, allowing):
    certificate = world.certify(**fields)
    strict = rules(world, allow_not_vouched=False)
    assert refused(world, certificate, strict).reason == reason
    assert admit(world.image, certificate, replace(strict, policy=strict.policy.model_copy(update=allowing)))


@pytest.mark.parametrize(
    ("excused", "passed", "admitted"), [(0, 0, True), (1, 0, True), (2, 0, False), (1, 9, True), (9, 1, False)]
)
def test_how_many_cases_may_be_excused(world, excused, passed, admitted):
    """The certificate has ten cases, and cases that are known to train wrongly and passed do not count."""
    outcomes = [{"id": f"excused{number}", "result": "not run"} for number in range(excused)]
    outcomes += [{"id": f"passed{number}", "result": "passed"} for number in range(passed)]
    certificate = world.certify(
        not_vouched=[{**NOT_VOUCHED, "cases": outcomes}],
        cases=TEN_CASES,
    )
    rule = rules(world, max_excused_percent=12)
    if admitted:
        assert admit(world.image, certificate, rule)
    else:
        error = refused(world, certificate, rule)
        assert (error.reason, f"{excused} of {10 + excused} cases are excused by some-conflict" in error.why) == (
            "excused",
            True,
        )
        assert admit(world.image, certificate, rules(world, max_excused_percent=50))


@pytest.mark.parametrize(
    ("gpus", "target", "reason"),
    [(0, "h200", "gpu"), (2, "b200", "gpu"), (2, "h100", None), (2, "h200", None)],
)
def test_gpus_of_the_targets_generation(world, gpus, target, reason):
    """The certificate's machine has H200s, of SM 90."""
    image = with_record(world.image, target=target)
    measurement = measured_now(machine=machine(gpus), devices=list(range(gpus)))
    certificate = world.certify(subject={"target": target}, measured=measurement, matrix="certify-full")
    rule = replace(rules(world), target=world.selection.catalog.target(target))
    if reason is None:
        assert admit(image, certificate, rule)
    else:
        assert refused(world, certificate, rule, image).reason == reason
        assert admit(image, certificate, replace(rule, policy=rule.policy.model_copy(update={"target_gpus": False})))


def test_a_gpu_that_was_not_used_does_not_count(world):
    described = machine(2)
    described["gpus"][1]["compute_capability"] = "8.0"
    image = with_record(world.image, target="h200")
    rule = replace(rules(world), target=world.selection.catalog.target("h200"))
    fields = {"subject": {"target": "h200"}, "matrix": "certify-full"}
    used = world.certify(**fields, measured=measured_now(machine=described, devices=[0]))
    assert admit(image, used, rule)
    both = world.certify(**fields, measured=measured_now(machine=described, devices=[0, 1]))
    assert "8.0" in refused(world, both, rule, image).why


def test_the_quick_matrix_vouches_for_cpu_images_alone(world):
    """It trains nothing in bf16 and nothing in Transformer Engine."""
    image = with_record(world.image, target="h200")
    rule = replace(rules(world), target=world.selection.catalog.target("h200"))
    fields = {"subject": {"target": "h200"}, "measured": measured_now(machine=machine(2), devices=[0, 1])}
    error = refused(world, world.certify(**fields, matrix="certify-quick"), rule, image)
    assert error.reason == "matrix"
    assert "for cuda targets the policy counts certify-full, nemo-recipes, bridge-recipes" in error.why
    assert "--matrix NAME" in error.fix
    assert admit(image, world.certify(**fields, matrix="certify-full"), rule)
    assert admit(world.image, world.certify(matrix="certify-quick"), rules(world))


def test_a_base_that_was_made_anew(world):
    rebuilt = with_record(world.image, base_rebuilt=True)
    error = refused(world, world.certify(), image=rebuilt)
    assert error.reason == "base-rebuilt"
    assert "--verify" in error.fix
    assert admit(rebuilt, world.certify(), rules(world, locked_base=False))


COMMAND = "--stack mcore --base debian12"


def test_all_that_is_missing_is_named_at_once_with_the_commands_in_order(world):
    rebuilt = with_record(world.image, base_rebuilt=True)
    error = refused(world, world.certify(signed=False, whole_matrix=False), image=rebuilt)
    assert error.reason == "not-signed"
    assert [line.split()[-1] for line in error.why.splitlines()] == ["numbers.", "none."]
    commands = [f"lock {COMMAND} --verify && envbuild image {COMMAND} --target cpu", f"certify {COMMAND} --target cpu"]
    assert sorted(commands, key=error.fix.index) == commands
    without = refused(world, world.certify(signed=False), replace(rules(world), trust=None), rebuilt)
    assert without.reason == "no-trust"
    assert len(without.why.splitlines()) == 3
    assert "--trust FILE" in without.fix
    assert len(refused(world, world.certify(matrix="own", whole_matrix=False)).why.splitlines()) == 2


def test_commands_of_a_refusal_name_the_lock(world):
    named = replace(with_record(world.image, base_rebuilt=True), lock_name="try1")
    fix = refused(world, world.certify(signed=False), image=named).fix
    assert [fix.count(f"{command} --stack mcore") for command in ("lock", "image", "certify")] == [1, 1, 1]
    assert fix.count("--name try1") == 3


def test_the_shipped_policy_names_shipped_matrices():
    catalog = Catalog.open(Path("/nonexistent"))
    policy = catalog.policy("default")
    assert {*policy.matrices, *policy.cpu_matrices} <= set(catalog.names("matrices"))
    assert policy.whole_matrix
    assert policy.shipped_matrix
    assert policy.target_gpus
    assert policy.locked_base
