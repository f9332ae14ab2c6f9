"""The environment against the lock."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.smoke.conftest import without_packages

from envbuild_smoke.environment import findings, inventory
from envbuild_smoke.environment.inventory import ImportedModule

LOCKED = {"torch": "2.13.0+cpu", "megatron-core": "0.16.1"}
IMPORTED = {
    "torch": ImportedModule(file="/t", version="2.13.0+cpu"),
    "megatron.core": ImportedModule(file="/m", version="0.16.1"),
}


def codes(findings: list[dict[str, str | None]]) -> list[tuple[str | None, str | None, str | None]]:
    return [(finding.code, finding.package, finding.found) for finding in findings]


CORE = {"megatron-core": ["0.16.1"]}
OTHER = {"torch": ImportedModule(file="/host/torch/__init__.py", version="2.11.0+cu130")}
WITHOUT_LOCAL = {"torch": ImportedModule(file="/t", version="2.13.0")}


@pytest.mark.parametrize(
    ("imported", "installed", "expected"),
    [
        (IMPORTED, {"torch": ["2.13.0+cpu"], "numpy": ["2.0"]}, []),
        (WITHOUT_LOCAL, {"torch": ["2.13.0+cpu"]}, []),
        *(
            ({}, {"torch": [other]}, [("version-mismatch", "torch", other)])
            for other in ("2.13.0", "2.12.0+cpu", "2.13.0+cu130")
        ),
        ({}, {}, [("package-missing", "torch", None)]),
        ({}, {"torch": ["2.13.0+cpu", "2.11.0"]}, [("package-twice", "torch", "2.13.0+cpu, 2.11.0")]),
        # The module that was imported is of another version than its metadata.
        (OTHER, {"torch": ["2.13.0+cpu"]}, [("imported-version-differs", "torch", "2.11.0+cu130")]),
    ],
)
def test_versions_are_compared_with_the_lock(monkeypatch, imported, installed, expected) -> None:
    monkeypatch.setattr(findings, "versions", lambda: CORE | installed)
    assert codes(findings.version_findings(LOCKED, imported)) == expected


def test_names_are_compared_as_indexes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "versions", lambda: CORE)
    assert findings.version_findings({"Megatron_Core": "0.16.1"}, {}) == []


def test_distributions_see_both_copies_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("mine", "1.0"), ("host", "2.0")):
        metadata = tmp_path / folder / f"Some_Package-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: Some_Package\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert inventory.versions()["some-package"] == ["2.0", "1.0"]


def test_imported_files_and_redirects_are_described() -> None:
    with without_packages():
        torch = ImportedModule(file="/really/imported.py", version="1")
        described = inventory.describe("cpu", {"torch": torch})
        assert inventory.describe("cuda").cuda_redirects == ()
    assert described.files["torch"] == "/really/imported.py"
    assert described.gpus == ()
    assert described.cuda_redirects
