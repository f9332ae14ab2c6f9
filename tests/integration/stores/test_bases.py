"""Bases that are images: from a real registry, layouts and archives written by skopeo, and what is wrong with some."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.mini import NAME
from helpers.stores import PASSWORD, USER, write_docker_config

from envbuild.catalog.base import Base, OciLayout, RegistryImage, Tar
from envbuild.catalog.catalog import Catalog, HostDistribution, select
from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.catalog.site import load_site
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError, ConfigurationError, NetworkError
from envbuild.core.progress import SilentReporter
from envbuild.image.base.facts import check
from envbuild.image.base.imported import ImportedBase, import_base, resolve
from envbuild.oci.models import RunConfig
from envbuild.oci.registry import RegistrySource
from envbuild.oci.write import make_oci, write_layout
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.rootfs.layer_writer import LayerWriter
from envbuild.store.local import LocalStore

CONFIG = RunConfig(
    environment=("PATH=/opt/tool/bin:/usr/bin:/bin", "LD_LIBRARY_PATH=/usr/local/vendor/lib", "VENDOR=yes"),
    entrypoint=("/opt/vendor/entrypoint",),
    command=("serve",),
    labels=(("maker", "a vendor"), ("org.opencontainers.image.version", "24.04")),
    workdir="/workspace",
    volumes=("/data",),
    user="0:0",
    ports=("8888/tcp",),
    stop_signal="SIGINT",
)
DEBIAN = Catalog.open(data_root()).base("debian12")
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


def write_image(folder: Path, content: dict[str, bytes], lower: list[Layer] | None = None, tag: str = "v1") -> Path:
    """An OCI layout with a layer for each file, over other layers."""
    folder.mkdir(parents=True)
    layers = list(lower or [])
    for number, (name, data) in enumerate(content.items()):
        file = folder / f"{number}.tar.gz"
        with LayerWriter(file, 1_700_000_000) as writer:
            writer.add_bytes(name, data)
        layers.append(Layer(writer.record(f"l{number}"), file))
    image = make_oci(CONFIG, "linux/amd64", [layer.record for layer in layers], 1_700_000_000)
    write_layout(folder / "oci", image, layers, tag=tag)
    return folder / "oci"


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image(tmp_path_factory.mktemp("image") / "x", {"etc/one": b"1", "etc/.wh.one": b"", "etc/two": b"2"})


def manifest_of(layout: Path) -> tuple[str, dict[str, Any]]:
    digest = json.loads((layout / "index.json").read_bytes())["manifests"][0]["digest"]
    return digest, json.loads(blob_of(layout, digest).read_bytes())


def blob_of(layout: Path, digest: str) -> Path:
    return layout / "blobs/sha256" / digest.removeprefix("sha256:")


def skopeo(*words: str | Path) -> None:
    subprocess.run(["skopeo", "copy", "-q", *map(str, words)], check=True)


def base_of(obtain: RegistryImage | OciLayout | Tar, **changes: Any) -> Base:
    return DEBIAN.model_copy(update={"obtain": obtain, **changes})


@dataclass
class Taker:
    """Takes bases into folders of a test's own, with a store."""

    root: Path
    store: LocalStore

    def __call__(self, base: Base) -> ImportedBase:
        folder = self.root / f"taken-{len(list(self.root.glob('taken-*')))}"
        folder.mkdir()
        context = Context(store=self.store, site=load_site({"HOME": str(self.root)}), reporter=SilentReporter())
        return import_base(folder, base, "it", self.root, context)

    def resolved(self, base: Base) -> Base:
        digest = resolve(base, "it", self.root, None)
        return base.model_copy(update={"obtain": base.obtain.model_copy(update={"digest": digest})})


@pytest.fixture
def taker(tmp_path: Path, own_account: None) -> Taker:
    return Taker(tmp_path, LocalStore(tmp_path / "store", SilentReporter()))


def diff_ids(layout: Path) -> list[str]:
    _, manifest = manifest_of(layout)
    ids: list[str] = json.loads(blob_of(layout, manifest["config"]["digest"]).read_bytes())["rootfs"]["diff_ids"]
    return ids


def check_taken(taken: ImportedBase, layout: Path) -> None:
    assert [layer.record.diff_id for layer in taken.layers] == diff_ids(layout)
    assert [sha256_file(layer.file) for layer in taken.layers] == [layer.record.digest for layer in taken.layers]
    assert [layer.record.entries for layer in taken.layers] == [1, 1, 1]
    config = taken.config
    assert config.environment["VENDOR"] == "yes"
    assert (config.user, config.workdir, config.volumes) == ("0:0", "/workspace", ("/data",))
    assert (config.ports, config.stop_signal) == (("8888/tcp",), "SIGINT")


# ---- layouts and archives


def test_layout_is_taken_with_the_digests_it_has(layout: Path, taker: Taker) -> None:
    shutil.copytree(layout, taker.root / "lay")
    base = taker.resolved(base_of(OciLayout(method="layout", path="lay")))
    digest, manifest = manifest_of(layout)
    assert base.pinned == digest
    taken = taker(base)
    check_taken(taken, layout)
    assert [layer.record.digest for layer in taken.layers] == [layer["digest"] for layer in manifest["layers"]]
    assert taken.digest == digest


def test_layout_with_several_images_needs_a_tag(layout: Path, taker: Taker) -> None:
    shutil.copytree(layout, taker.root / "lay")
    other = write_image(taker.root / "other", {"etc/three": b"3"}, tag="v2")
    skopeo(f"oci:{other}:v2", f"oci:{taker.root}/lay:v2")
    with pytest.raises(CheckRefusedError, match="which image") as caught:
        taker.resolved(base_of(OciLayout(method="layout", path="lay")))
    assert "v1, v2" in caught.value.why
    base = taker.resolved(base_of(OciLayout(method="layout", path="lay", tag="v2")))
    assert len(taker(base).layers) == 1
    with pytest.raises(CheckRefusedError, match="which image"):
        taker.resolved(base_of(OciLayout(method="layout", path="lay", tag="v3")))


@pytest.mark.parametrize("form", ["docker-archive", "oci-archive"])
def test_archive_is_taken_for_what_it_holds(layout: Path, taker: Taker, form: Any) -> None:
    skopeo(f"oci:{layout}:v1", f"{form}:{taker.root}/a.tar" + (":it:v1" if form == "docker-archive" else ":v1"))
    base = taker.resolved(base_of(Tar(method="tar", path="a.tar", format=form)))
    assert base.pinned == sha256_file(taker.root / "a.tar")
    check_taken(taker(base), layout)


def test_archive_that_was_changed_is_refused(layout: Path, taker: Taker) -> None:
    skopeo(f"oci:{layout}:v1", f"oci-archive:{taker.root}/a.tar:v1")
    base = taker.resolved(base_of(Tar(method="tar", path="a.tar", format="oci-archive")))
    with (taker.root / "a.tar").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(CheckRefusedError, match="is not what base it is made of") as caught:
        taker(base)
    assert "image resolve" in caught.value.fix


@pytest.mark.parametrize("packed", [True, False])
def test_root_file_system_in_a_tar_is_one_layer(layout: Path, taker: Taker, packed: bool) -> None:
    blob = blob_of(layout, manifest_of(layout)[1]["layers"][0]["digest"])
    if packed:
        shutil.copyfile(blob, taker.root / "a.tar")
    else:
        (taker.root / "a.tar").write_bytes(
            subprocess.run(["gzip", "-dc", blob], capture_output=True, check=True).stdout
        )
    taken = taker(taker.resolved(base_of(Tar(method="tar", path="a.tar", format="rootfs"))))
    [layer] = taken.layers
    assert layer.record.diff_id == diff_ids(layout)[0]
    assert layer.file.read_bytes()[:2] == b"\x1f\x8b"


def test_missing_file_of_a_base_is_named(taker: Taker) -> None:
    with pytest.raises(ConfigurationError, match="cannot be found") as caught:
        taker.resolved(base_of(Tar(method="tar", path="gone.tar", format="rootfs")))
    assert "gone.tar" in caught.value.why
    with pytest.raises(ConfigurationError, match="cannot be found"):
        taker.resolved(base_of(OciLayout(method="layout", path="gone")))


# ---- registries


@pytest.fixture
def push(registry_address: str, tmp_path: Path) -> Callable[[Path], str]:
    """Pushes a layout to the registry; returns its name there."""

    def copy(layout: Path, *more: str) -> str:
        name = f"{registry_address.removeprefix('http://')}/team/{tmp_path.name.lower()}:v1"
        skopeo("--dest-tls-verify=false", *more, f"oci:{layout}:v1", f"docker://{name}")
        return name

    return copy


def put(registry: str, name: str, reference: str, document: dict[str, Any], kind: str) -> str:
    """Put a manifest that no tool writes; returns its digest."""
    raw = json.dumps(document).encode()
    request = urllib.request.Request(
        f"{registry}/v2/{name}/manifests/{reference}", raw, {"Content-Type": kind}, method="PUT"
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        assert answer.status == 201
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def named(image: str, digest: str | None = None) -> Base:
    return base_of(RegistryImage(method="oci", image=image, digest=digest))


@pytest.mark.parametrize("form", [(), ("--format", "v2s2")])
def test_image_of_a_registry_is_taken_by_its_digest(layout: Path, taker: Taker, push: Any, form: Any) -> None:
    image = push(layout, *form)
    base = taker.resolved(named(image))
    taken = taker(base)
    check_taken(taken, layout)
    assert taken.name == image
    assert taken.digest == base.pinned
    # docker's names for the types of layers have no place in an OCI manifest
    assert {layer.record.media_type for layer in taken.layers} == {"application/vnd.oci.image.layer.v1.tar+gzip"}


def test_layers_are_kept_once_and_not_fetched_again(
    layout: Path, taker: Taker, push: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = taker.resolved(named(push(layout)))
    first = taker(base)

    def fetched(*_: object) -> None:
        raise AssertionError("a layer was fetched again")

    monkeypatch.setattr(RegistrySource, "fetch", fetched)
    again = taker(base)
    assert all(one.file.samefile(other.file) for one, other in zip(first.layers, again.layers, strict=True))
    assert len(list((taker.store.root / "base-layers").iterdir())) == 3


def test_index_gives_the_image_of_the_platform(layout: Path, taker: Taker, push: Any, registry_address: str) -> None:
    image = push(layout)
    repository = image.partition("/")[2].rpartition(":")[0]
    digest, _ = manifest_of(layout)
    size = blob_of(layout, digest).stat().st_size
    entry = {"mediaType": MANIFEST_TYPE, "digest": digest, "size": size}
    attestation = {**entry, "platform": {"os": "unknown", "architecture": "unknown"}}
    for platform, taken in (
        ({"os": "linux", "architecture": "amd64"}, True),
        ({"os": "linux", "architecture": "arm64"}, False),
    ):
        index = {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": [attestation, {**entry, "platform": platform}],
        }
        whole = put(registry_address, repository, "v1", index, INDEX_TYPE)
        base = taker.resolved(named(image))
        assert base.pinned == whole
        if taken:
            assert taker(base).digest == digest
        else:
            with pytest.raises(CheckRefusedError, match="refused as a base") as caught:
                taker(base)
            assert "linux/amd64" in caught.value.why
            assert "linux/arm64" in caught.value.why


def test_manifest_that_is_not_the_digests_is_refused(
    layout: Path, taker: Taker, registry_binary: Path, tmp_path: Path
) -> None:
    shutil.copytree(layout, taker.root / "lay")
    base = taker.resolved(base_of(OciLayout(method="layout", path="lay")))
    assert base.pinned
    file = blob_of(taker.root / "lay", base.pinned)
    file.write_bytes(file.read_bytes().replace(b'"schemaVersion":2', b'"schemaVersion":3'))
    with pytest.raises(CheckRefusedError, match="refused as a base") as caught:
        taker(base)
    assert base.pinned in caught.value.why


@pytest.mark.parametrize(
    ("missing", "why"), [("tag", "not on its registry"), ("digest", "not whole"), ("registry", "cannot be reached")]
)
def test_what_a_registry_does_not_have_is_a_matter_of_the_network(
    layout: Path, taker: Taker, push: Any, missing: str, why: str
) -> None:
    image = push(layout)
    calls: dict[str, Callable[[], object]] = {
        "tag": lambda: taker.resolved(named(image.replace("/team/", "/unknown/"))),
        "digest": lambda: taker(named(image, "sha256:" + "0" * 64)),
        "registry": lambda: taker.resolved(named("127.0.0.1:9/team/it:v1")),
    }
    with pytest.raises(NetworkError, match=why):
        calls[missing]()


def test_registry_that_wants_a_password_gets_the_one_of_dockers_configuration(
    layout: Path, taker: Taker, closed_registry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = closed_registry.removeprefix("http://")
    skopeo(
        "--dest-tls-verify=false",
        "--dest-creds",
        f"{USER}:{PASSWORD}",
        f"oci:{layout}:v1",
        f"docker://{host}/team/it:v1",
    )
    with pytest.raises(NetworkError) as caught:
        taker.resolved(named(f"{host}/team/it:v1"))
    assert "status 401" in caught.value.what
    assert "registry of the base" in caught.value.what
    assert "ENVBUILD_STORE" not in caught.value.fix
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    for name, value in write_docker_config(tmp_path / "docker", {"auths": {host: {"auth": auth}}}).items():
        monkeypatch.setenv(name, value)
    check_taken(taker(taker.resolved(named(f"{host}/team/it:v1"))), layout)


# ---- the whole way


@pytest.fixture(scope="module")
def vendor_image(mini_image: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image as a vendor would make it: this machine's distribution, and a layer of the vendor's own."""
    placed = Path(mini_image["path"])
    lowest = LayerRecord.model_validate(mini_image["record"]["layers"][0])
    lower = [Layer(lowest, blob_of(placed / "oci", lowest.digest))]
    python = select(Catalog.open(data_root()), "mcore", "cpu", None, HostDistribution.here()).base.python.version
    packages = f"usr/local/lib/python{python}/dist-packages"
    content = {
        f"{packages}/vendored/__init__.py": b"",
        f"{packages}/vendored-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: vendored\nVersion: 1.0\n",
        "opt/vendor/entrypoint": b"#!/bin/sh\nexec false\n",
        "opt/tool/bin/tool": b"#!/bin/sh\necho tool\n",
    }
    return write_image(tmp_path_factory.mktemp("vendor") / "x", content, lower)


@pytest.fixture
def project(mini: Tool, tmp_path: Path, push: Any, vendor_image: Path) -> Tool:
    """A project whose stack is for a base on the registry, the digest of which was not resolved yet."""
    own = select(Catalog.open(mini.project), NAME, "cpu", None, HostDistribution.here())
    (tmp_path / "envs/stacks").mkdir(parents=True)
    (tmp_path / "envs/bases").mkdir()
    text = (mini.project / f"envs/stacks/{NAME}.toml").read_text()
    (tmp_path / f"envs/stacks/{NAME}.toml").write_text(
        text.replace('["debian12", "ubuntu2204", "ubuntu2404"]', '["vendor"]')
        .replace('"host"', '"vendor"')
        .replace('["packaging.version"]', '["packaging.version", "vendored"]')
    )
    shipped = own.catalog.path("bases", own.base_name).read_text()
    obtain = f'[obtain]\nmethod = "oci"\nimage = "{push(vendor_image)}"\n'
    provides = 'provides = { vendored = "1.0" }\n'
    (tmp_path / "envs/bases/vendor.toml").write_text(provides + shipped[: shipped.index("[obtain]")] + obtain)
    return Tool(tmp_path, tmp_path / "cache")


@pytest.mark.slow
def test_image_on_a_registrys_image(project: Tool, vendor_image: Path) -> None:
    where = ("--stack", NAME, "--target", "cpu")
    project.run("lock", *where)
    refused = project.run("image", *where, status=5)
    assert "envbuild image resolve --base vendor" in refused.stderr
    listed = project.run("list", "bases")
    assert "digest not resolved" in listed.stdout
    resolved = json.loads(project.run("image", "resolve", "--base", "vendor", "--write", "--json").stdout)
    assert resolved["digest"] == manifest_of(vendor_image)[0]
    assert resolved["was"] is None
    project.run("lock", *where)
    made = json.loads(project.run("image", *where, "--format", "oci", "--json").stdout)
    record = made["record"]
    stated = [layer["digest"] for layer in manifest_of(vendor_image)[1]["layers"]]
    assert [layer["digest"] for layer in record["layers"][: len(stated)]] == stated
    assert "vendored" not in record["packages"]  # the environment sees the base's, and its import was checked
    assert "libc6" in record["base_packages"]
    assert record["base_made_by"].endswith(resolved["digest"])
    config = json.loads(
        subprocess.run(
            ["skopeo", "inspect", "--config", f"oci:{made['path']}/oci:{NAME}-vendor-cpu"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )["config"]
    environment = dict(entry.split("=", 1) for entry in config["Env"])
    assert environment["PATH"] == "/opt/envbuild/venv/bin:/opt/tool/bin:/usr/bin:/bin"
    assert environment["VENDOR"] == "yes"
    assert "Entrypoint" not in config
    assert config["Cmd"] == ["/bin/bash"]
    assert (config["WorkingDir"], config["User"], config["Volumes"]) == ("/workspace", "0:0", {"/data": {}})
    labels = config["Labels"]
    assert labels["maker"] == "a vendor"
    assert labels["org.opencontainers.image.base.digest"] == resolved["digest"]
    assert "org.opencontainers.image.version" not in labels
    again = json.loads(project.run("image", *where, "--format", "oci", "--json").stdout)
    assert (again["built"], again["record"]["oci_digest"]) == (False, record["oci_digest"])
    # The base's own Python is asked for its version, in the root that was unpacked.
    (rootfs,) = (project.cache / "bases").glob("*/rootfs")
    base = Catalog.open(project.project).base("vendor")
    check(base, "vendor", rootfs, {})
    for changes, word in (
        ({"python": base.python.model_copy(update={"version": "3.9"})}, "python: 3.9 in the file"),
        ({"provides": {"torch": "2.9.0"}}, "provides: torch 2.9.0 in the file, none in the base"),
    ):
        with pytest.raises(CheckRefusedError) as caught:
            check(base.model_copy(update=changes), "vendor", rootfs, {})
        assert word in caught.value.why
    # A file with a wrong statement
    file = project.project / "envs/bases/vendor.toml"
    file.write_text(file.read_text().replace('glibc = "2.', 'glibc = "2.1'))
    project.run("lock", *where)
    refused = project.run("image", *where, status=5)
    assert "glibc" in refused.stderr
