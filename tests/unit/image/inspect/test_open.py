"""Images are opened whatever they lie in; what is none is refused with what is wrong."""

import io
import json
import os
import subprocess
import tarfile

import pytest
from helpers.errors import error_of
from helpers.layer_tars import file, layout_of, tar_of
from helpers.placed_images import RECORD

from envbuild.core.digests import canonical_json, sha256_bytes
from envbuild.core.errors import CheckRefusedError, ConfigurationError, MachineError
from envbuild.image.inspect.open import open_image
from envbuild.oci.models import DOCUMENT_BYTES, RunConfig
from envbuild.rootfs import blobs, tars
from envbuild.rootfs.members import Kind, Member
from envbuild.store.record import dump

CONFIG = RunConfig(environment=("PATH=/bin", "A=b=c"), labels=(("envbuild.stack", "s"),))


@pytest.fixture
def made(tmp_path):
    """A folder as `envbuild image` leaves it, with one layer."""
    folder = tmp_path / "image"
    folder.mkdir()
    image, record = layout_of(folder, file("etc/x", b"content"), config=CONFIG)
    found = RECORD.model_copy(update={"oci_digest": image.digest, "layers": (record,), "components": ("torch",)})
    (folder / "record.json").write_bytes(dump(found))
    return folder


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def archive(made, tmp_path, **options):
    path = tmp_path / "image.tar"
    with tarfile.open(path, **options) as tar:
        for item in sorted((made / "oci").rglob("*")):
            tar.add(item, str(item.relative_to(made / "oci")), recursive=False)
    return path


def docker_archive(made, tmp_path, images=1, **more):
    (blob,) = [
        path for path in (made / "oci/blobs/sha256").iterdir() if path.read_bytes()[:2] == b"\x1f\x8b"
    ]  # fmt: skip
    config = {"os": "linux", "architecture": "amd64", "config": {"Env": ["PATH=/bin"]}, **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "manifest.json").write_text(json.dumps([{"Config": "config.json", "Layers": ["x/layer.tar"]}] * images))
    path = tmp_path / "docker.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(tmp_path / "manifest.json", "manifest.json")
        tar.add(tmp_path / "config.json", "config.json")
        tar.add(blob, "x/layer.tar")
    return path


def names(image) -> list[str]:
    found: list[str] = []
    for one in image.layers:
        for member, content in one.members():
            assert isinstance(member, Member)
            found.append(f"{member.name}={content.read().decode() if content else ''}")
    return found


def test_every_kind_shows_the_same(made, tmp_path, scratch):
    shown = {}
    for name, kind in (
        (str(made), "folder"),
        (str(made / "oci"), "layout"),
        (str(made / "oci") + ":mcore", "layout"),
        (str(archive(made, tmp_path, mode="w:gz")), "archive"),
        (str(docker_archive(made, tmp_path)), "archive"),
    ):
        image = open_image(name, scratch)
        assert (image.source, image.kind) == (name, kind)
        assert image.variables["PATH"] == "/bin"
        shown[name] = names(image)
    assert set(map(tuple, shown.values())) == {("etc/x=content",)}


def test_record_next_to_an_image_counts_if_it_is_of_that_image(made, scratch):
    image = open_image(str(made), scratch)
    assert (image.record.stack, image.components, image.variables["A"]) == ("mcore", ("torch",), "b=c")
    (made / "record.json").write_bytes(dump(image.record.model_copy(update={"oci_digest": "sha256:other"})))
    again = open_image(str(made), scratch)
    assert (again.record, again.components, again.labels) == (None, (), {"envbuild.stack": "s"})


@pytest.mark.parametrize("name", ["", ":tag"])
def test_an_empty_name_is_not_the_current_folder(name, made, scratch, monkeypatch):
    monkeypatch.chdir(made)
    assert error_of(ConfigurationError, open_image, name, scratch).why == "The name is empty."


def test_a_name_that_no_file_can_have(scratch):
    with pytest.raises(MachineError):
        open_image("x" * 300, scratch)


@pytest.mark.parametrize("tag", ["", ":tag"])
def test_what_could_be_read_for_ever_is_not_opened(tag, tmp_path, scratch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in (str(tmp_path / "fifo"), str(tmp_path / "link"), "/dev/null"):
        error = error_of(CheckRefusedError, open_image, name + tag, scratch)
        assert "neither a directory nor a regular file" in error.why


def change_index(made, **fields):
    index = made / "oci/index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), **fields}))


def big(made):
    (made / "oci/index.json").write_bytes(b" " * (17 << 20))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda made: (made / "oci/index.json").write_text("{"), "index cannot be read"),
        (lambda made: (made / "oci/index.json").write_text("[]"), "index cannot be read"),
        (lambda made: change_index(made, manifests=[]), "It has 0 images"),
        (lambda made: change_index(made, manifests=[{"digest": "sha256:../../etc/passwd"}]), "manifests.0.digest"),
        (
            lambda made: change_index(
                made,
                manifests=[{"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": "sha256:../../x"}],
            ),
            "manifests.0.digest",
        ),
        (big, "more than 16 MiB"),
    ],
)
def test_damage_of_a_layout_is_named(made, scratch, damage, why):
    (made / "record.json").unlink()
    damage(made)
    assert why in error_of(CheckRefusedError, open_image, str(made / "oci"), scratch).why


def manifest_of(made):
    entry = json.loads((made / "oci/index.json").read_text())["manifests"][0]
    return made / "oci/blobs/sha256" / entry["digest"].removeprefix("sha256:")


def test_blob_with_another_digest_is_refused(made, scratch):
    path = manifest_of(made)
    path.write_bytes(path.read_bytes() + b" ")
    assert "has the digest" in error_of(CheckRefusedError, open_image, str(made), scratch).why


def test_missing_and_damaged_layers(made, scratch):
    digest = json.loads(manifest_of(made).read_text())["layers"][0]["digest"]
    path = made / "oci/blobs/sha256" / digest.removeprefix("sha256:")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(CheckRefusedError):
        names(open_image(str(made), scratch))
    path.unlink()
    assert "is missing" in error_of(CheckRefusedError, open_image, str(made), scratch).why


def test_folder_or_file_without_an_image_is_refused(tmp_path, scratch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    for name in ("empty", "text"):
        assert "OCI layout" in error_of(CheckRefusedError, open_image, str(tmp_path / name), scratch).fix


def test_archive_of_several_images(made, tmp_path, scratch):
    error = error_of(CheckRefusedError, open_image, str(docker_archive(made, tmp_path, images=2)), scratch)
    assert "lists 2 images" in error.why


def test_layers_of_docker_save_are_compared_with_the_configuration(made, tmp_path, scratch):
    for diff_id, refused in (("sha256:" + "0" * 64, True), (None, False)):
        path = docker_archive(made, tmp_path, rootfs={"diff_ids": [diff_id] if diff_id else []})
        image = open_image(str(path), scratch)
        if refused:
            assert "digest of the tar in it" in error_of(CheckRefusedError, names, image).why
        else:
            assert names(image) == ["etc/x=content"]


def test_index_in_an_index_is_followed_and_attestations_are_passed_over(made, scratch):
    index = json.loads((made / "oci/index.json").read_text())
    attestation = {**index["manifests"][0], "platform": {"os": "unknown", "architecture": "unknown"}}
    inner = canonical_json({**index, "manifests": [index["manifests"][0], attestation]})
    (made / "oci/blobs/sha256" / sha256_bytes(inner).removeprefix("sha256:")).write_bytes(inner)
    outer = {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": sha256_bytes(inner), "size": len(inner)}
    change_index(made, manifests=[outer])
    assert names(open_image(str(made / "oci"), scratch)) == ["etc/x=content"]


@pytest.fixture
def pack(tmp_path):
    """Packs a tree as a .sqsh, with more that a tree here need not hold."""

    def packed(*pseudo, compression="zstd"):
        file = tmp_path / "image.sqsh"
        words = ["mksquashfs", tmp_path / "tree", file, "-noappend", "-comp", compression, "-no-progress", "-quiet"]
        for definition in pseudo:
            words += ["-p", definition]
        subprocess.run(words, check=True, capture_output=True)
        return file

    (tmp_path / "tree").mkdir()
    return packed


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("compression", ["zstd", "lzo", "lz4", "gzip", "xz"])
def test_sqsh_is_read_with_the_words_of_its_own_files(tmp_path, scratch, pack, compression):
    put(tmp_path / "tree/etc/environment", "PATH=/bin\nA=b=c\n")
    put(tmp_path / "tree/etc/rc", "# enroot-provenance: x\n# envbuild.stack s\nmkdir\n")
    put(tmp_path / "tree/usr/bin/su", "x" * 300_000)
    os.link(tmp_path / "tree/usr/bin/su", tmp_path / "tree/usr/bin/zz")
    image = open_image(str(pack("usr/bin/disk b 666 0 0 7 0", "p/q c 600 0 0 1 3", compression=compression)), scratch)
    assert (image.variables, image.labels) == ({"PATH": "/bin", "A": "b=c"}, {"envbuild.stack": "s"})
    (layer,) = image.layers
    found = {member.name: (member.kind, content and len(content.read())) for member, content in layer.members()}
    assert found["usr/bin/su"] == (Kind.FILE, 300_000)
    assert found["usr/bin/zz"] == (Kind.HARD_LINK, None)
    assert found["usr/bin/disk"] == (Kind.BLOCK, None)
    assert list(scratch.rglob("*")) == []


@pytest.mark.parametrize("linked", ["etc", "etc/environment"])
def test_sqsh_with_a_link_does_not_show_files_of_this_machine(tmp_path, scratch, pack, linked):
    put(tmp_path / "outside/environment", "SECRET=of-this-machine\n")
    link = tmp_path / "tree" / linked
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "outside" / ("environment" if "/" in linked else ""))
    image = open_image(str(pack()), scratch)
    assert (image.variables, image.labels) == ({}, {})


def contents_of(image):
    return {member.name: content and content.read() for member, content in image.layers[0].members()}


@pytest.mark.parametrize("damage", ["cut", "first block"])
def test_sqsh_that_is_damaged_is_refused(tmp_path, scratch, pack, damage):
    put(tmp_path / "tree/usr/list", "".join(f"{number}\n" for number in range(50_000)))
    file = pack()
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] if damage == "cut" else data[:96] + b"\xff" * 64 + data[160:])
    with pytest.raises(CheckRefusedError):
        contents_of(open_image(str(file), scratch))


def test_sqsh_that_unpacks_to_a_bomb_is_refused(tmp_path, scratch, pack, monkeypatch):
    monkeypatch.setattr(blobs, "FREE_BYTES", 1 << 20)
    (tmp_path / "tree/hole").touch()
    os.truncate(tmp_path / "tree/hole", 1 << 26)
    image = open_image(str(pack()), scratch)
    with pytest.raises(CheckRefusedError, match="is refused") as caught:
        contents_of(image)
    assert "It unpacks to more than" in caught.value.why


@pytest.mark.parametrize(
    ("limit", "most", "why"),
    [("MOST_MEMBERS", 3, "more than 3 members"), ("MOST_HEADER_BYTES", 1 << 10, "headers of its members")],
)
def test_archive_with_too_many_members_is_refused(made, tmp_path, scratch, monkeypatch, limit, most, why):
    monkeypatch.setattr(tars, limit, most)
    assert why in error_of(CheckRefusedError, open_image, str(archive(made, tmp_path, mode="w")), scratch).why


def test_large_document_of_an_archive_is_not_copied(tmp_path, scratch):
    path = tmp_path / "image.tar"
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("index.json")
        member.size = DOCUMENT_BYTES + 1
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    assert "index.json has more than 16 MiB" in error_of(CheckRefusedError, open_image, str(path), scratch).why
    assert list(scratch.iterdir()) == []


def test_sqsh_with_a_socket_is_refused(tmp_path, scratch, pack):
    """sqfs2tar would leave its long name behind, and the next member would get it."""
    place = tmp_path / "tree/etc" / ("d" * 120)
    place.mkdir(parents=True)
    put(tmp_path / "tree/etc/environment", "A=b\n")
    packed = pack(f"etc/{'d' * 120}/sock i 600 0 0 s")
    assert "socket" in error_of(CheckRefusedError, open_image, str(packed), scratch).why


def header(kind, size, data=b""):
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT) + data


def pax_sparse(**records):
    member = tarfile.TarInfo("x")
    member.pax_headers = {f"GNU.sparse.{key}": value for key, value in records.items()}
    return member.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize(
    "damage",
    [
        header(b"L", 1, bytes(512)) * 3000,
        header(b"x", 0) * 3000,
        header(b"x", -1),
        header(b"L", -512),
        header(b"0", -1),
        header(tarfile.GNUTYPE_SPARSE, 0),
        pax_sparse(size=str(1 << 40), map="0,512"),
        pax_sparse(major="1", minor="0", realsize=str(1 << 40)),
        header(b"0", 1 << 40),
    ],
    ids=["names", "headers", "negative x", "negative L", "negative", "sparse", "PAX 0.1", "PAX 1.0", "bomb"],
)
def test_archive_that_is_hostile_is_refused(tmp_path, scratch, damage):
    path = tmp_path / "image.tar"
    path.write_bytes(tar_of([file("first")])[:512] + damage + bytes(1 << 16))
    with pytest.raises(CheckRefusedError, match="read as an image"):
        open_image(str(path), scratch)
