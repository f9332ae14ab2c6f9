"""The two formats of an image, read by the tools that others read them with."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from envbuild.core.digests import sha256_file
from envbuild.core.errors import BuildError, CheckRefusedError
from envbuild.image.squashfs.pack import SqshSource, write_sqsh
from envbuild.oci.models import RunConfig
from envbuild.oci.write import make_oci, write_layout
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer import Layer
from envbuild.rootfs.layer_writer import LayerWriter, walk

EPOCH = 1_700_000_000
CONFIG = RunConfig(
    environment=("PATH=/usr/bin:/bin", "GREETING=two words"),
    command=("/bin/bash",),
    workdir="/srv/work/dir",
    labels=(("a.label", "one\ntwo"),),
    volumes=("/data",),
)
NAMES = [b"plain", b"with space", b"new\nline", b"no-utf8-\xff", "ünïcödé".encode(), b"x" * 200, b"-dash", b"#hash"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with everything that is awkward and allowed."""
    root = tmp_path_factory.mktemp("formats") / "tree"
    for folder in ("etc", "usr/bin", "dev", "odd", "locked", "tmp"):
        (root / folder).mkdir(parents=True)
    for name in NAMES:
        with open(os.path.join(os.fsencode(root / "odd"), name), "wb") as stream:
            stream.write(name * 1000)
    (root / "etc/rc").symlink_to("/elsewhere")
    (root / "etc/environment").write_text("OLD=1\n")
    (root / "dev/console").write_text("")
    (root / "usr/bin/tool").write_text("#!/bin/sh\n")
    (root / "usr/bin/tool").chmod(0o4755)
    os.link(root / "usr/bin/tool", root / "usr/bin/twin")
    (root / "usr/bin/relative").symlink_to("tool")
    (root / "dangling").symlink_to("/nowhere")
    (root / "odd/zeros").write_bytes(bytes(3_000_000))
    (root / "odd/empty").touch()
    (root / "odd/secret").write_text("x")
    (root / "odd/secret").chmod(0)
    (root / "locked/inner").write_text("x")
    (root / "locked").chmod(0o555)
    (root / "tmp").chmod(0o1777)
    return root


@pytest.fixture(scope="module")
def layers(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list:
    folder = tmp_path_factory.mktemp("layers")
    with LayerWriter(folder / "base.tar.gz", EPOCH) as base:
        base.add_tree(tree)
    with LayerWriter(folder / "top.tar.gz", EPOCH + 5) as top:
        top.add_bytes("odd/plain", b"replaced", 0o755)
    return [Layer(base.record("base"), folder / "base.tar.gz"), Layer(top.record("top"), folder / "top.tar.gz")]


@pytest.fixture(scope="module")
def layout(layers: list, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oci") / "layout"
    image = make_oci(CONFIG, "linux/amd64", [record for record, _ in layers], EPOCH)
    write_layout(folder, image, layers, tag="test")
    return folder


def pack(target: Path, layers: list) -> Path:
    write_sqsh(target, source([file for _, file in layers]), target.with_suffix(".log"))
    return target


def source(files: list[Path]) -> SqshSource:
    blobs = [LayerBlob(file=file) for file in files]
    return SqshSource(layers=blobs, config=CONFIG, provenance="oci:sha256:0", epoch=EPOCH)


@pytest.fixture(scope="module")
def sqsh(layers: list, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("sqsh") / "image.sqsh", layers)


def unsquashfs(*words: str | Path) -> str:
    """What the program prints; names are not all UTF-8."""
    done = subprocess.run(["unsquashfs", *words], capture_output=True, text=True, errors="replace", check=True)
    return done.stdout


def described(root: Path) -> dict[str, tuple[str, str, bytes | str]]:
    found: dict[str, tuple[str, str, bytes | str]] = {}
    for path, name, info in walk(root):
        kind = stat.filemode(info.st_mode)[0]
        content: bytes | str = ""
        if kind == "l":
            content = os.readlink(path)
        elif kind == "-":
            content = path.read_bytes()
        found[name] = (kind, f"{stat.S_IMODE(info.st_mode):o}" if kind != "l" else "", content)
    return found


def test_skopeo_reads_the_layout_and_verifies_every_blob(layout: Path, tmp_path: Path) -> None:
    seen = subprocess.run(["skopeo", "inspect", f"oci:{layout}:test"], capture_output=True, text=True, check=True)
    value = json.loads(seen.stdout)
    assert (value["Architecture"], value["Created"]) == ("amd64", "2023-11-14T22:13:20Z")
    assert (value["Labels"], value["Env"]) == ({"a.label": "one\ntwo"}, list(CONFIG.environment))
    assert value["Digest"] == json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    subprocess.run(["skopeo", "copy", "-q", f"oci:{layout}:test", f"docker-archive:{tmp_path}/d.tar:x:y"], check=True)


def test_umoci_unpacks_the_very_tree(layout: Path, tree: Path, tmp_path: Path) -> None:
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    subprocess.run(["umoci", "unpack", *rootless, "--image", f"{layout}:test", tmp_path / "bundle"], check=True)
    expected = described(tree)
    expected["odd/plain"] = ("-", "755", b"replaced")
    assert described(tmp_path / "bundle/rootfs") == expected


def test_sqsh_is_the_tree_as_enroot_lays_it_out(sqsh: Path, tree: Path, tmp_path: Path) -> None:
    unsquashfs("-q", "-n", "-d", tmp_path / "root", sqsh)
    expected = described(tree)
    expected["odd/plain"] = ("-", "755", b"replaced")
    del expected["dev/console"]
    expected["locked"] = ("d", "755", "")
    expected["odd/secret"] = ("-", "400", b"x")
    for folder in ("srv", "srv/work", "srv/work/dir"):
        expected[folder] = ("d", "755", "")
    found = described(tmp_path / "root")
    for name in ("etc/rc", "etc/rc.local", "etc/environment", "etc/fstab"):
        expected[name] = ("-", "644", found[name][2])
    assert found == expected
    assert found["etc/environment"][2] == b"PATH=/usr/bin:/bin\nGREETING=two words\n"
    assert found["etc/rc"][2].splitlines()[:2] == [b"# enroot-provenance: oci:sha256:0", b"# a.label one two"]


def test_sqsh_belongs_to_root_and_its_times_are_those_of_the_layers(sqsh: Path) -> None:
    lines = [line.split() for line in unsquashfs("-UTC", "-lln", sqsh).splitlines() if "squashfs-root" in line]
    lines = [line for line in lines if line[0][0] in "-dl"]
    assert len(lines) > 30
    assert {line[1] for line in lines} == {"0/0"}
    assert {(line[3], line[4]) for line in lines} <= {("2023-11-14", "22:13")}
    printed = unsquashfs("-UTC", "-s", sqsh)
    assert [
        word for word in ("Compression zstd", "Tue Nov 14 22:13:20 2023", "Xattrs are not") if word not in printed
    ] == []


def test_sqsh_is_the_same_every_time_and_on_one_processor(
    layers: list, sqsh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("mksquashfs")
    wrapper = tmp_path / "bin/mksquashfs"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@" -processors 1\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    pack(tmp_path / "b.sqsh", layers)
    assert "-processors 1" not in sqsh.with_suffix(".log").read_text()
    assert str(wrapper) in (tmp_path / "b.log").read_text()
    assert sha256_file(sqsh) == sha256_file(tmp_path / "b.sqsh")


@pytest.mark.parametrize("times", [1, 2])
def test_sqsh_that_cannot_be_read_back_is_packed_once_more(
    layers: list, sqsh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """mksquashfs ends well, and a block is not what it has compressed: met once in some hundred images."""
    real, wrapper, count = shutil.which("mksquashfs"), tmp_path / "bin" / "mksquashfs", tmp_path / "count"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\n{real} "$@" || exit\n[ $1 = - ] || exit 0\necho >> {count}\n'
        f"[ $(wc -l < {count}) -gt {times} ] || printf damaged-damaged-damaged | dd of=$2 bs=1 seek=110 conv=notrunc\n"
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    target = tmp_path / "b.sqsh"
    if times == 1:
        pack(target, layers)
        assert sha256_file(target) == sha256_file(sqsh)
    else:
        with pytest.raises(BuildError, match=r"read the new .sqsh back") as caught:
            pack(target, layers)
        assert "test the memory" in caught.value.fix
        assert not target.exists()
    assert len(count.read_text()) == 2


def test_sqsh_of_a_damaged_layer_is_refused(layers: list, tmp_path: Path) -> None:
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(layers[0][1].read_bytes()[:-2000])
    with pytest.raises(CheckRefusedError, match=r"broken.tar.gz is refused"):
        write_sqsh(tmp_path / "x.sqsh", source([broken]), tmp_path / "log")
    assert not (tmp_path / "x.sqsh").exists()


def test_failure_of_mksquashfs_has_its_output(layers: list, tmp_path: Path) -> None:
    (tmp_path / "image.sqsh").mkdir()
    with pytest.raises(BuildError) as caught:
        pack(tmp_path / "image.sqsh", layers)
    assert "mksquashfs exited with status 1" in caught.value.what
    assert caught.value.why
