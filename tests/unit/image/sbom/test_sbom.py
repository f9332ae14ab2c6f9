"""SBOMs and provenance: valid by their official schemas, complete, the same for the same image, and free of places."""

import json
import re

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from helpers.layer_tars import file, layout_of
from helpers.locks import make_lock
from helpers.placed_images import RECORD
from helpers.scans import SITE, package, scanned
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from envbuild.catalog.stack import Phase
from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.image.output import PlacedImage, verify
from envbuild.image.record import ImageRecord
from envbuild.image.sbom.inventory import inventory
from envbuild.image.sbom.reports import attach, reports_of
from envbuild.lock.lockfile import read_lock
from envbuild.lock.models import LockedComponent
from envbuild.oci.models import REF_NAME
from envbuild.oci.write import retagged
from envbuild.store.record import dump, load

VENV = "opt/envbuild/venv"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ONE, TWO, THREE = (sha256_bytes(text.encode()) for text in ("1", "2", "3"))
MAIN = f"one==1.0+cpu \\\n    --hash={ONE}\nmany==2.0 \\\n    --hash={TWO} \\\n    --hash={THREE}\n"
STATUS = b"Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:2.36-9+deb12u1\n"


@pytest.fixture
def lock(tmp_path):
    components = {
        "one": LockedComponent(asked="==1.0", version="1.0+cpu", phase=Phase.MAIN),
        "megatron-core": LockedComponent(
            asked="main", version="0.17.0", phase=Phase.MAIN, git="https://github.com/NVIDIA/Megatron-LM.git",
            commit=COMMIT, subdirectory="core",
        ),
        "elsewhere": LockedComponent(
            asked="main", version="1.0", phase=Phase.MAIN, git="https://git.example.org/a/b", commit=COMMIT,
            transitive=True,
        ),
    }  # fmt: skip
    from envbuild.lock import lockfile
    from envbuild.lock.lockfile import PHASE_FILES
    from envbuild.lock.models import LockedPhase, LockedTorch

    git = "".join(f"{name} @ git+https://git.example.org/a@{COMMIT}\n" for name in ("megatron-core", "elsewhere"))
    folder = tmp_path / "lock"
    folder.mkdir()
    texts = {"main": (MAIN, 2), "compile": ("# nothing\n", 0), "git": (git, 2)}
    phases = {
        name: LockedPhase(file=PHASE_FILES[name], packages=count, digest=sha256_bytes(text.encode()))
        for name, (text, count) in texts.items()
    }
    torch = LockedTorch(version="", build="cpu", found_in="find-links")
    base = make_lock(folder).base
    digest = lockfile.content_digest(base.definition_digest, torch, components, phases)
    make_lock(folder, torch=torch, components=components, phases=phases, digest=digest)
    for name, (text, _) in texts.items():
        (folder / PHASE_FILES[name]).write_text(text)
    return read_lock(folder)


@pytest.fixture
def scan(tmp_path):
    items = [
        *package("one", "1.0+cpu", "License-Expression: MIT"),
        *package("many", "2.0", "License: whatever the author says"),
        *package("megatron-core", "0.17.0", "License-Expression: LicenseRef-Proprietary"),
        *package("elsewhere", "1.0"),
        file(f"{SITE}/many/_vendor/one-1.0+cpu.dist-info/METADATA", b"Name: one\nVersion: 1.0+cpu\n\n"),
        file("usr/lib/python3/dist-packages/distro-1.dist-info/METADATA", b"Name: distro\nVersion: 1\n\n"),
        file("var/lib/dpkg/status", STATUS),
    ]
    return scanned(tmp_path / "layer", *items).scan


def record_of(lock, **changes) -> ImageRecord:
    values = {
        "stack": "s", "base": "debian12", "hardware": "cpu", "oci_digest": ONE, "lock_digest": lock.lock.digest,
        "base_digest": THREE, "source_date_epoch": 1_700_000_000,
        "sqsh": RECORD.sqsh.model_copy(update={"digest": TWO}),
    }  # fmt: skip
    return RECORD.model_copy(update={**values, **changes})


def documents(lock, scan, **changes) -> dict[str, dict]:
    packages = inventory(lock, [scan], VENV, {})
    return {report.file: json.loads(report.content) for report in reports_of(record_of(lock, **changes), packages)}


def test_inventory_has_every_package_once_the_components_first(lock, scan):
    assert {item.purl: (item.component, item.hashes, item.commit) for item in inventory(lock, [scan], VENV, {})} == {
        f"pkg:github/nvidia/megatron-lm@{COMMIT}#core": (True, (), COMMIT),
        "pkg:pypi/one@1.0%2Bcpu": (True, (ONE,), ""),
        f"pkg:pypi/elsewhere@1.0?vcs_url=git%2Bhttps://git.example.org/a/b%40{COMMIT}": (False, (), COMMIT),
        "pkg:pypi/distro@1": (False, (), ""),
        "pkg:pypi/many@2.0": (False, tuple(sorted((TWO, THREE))), ""),
        "pkg:deb/debian/libc6@1:2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12": (False, (), ""),
    }
    assert [item.component for item in inventory(lock, [scan], VENV, {})] == [True, True, False, False, False, False]


def test_cyclonedx_is_valid_by_its_schema(lock, scan):
    document = documents(lock, scan)["sbom.cdx.json"]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document)) is None
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert document["metadata"]["component"]["version"] == ONE
    found = {item["name"]: item for item in document["components"]}
    assert found["one"]["licenses"] == [{"expression": "MIT"}]
    assert found["one"]["hashes"] == [{"alg": "SHA-256", "content": ONE.removeprefix("sha256:")}]
    assert found["many"]["licenses"] == [{"license": {"name": "whatever the author says"}}]
    assert "hashes" not in found["many"]
    assert len(found["many"]["externalReferences"]) == 2
    assert found["megatron-core"]["externalReferences"] == [
        {"type": "vcs", "url": "https://github.com/NVIDIA/Megatron-LM.git", "comment": f"commit {COMMIT}"}
    ]
    # The validator checks no format (iri-reference) without a package that compiles a grammar at each import.
    urls = [item["url"] for part in document["components"] for item in part.get("externalReferences", ())]
    assert [url for url in urls if not re.fullmatch(r"[\w.~:/?#\[\]@!$&'()*+,;=%-]+", url, re.ASCII)] == []
    assert document["dependencies"][0]["dependsOn"] == sorted(item["bom-ref"] for item in document["components"])


def test_spdx_is_valid_by_its_tools(lock, scan, tmp_path):
    document = documents(lock, scan)["sbom.spdx.json"]
    file = tmp_path / "sbom.spdx.json"
    file.write_text(json.dumps(document))
    assert [message.validation_message for message in validate_full_spdx_document(parse_file(str(file)))] == []
    found = {item["name"]: item for item in document["packages"]}
    assert found["one"]["licenseDeclared"] == "MIT"
    assert found["megatron-core"]["licenseDeclared"] == "NOASSERTION"
    assert "LicenseRef-Proprietary" in found["megatron-core"]["licenseComments"]
    assert found["megatron-core"]["downloadLocation"].endswith(f"@{COMMIT}")
    assert len({item["SPDXID"] for item in document["packages"]}) == len(document["packages"]) == 7


def test_provenance_is_a_slsa_statement(lock, scan):
    statement = documents(lock, scan)["provenance.json"]
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert [item["digest"]["sha256"] for item in statement["subject"]] == [
        ONE.removeprefix("sha256:"), TWO.removeprefix("sha256:")
    ]  # fmt: skip
    definition, details = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    assert definition["externalParameters"] == {
        "stack": "s", "base": "debian12", "hardware": "cpu", "lock": lock.lock.digest
    }  # fmt: skip
    resolved = {item["name"]: item for item in definition["resolvedDependencies"]}
    assert resolved["base debian12"]["digest"] == {"sha256": THREE.removeprefix("sha256:")}
    assert resolved["megatron-core"]["digest"] == {"gitCommit": COMMIT}
    assert resolved["one"]["digest"] == {"sha256": ONE.removeprefix("sha256:")}
    assert resolved["many"]["annotations"] == {"oneOf": sorted((TWO, THREE))}
    assert details["metadata"] == {"invocationId": RECORD.key}
    assert details["builder"]["id"].startswith("urn:")
    assert documents(lock, scan, sqsh=None)["provenance.json"]["subject"] == statement["subject"][:1]


def test_reports_are_the_same_for_the_same_image_and_others_for_another(lock, scan):
    assert documents(lock, scan) == documents(lock, scan)
    other = documents(lock, scan, oci_digest=TWO)
    assert other["sbom.cdx.json"]["serialNumber"] != documents(lock, scan)["sbom.cdx.json"]["serialNumber"]
    assert other["sbom.spdx.json"]["documentNamespace"] != documents(lock, scan)["sbom.spdx.json"]["documentNamespace"]


# ---- attached to the image


@pytest.fixture
def placed(tmp_path, lock, scan):
    """An image with its reports, as the builder leaves it."""
    folder = tmp_path / "image"
    folder.mkdir()
    image, record = layout_of(folder, file("etc/x", b"x"))
    before = (folder / "oci/blobs/sha256" / image.digest.removeprefix("sha256:")).read_bytes()
    made = reports_of(record_of(lock, oci_digest=image.digest), inventory(lock, [scan], VENV, {}))
    reports = attach(folder / "oci", folder, made, "1970-01-01T00:00:00Z")
    assert (folder / "oci/blobs/sha256" / image.digest.removeprefix("sha256:")).read_bytes() == before
    found = RECORD.model_copy(
        update={
            "oci_digest": image.digest, "config_digest": image.config_digest, "layers": (record,), "sqsh": None,
            "reports": reports,
        }
    )  # fmt: skip
    (folder / "record.json").write_bytes(dump(found))
    return PlacedImage(folder, load(folder / "record.json", ImageRecord), "mcore")


def test_referrers_name_the_image_and_every_digest_is_that_of_its_bytes(placed):
    layout = placed.path / "oci"
    index = json.loads((layout / "index.json").read_text())["manifests"]
    assert [entry.get("artifactType") for entry in index] == [
        None, "application/vnd.cyclonedx+json", "application/spdx+json", "application/vnd.in-toto+json"
    ]  # fmt: skip

    def blob(descriptor):
        path = layout / "blobs/sha256" / descriptor["digest"].removeprefix("sha256:")
        assert (sha256_file(path), path.stat().st_size) == (descriptor["digest"], descriptor["size"])
        return path.read_bytes()

    for entry, report in zip(index[1:], placed.record.reports, strict=True):
        assert "org.opencontainers.image.ref.name" not in entry["annotations"]
        manifest = json.loads(blob(entry))
        assert manifest["subject"] == {key: index[0][key] for key in ("mediaType", "digest", "size")}
        assert manifest["artifactType"] == entry["artifactType"] == report.artifact_type
        assert blob(manifest["config"]) == b"{}"
        assert blob(manifest["layers"][0]) == (placed.path / report.file).read_bytes()
        assert report.digest == manifest["layers"][0]["digest"]


def test_another_tag_is_the_images_alone(placed):
    index = retagged((placed.path / "oci/index.json").read_bytes(), "other")
    tags = [entry["annotations"].get(REF_NAME) for entry in json.loads(index)["manifests"]]
    assert tags == ["other", None, None, None]


def test_verify_reads_the_reports_too(placed):
    verify(placed)
    for report in placed.record.reports:
        for path in (placed.path / report.file, placed.path / "oci/blobs/sha256" / report.manifest_digest[7:]):
            kept = path.read_bytes()
            path.unlink()
            path.write_bytes(kept.replace(b"1", b"2"))
            with pytest.raises(CheckRefusedError):
                verify(placed)
            path.write_bytes(kept)
    verify(placed)


def test_verify_refuses_a_referrer_that_was_added(placed):
    index = placed.path / "oci/index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "manifests": [*content["manifests"], content["manifests"][1]]}))
    with pytest.raises(CheckRefusedError):
        verify(placed)
