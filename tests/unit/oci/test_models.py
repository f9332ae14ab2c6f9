"""The documents of images, as others write them."""

import json

import pytest

from envbuild.core.errors import CheckRefusedError
from envbuild.oci.models import Configuration, Index, Manifest, Platform, read
from envbuild.oci.pull import base_config, check_layers, choose

DIGEST = "sha256:" + "a" * 64
LAYER = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": DIGEST, "size": 1}
MANIFEST = {"schemaVersion": 2, "config": {**LAYER, "mediaType": "x"}, "layers": [LAYER]}
CONFIGURATION = {"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": [DIGEST]}}


def parsed(model, value):
    return read(json.dumps(value).encode(), model, "it")


@pytest.mark.parametrize(
    ("platform", "base", "fits"),
    [
        (("linux", "amd64", ""), "linux/amd64", True),
        (("linux", "amd64", "v3"), "linux/amd64", False),  # would not run on every machine
        (("linux", "arm64", ""), "linux/arm64", True),
        (("linux", "arm64", "v8"), "linux/arm64", True),
        (("linux", "arm64", "v9"), "linux/arm64", False),
        (("windows", "amd64", ""), "linux/amd64", False),
    ],
)
def test_platform(platform, base, fits):
    system, architecture, variant = platform
    assert Platform(os=system, architecture=architecture, variant=variant).is_for(base) is fits


def test_index_without_the_platform_names_those_it_has():
    index = parsed(Index, {"manifests": [{**LAYER, "platform": {"os": "linux", "architecture": "s390x"}}]})
    with pytest.raises(CheckRefusedError) as caught:
        choose(index, "linux/amd64", "it")
    assert "linux/s390x" in caught.value.why
    with pytest.raises(CheckRefusedError, match="it is refused"):
        choose(parsed(Index, {"manifests": [LAYER]}), "linux/amd64", "it")


@pytest.mark.parametrize(
    ("value", "model"),
    [
        ({}, Manifest),
        ([], Manifest),
        ({**MANIFEST, "layers": [LAYER] * 501}, Manifest),
        ({**MANIFEST, "layers": [{**LAYER, "digest": "sha256:../../x"}]}, Manifest),
        ({**MANIFEST, "layers": [{**LAYER, "size": -1}]}, Manifest),
        ({"schemaVersion": 1, "fsLayers": []}, Manifest),
        ({**CONFIGURATION, "rootfs": {}}, Configuration),
        ({**CONFIGURATION, "config": {"Env": "A=1"}}, Configuration),
    ],
)
def test_document_that_is_no_such_thing_is_refused(value, model):
    with pytest.raises(CheckRefusedError, match="it is refused as a base"):
        parsed(model, value)


def test_text_that_is_no_json_is_refused():
    with pytest.raises(CheckRefusedError, match="it is refused as a base"):
        read(b"<html>", Manifest, "it")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", "foreign"),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "foreign"),
        ("application/vnd.oci.image.layer.v1.tar+squashfs", "unknown type"),
        ("", "unknown type"),
    ],
)
def test_layers_that_cannot_be_taken(kind, told):
    manifest = parsed(Manifest, {**MANIFEST, "layers": [{**LAYER, "mediaType": kind}]})
    with pytest.raises(CheckRefusedError) as caught:
        check_layers(manifest, parsed(Configuration, CONFIGURATION), "linux/amd64", "it")
    assert told in caught.value.why


def test_image_for_another_platform_is_refused():
    with pytest.raises(CheckRefusedError) as caught:
        check_layers(parsed(Manifest, MANIFEST), parsed(Configuration, CONFIGURATION), "linux/arm64", "it")
    assert "for linux/arm64; the image is for linux/amd64" in caught.value.why


def test_document_with_a_key_twice_is_refused():
    with pytest.raises(CheckRefusedError, match="it is refused as a base") as caught:
        read(json.dumps(MANIFEST).replace('"layers"', '"layers": [], "layers"').encode(), Manifest, "it")
    assert "a key twice" in caught.value.why


def test_configuration_with_another_number_of_layers_is_refused():
    configuration = parsed(Configuration, {**CONFIGURATION, "rootfs": {"diff_ids": [DIGEST, DIGEST]}})
    with pytest.raises(CheckRefusedError) as caught:
        check_layers(parsed(Manifest, MANIFEST), configuration, "linux/amd64", "it")
    assert "1 layers, and its configuration 2" in caught.value.why


def test_what_an_image_says_of_its_containers():
    start = {
        "Env": ["PATH=/bin", "EMPTY=", "WITH=a=b"],
        "Labels": None,
        "User": "1000",
        "Volumes": {"/b": {}, "/a": {}},
        "Entrypoint": ["/x"],
        "Healthcheck": {"Test": ["NONE"]},
    }
    found = base_config(parsed(Configuration, {**CONFIGURATION, "config": start}), "it")
    assert found.environment == {"PATH": "/bin", "EMPTY": "", "WITH": "a=b"}
    assert (found.labels, found.user, found.volumes, found.entrypoint) == ({}, "1000", ("/a", "/b"), ("/x",))
    assert base_config(parsed(Configuration, CONFIGURATION), "it").environment == {}


@pytest.mark.parametrize(
    "start", [{"Env": ["A=1\nLD_PRELOAD=/x"]}, {"Env": ["A"]}, {"Env": ["=1"]}, {"WorkingDir": "/a\n/b"}]
)
def test_what_would_be_another_line_in_the_files_of_containers_is_refused(start):
    with pytest.raises(CheckRefusedError, match="it is refused as a base"):
        base_config(parsed(Configuration, {**CONFIGURATION, "config": start}), "it")
