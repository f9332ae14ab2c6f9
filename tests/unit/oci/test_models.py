"""The documents of images, as others write them."""

import json

import pytest
from helpers.errors import error_of

from envbuild.core.errors import CheckRefusedError
from envbuild.oci.models import Configuration, Index, Manifest, Platform, read
from envbuild.oci.pull import base_config, check_layers, choose

DIGEST = "sha256:" + "a" * 64
GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
LAYER = {"mediaType": GZIP, "digest": DIGEST, "size": 1}
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
    assert "linux/s390x" in error_of(CheckRefusedError, choose, index, "linux/amd64", "it").why
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
def test_document_of_another_form_is_refused(value, model):
    with pytest.raises(CheckRefusedError, match="it is refused as a base"):
        parsed(model, value)


@pytest.mark.parametrize(
    ("kind", "diff_ids", "platform", "words"),
    [
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", [DIGEST], "linux/amd64", "foreign"),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", [DIGEST], "linux/amd64", "foreign"),
        ("application/vnd.oci.image.layer.v1.tar+squashfs", [DIGEST], "linux/amd64", "unknown type"),
        ("", [DIGEST], "linux/amd64", "unknown type"),
        (GZIP, [DIGEST], "linux/arm64", "for linux/arm64; the image is for linux/amd64"),
        (GZIP, [DIGEST, DIGEST], "linux/amd64", "1 layers, and its configuration 2"),
        (GZIP, [], "linux/amd64", "It has no layers"),
    ],
)
def test_layers_of_other_types_or_platforms_are_refused(kind, diff_ids, platform, words):
    manifest = parsed(Manifest, {**MANIFEST, "layers": [{**LAYER, "mediaType": kind}]})
    configuration = parsed(Configuration, {**CONFIGURATION, "rootfs": {"diff_ids": diff_ids}})
    assert words in error_of(CheckRefusedError, check_layers, manifest, configuration, platform, "it").why


@pytest.mark.parametrize(
    "raw", [b"<html>", json.dumps(MANIFEST).replace('"layers"', '"layers": [], "layers"').encode()]
)
def test_text_that_is_not_one_document_is_refused(raw):
    assert error_of(CheckRefusedError, read, raw, Manifest, "it").what == "it is refused as a base"


def test_run_config_of_an_image():
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
    "start",
    [
        {"Env": ["A=1\nLD_PRELOAD=/x"]},
        {"Env": ["A"]},
        {"Env": ["=1"]},
        {"WorkingDir": "/a\n/b"},
        {"StopSignal": "TERM\nRUN x"},
    ],
)
def test_what_would_be_another_line_in_the_files_of_containers_is_refused(start):
    with pytest.raises(CheckRefusedError, match="it is refused as a base"):
        base_config(parsed(Configuration, {**CONFIGURATION, "config": start}), "it")
