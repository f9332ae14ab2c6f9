"""The environment against the lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild_smoke.environment import findings, inventory

LOCKED = {"torch": "2.13.0+cpu", "megatron-core": "0.16.1"}
IMPORTED = {"torch": {"file": "/t", "version": "2.13.0+cpu"}, "megatron.core": {"file": "/m", "version": "0.16.1"}}


def codes(found: list[dict[str, str | None]]) -> list[tuple[str | None, str | None, str | None]]:
    return [(finding["code"], finding["package"], finding["found"]) for finding in found]


def test_no_findings_when_all_is_as_locked() -> None:
    installed = {"torch": ["2.13.0+cpu"], "megatron-core": ["0.16.1"], "numpy": ["2.0"]}
    assert findings.version_findings(LOCKED, IMPORTED, installed) == []


def test_names_are_compared_as_indexes_do() -> None:
    assert findings.version_findings({"Megatron_Core": "0.16.1"}, {}, {"megatron-core": ["0.16.1"]}) == []


@pytest.mark.parametrize("version", ["2.13.0", "2.12.0+cpu", "2.13.0+cu130"])
def test_other_version_is_a_finding(version: str) -> None:
    found = findings.version_findings(LOCKED, {}, {"torch": [version], "megatron-core": ["0.16.1"]})
    assert codes(found) == [("version-mismatch", "torch", version)]


def test_absent_package_is_a_finding() -> None:
    found = findings.version_findings(LOCKED, {}, {"torch": ["2.13.0+cpu"]})
    assert codes(found) == [("package-missing", "megatron-core", None)]


def test_second_copy_is_a_finding() -> None:
    installed = {"torch": ["2.13.0+cpu", "2.11.0"], "megatron-core": ["0.16.1"]}
    assert codes(findings.version_findings(LOCKED, {}, installed)) == [("package-twice", "torch", "2.13.0+cpu, 2.11.0")]


def test_module_of_another_version_than_its_metadata_is_a_finding() -> None:
    imported = {**IMPORTED, "torch": {"file": "/host/torch/__init__.py", "version": "2.11.0+cu130"}}
    found = findings.version_findings(LOCKED, imported, {"torch": ["2.13.0+cpu"], "megatron-core": ["0.16.1"]})
    assert codes(found) == [("imported-version-differs", "torch", "2.11.0+cu130")]


def test_module_without_the_local_part_is_none() -> None:
    imported = {"torch": {"file": "/t", "version": "2.13.0"}}
    assert findings.version_findings({"torch": "2.13.0+cpu"}, imported, {"torch": ["2.13.0+cpu"]}) == []


def test_distributions_see_both_copies_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("mine", "1.0"), ("host", "2.0")):
        metadata = tmp_path / folder / f"Some_Package-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: Some_Package\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert inventory.versions()["some-package"] == ["2.0", "1.0"]


def test_imported_files_take_precedence_over_found_ones() -> None:
    described = inventory.describe("cpu", {"torch": {"file": "/really/imported.py", "version": "1"}})
    assert described["files"]["torch"] == "/really/imported.py"
    assert described["gpus"] == []


def test_redirects_belong_to_the_cpu() -> None:
    assert inventory.describe("cpu")["cuda_redirects"]
    assert inventory.describe("cuda")["cuda_redirects"] == []
