"""A real small image: its reports, what other tools read of it, inspect and diff, and what its checks refuse."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.mini import NAME
from helpers.scans import AWS_KEY

from envbuild.catalog.catalog import Catalog, HostDistribution, select
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import SilentReporter
from envbuild.image import build, configuration, inputs
from envbuild.image.build import build_image
from envbuild.image.checks.rules import RULES
from envbuild.image.inputs import ImageInputs
from envbuild.image.record import ImageRecord
from envbuild.lock.lockdir import find_lock
from envbuild.oci.models import RunConfig
from envbuild.oci.write import make_oci, write_layout
from envbuild.rootfs.layer import Layer
from envbuild.rootfs.layer_writer import LayerWriter
from envbuild.store.local import LocalStore
from envbuild.store.record import load

REPORTS = ("sbom.cdx.json", "sbom.spdx.json", "provenance.json")


@pytest.fixture(scope="module")
def folder(mini_image: dict[str, Any]) -> Path:
    return Path(mini_image["path"])


@pytest.fixture(scope="module")
def record(folder: Path) -> ImageRecord:
    return load(folder / "record.json", ImageRecord)


def json_of(mini: Tool, *arguments: str, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mini.run("image", *arguments, "--json", "--quiet", status=status).stdout)
    return found


# ---- reports


def test_reports_name_no_place_of_this_machine(folder: Path, mini: Tool) -> None:
    for name in REPORTS:
        text = (folder / name).read_text()
        assert str(mini.cache) not in text
        assert str(folder.parent) not in text
        assert os.uname().nodename not in text


@pytest.mark.slow
def test_skopeo_and_umoci_take_the_image_by_its_tag(folder: Path, record: ImageRecord, tmp_path: Path) -> None:
    copy = f"dir:{tmp_path}/copy"
    subprocess.run(["skopeo", "copy", "-q", f"oci:{folder}/oci:{folder.name}", copy], check=True)
    assert sha256_file(tmp_path / "copy/manifest.json") == record.oci_digest
    layout = tmp_path / "oci"
    subprocess.run(["cp", "-r", folder / "oci", layout], check=True)
    listed = subprocess.run(["umoci", "ls", "--layout", layout], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == [folder.name]
    subprocess.run(["umoci", "gc", "--layout", layout], check=True)
    assert len(list((layout / "blobs/sha256").iterdir())) == len(list((folder / "oci/blobs/sha256").iterdir()))


# ---- inspect and diff


@pytest.fixture(scope="module")
def archive(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image as docker's archive."""
    file = tmp_path_factory.mktemp("archive") / "docker.tar"
    source = f"oci:{folder}/oci:{folder.name}"
    subprocess.run(["skopeo", "copy", "-q", source, f"docker-archive:{file}:mini:x"], check=True)
    return file


def test_every_form_of_the_image_has_the_same_packages(mini: Tool, folder: Path, archive: Path) -> None:
    names = [str(folder), f"{folder}/oci:{folder.name}", str(archive), f"{folder}/image.sqsh"]
    found = [json_of(mini, "inspect", name) for name in names]
    assert [item["kind"] for item in found] == ["folder", "layout", "archive", "sqsh"]
    assert all(item["packages"] == found[0]["packages"] for item in found)
    assert found[0]["components"] == {"packaging": "25.0", "psutil": "7.0.0"}
    assert sum(layer["share"] for layer in found[0]["layers"]) == pytest.approx(1, abs=0.001)
    assert found[0]["decided_by"]["lock"] == found[2]["decided_by"]["envbuild.lock"]
    assert set(found[0]["checks"]) == set(RULES)
    assert found[1]["reports"][0]["artifact_type"] == "application/vnd.cyclonedx+json"
    by_name = json_of(mini, "inspect", "--stack", NAME, "--target", "cpu")
    assert by_name["digest"] == found[0]["digest"]
    shown = mini.run("image", "inspect", str(folder)).stdout
    assert shown.index("components:") < shown.index("Python packages") < shown.index("layers (")


@pytest.mark.slow
def test_image_and_its_archive_do_not_differ_in_files(mini: Tool, folder: Path, archive: Path) -> None:
    same = json_of(mini, "diff", str(folder), str(folder), "--files", "--exit-code")
    assert (same["equal"], same["to_ship_bytes"], same["files"]) == (True, 0, [])
    packed = json_of(mini, "diff", str(folder), str(archive), "--files")
    assert (packed["files"], packed["configuration"], packed["layers"]["shared"]) == ([], [], [])


@pytest.mark.slow
def test_sqsh_differs_from_its_image_in_what_enroot_adds(mini: Tool, folder: Path) -> None:
    found = json_of(mini, "diff", str(folder), f"{folder}/image.sqsh", "--files")
    paths = {item["path"] for item in found["files"] if set(item["fields"]) != {"owner"}}
    assert {"/etc/rc", "/etc/rc.local", "/etc/environment", "/etc/fstab"} <= paths
    assert found["packages"] == {"python": [], "debian": []}


@pytest.fixture
def with_layer(folder: Path, record: ImageRecord, tmp_path: Path) -> Callable[..., tuple[Path, Layer]]:
    """An OCI layout of the image's layers and one more, and that layer."""

    def make(path: str, content: bytes, mode: int = 0o644) -> tuple[Path, Layer]:
        file = tmp_path / "planted.tar.gz"
        with LayerWriter(file, record.source_date_epoch) as writer:
            writer.add_bytes(path, content, mode)
        planted = Layer(writer.record("planted"), file)
        layers = [*layers_of(folder, record), planted]
        config = RunConfig(environment=record.environment)
        image = make_oci(config, "linux/amd64", [layer.record for layer in layers], record.source_date_epoch)
        write_layout(tmp_path / "planted", image, layers, tag="planted")
        return tmp_path / "planted", planted

    return make


def layers_of(folder: Path, record: ImageRecord) -> list[Layer]:
    blobs = folder / "oci/blobs/sha256"
    return [Layer(item, blobs / item.digest.removeprefix("sha256:")) for item in record.layers]


@pytest.mark.slow
def test_a_layer_more_is_all_that_is_shipped(mini: Tool, folder: Path, with_layer: Any) -> None:
    layout, planted = with_layer("etc/planted", b"x", 0o600)
    found = json_of(mini, "diff", str(folder), f"{layout}:planted", "--files", "--exit-code", status=5)
    assert found["to_ship_bytes"] == planted.record.size_bytes
    assert found["layers"]["new"] == [planted.record.digest]
    assert [(item["path"], item["what"]) for item in found["files"]] == [("/etc/planted", "added")]
    assert "label envbuild.stack" in [item["name"] for item in found["configuration"]]


# ---- checks


def test_build_is_refused_and_what_is_allowed_is_recorded(
    mini: Tool, mini_image: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder with a fault: a credential in the last layer."""
    selection = select(Catalog.open(mini.project), NAME, "cpu", None, HostDistribution.here())
    lock = find_lock(mini.project, selection)
    site = load_site({**os.environ, "ENVBUILD_CACHE_DIR": str(mini.cache)})
    context = Context(store=LocalStore(mini.cache, SilentReporter()), site=site, reporter=SilentReporter())
    wanted = ImageInputs(selection=selection, lock=lock, with_sqsh=False)
    monkeypatch.setattr(inputs, "FORMAT", 10_001)  # an image of its own in the store
    monkeypatch.setattr(configuration, "HOSTS", AWS_KEY)
    before = sorted((mini.cache / build.KIND).iterdir())
    with pytest.raises(CheckRefusedError) as caught:
        build_image(wanted, context)
    assert (caught.value.exit_code, caught.value.codes) == (5, {"secrets"})
    assert sorted((mini.cache / build.KIND).iterdir()) == before
    built = build_image(replace(wanted, allow=frozenset({"secrets"})), context)
    assert built.record.checks["secrets"].findings == ("/etc/hosts holds an AWS access key",)
    assert built.record.checks["secrets"].allowed
    with pytest.raises(CheckRefusedError):  # what was allowed once is not there for who does not allow it
        build_image(wanted, context)
