"""`--sqsh-builder enroot`: what enroot is called with, what it is served, and how its failures are told.

enroot is not installed here: a stand-in on PATH takes its command line, and fetches from what it is served.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.core.errors import BuildError, CheckRefusedError, MachineError
from envbuild.image.squashfs import enroot_import
from envbuild.image.squashfs.compression import Compression
from envbuild.image.squashfs.registry_server import REPOSITORY, TAG, served
from envbuild.image.squashfs.settings import Packing
from envbuild.oci.write import RunConfig, make_oci, write_layout
from envbuild.rootfs.layer import Layer
from envbuild.rootfs.layer_writer import LayerWriter

EPOCH = 1_700_000_000
CONFIG = RunConfig(command=("true",))
ENROOT = """#!{python}
import json, os, sys, urllib.request
if sys.argv[1] == "version":
    sys.exit(print("9.9.9"))
open({told!r}, "w").write(json.dumps([sys.argv[1:], dict(os.environ)]))
print("Fetching image")
if {status}:
    sys.exit(print("curl: (22) The requested URL returned error: 500") or {status})
registry, image = sys.argv[-1].removeprefix("docker://").split("#")
repository, tag = image.split(":")
def get(path):
    return urllib.request.urlopen(f"http://{{registry}}/v2/{{repository}}/{{path}}").read()
manifest = json.loads(get(f"manifests/{{tag}}"))
if {writes}:
    open(sys.argv[3], "wb").write(b"".join(get(f"blobs/{{layer['digest']}}") for layer in manifest["layers"]))
"""


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> list[Layer]:
    file = tmp_path_factory.mktemp("enroot") / "layer.tar.gz"
    with LayerWriter(file, EPOCH) as writer:
        writer.add_bytes("a", b"1" * 3_000_000)
    return [Layer(writer.record("base"), file)]


@pytest.fixture
def image(layers: list[Layer], tmp_path: Path) -> tuple[Path, str]:
    image = make_oci(CONFIG, "linux/amd64", [record for record, _ in layers], EPOCH)
    write_layout(tmp_path / "layout", image, layers, tag="test")
    return tmp_path / "layout", image.digest


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, status: int = 0, writes: bool = True) -> Path:
    told = tmp_path / "told.json"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in enroot_import.NEEDED:
        (folder / name).symlink_to("/bin/true")
    (folder / "enroot").write_text(ENROOT.format(python=sys.executable, told=str(told), status=status, writes=writes))
    (folder / "enroot").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    enroot_import.enroot_version.cache_clear()
    return told


def write(image: tuple[Path, str], tmp_path: Path, config: RunConfig = CONFIG, **how):
    packing = Packing(builder="enroot", **how)
    packing.check_tools()
    return packing.write(tmp_path / "image.sqsh", *image, [], config, EPOCH, tmp_path / "log")


def test_the_layout_is_a_registry_for_others(image: tuple[Path, str], tmp_path: Path) -> None:
    with served(*image) as registry:
        source = f"docker://{registry}/{REPOSITORY}:{TAG}"
        subprocess.run(["skopeo", "copy", "-q", "--src-tls-verify=false", source, f"dir:{tmp_path / 'd'}"], check=True)
        for path in (
            "x/manifests/latest",
            f"{REPOSITORY}/blobs/sha256:{'0' * 64}",
            f"{REPOSITORY}/blobs/../../index.json",
        ):
            answer = [
                "curl",
                "-s",
                "--path-as-is",
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                f"http://{registry}/v2/{path}",
            ]
            assert subprocess.run(answer, capture_output=True, text=True).stdout == "404"
    manifest = json.loads((tmp_path / "d/manifest.json").read_text())
    assert (tmp_path / "d" / manifest["layers"][0]["digest"].removeprefix("sha256:")).is_file()


def test_enroot_is_given_the_image_and_our_settings(
    image: tuple[Path, str], layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = stand_in(tmp_path, monkeypatch)
    record = write(image, tmp_path, compression=Compression.parse("lz4"))
    words, environment = json.loads(told.read_text())
    assert words[:3] == ["import", "--output", str(tmp_path / "image.sqsh")]
    assert words[3].startswith("docker://127.0.0.1:")
    assert words[3].endswith(f"#{REPOSITORY}:{TAG}")
    assert environment["ENROOT_SQUASH_OPTIONS"] == "-comp lz4 -exit-on-error"
    assert (environment["ENROOT_ALLOW_HTTP"], environment["SOURCE_DATE_EPOCH"]) == ("yes", str(EPOCH))
    for name in ("CACHE", "DATA", "TEMP", "RUNTIME"):
        assert not Path(environment[f"ENROOT_{name}_PATH"]).exists()
    assert record.packed_by == "enroot 9.9.9"
    assert record.digest == layers[0].record.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "image.sqsh", "layout", "log", "told.json"]


def test_enroot_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    native, theirs = Packing().key(), Packing(builder="enroot").key()
    assert theirs == ("enroot", "enroot 9.9.9", *native)


@pytest.mark.parametrize(("status", "writes", "why"), [(1, True, "returned error: 500"), (0, False, "Fetching image")])
def test_a_failing_enroot_is_told_with_what_it_said(
    image: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, writes: bool, why: str
) -> None:
    stand_in(tmp_path, monkeypatch, status=status, writes=writes)
    with pytest.raises(BuildError, match="cannot import the") as caught:
        write(image, tmp_path)
    assert why in caught.value.why
    assert not (tmp_path / "image.sqsh").exists()
    assert not list(tmp_path.glob(".enroot.*"))


def test_without_enroot_it_says_so_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "mksquashfs").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(MachineError, match="enroot is not installed") as caught:
        Packing(builder="enroot").check_tools()
    assert (caught.value.exit_code, "NVIDIA/enroot" in caught.value.fix) == (11, True)
    (folder / "enroot").symlink_to("/bin/true")
    with pytest.raises(MachineError, match=r"cannot work without curl, .*jq"):
        Packing(builder="enroot").check_tools()


def test_what_would_run_is_refused_here_too(
    image: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    with pytest.raises(CheckRefusedError, match="working directory"):
        write(image, tmp_path, RunConfig(workdir="/$(id)"))
