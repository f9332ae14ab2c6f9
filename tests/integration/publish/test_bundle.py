"""Bundles verified by sigstore's own verifier, which npm installs (@sigstore/verify)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import shared_folder
from helpers.publish_world import PublishWorld

from envbuild.certify.certificate.envelope import decode
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.keys import make_keys
from envbuild.core import locks
from envbuild.publish.bundle import BUNDLE_TYPE, certificate_in, make_bundle, result_bundle

SCRIPT = Path(__file__).parents[2] / "helpers" / "sigstore" / "verify.js"
PACKAGES = ("@sigstore/verify@3.1.1", "@sigstore/bundle@4.0.0")


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sigstore's packages, installed once."""
    folder = shared_folder(tmp_path_factory) / "sigstore"
    with locks.exclusive(folder.with_suffix(".lock")):
        if not (folder / "done").is_file():
            folder.mkdir(exist_ok=True)
            install = ["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES]
            subprocess.run(install, cwd=folder, check=True)
            (folder / "done").touch()
    return folder / "node_modules"


def verified(modules: Path, bundle: bytes, key: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "bundle.json").write_bytes(bundle)
    return subprocess.run(
        ["node", SCRIPT, tmp_path / "bundle.json", key],
        env={**os.environ, "NODE_PATH": str(modules)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_sigstore_verifies_the_certificate(modules: Path, world: PublishWorld, tmp_path: Path) -> None:
    path = world.certify()
    statement, file = read_certificate(path)
    bundle = make_bundle(file.content, statement.predicate_type)
    public = world.key.with_suffix(".pub")
    done = verified(modules, bundle.content, public, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.encode() == file.content.payload
    assert f"key {world.signer.keyid}" in done.stderr
    assert json.loads(bundle.content)["mediaType"] == BUNDLE_TYPE
    assert certificate_in(bundle.content, "the registry") == path.read_bytes()

    other = make_keys(tmp_path, "other", None)
    assert verified(modules, bundle.content, other.public, tmp_path).returncode != 0
    changed = json.loads(bundle.content)
    changed["dsseEnvelope"]["payload"] = changed["dsseEnvelope"]["payload"][:-8] + "AAAAAAA="
    assert verified(modules, json.dumps(changed).encode(), public, tmp_path).returncode != 0


def test_sigstore_verifies_the_test_result(modules: Path, world: PublishWorld, tmp_path: Path) -> None:
    statement, _ = read_certificate(world.certify())
    bundle = result_bundle(statement, world.signer)
    done = verified(modules, bundle.content, world.key.with_suffix(".pub"), tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert printed["predicate"]["result"] == "PASSED"
    assert printed["predicate"]["passedTests"] == ["gpt-fp32-tp2"]
    digests = [subject["digest"]["sha256"] for subject in printed["subject"]]
    assert digests[0] == world.image.record.oci_digest.removeprefix("sha256:")
    assert result_bundle(statement, world.signer).content == bundle.content
    assert decode(certificate_in(bundle.content, "the registry")).signed is not None
