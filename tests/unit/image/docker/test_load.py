"""Loading an image into a daemon: what is sent, and when nothing is."""

import io
import json
import tarfile

import pytest
from helpers.errors import error_of
from helpers.placed_images import RECORD

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import BuildError, CheckRefusedError, MachineError
from envbuild.core.progress import SilentReporter
from envbuild.image.docker.load import docker_archive, engine_for, load_image

TAG = "mini:debian12-cpu"


class Engine:
    version = "docker 28"

    def __init__(self, images=(), problem=""):
        self.images = {name: name for name in images}
        self.problem = problem
        self.loaded = {}

    def find(self, name):
        return self.images.get(name)

    def tag(self, image_id, name):
        self.images[name] = image_id

    def load(self, archive):
        self.loaded = read(archive)
        if not self.problem:
            (entry,) = json.loads(self.loaded["manifest.json"])
            config = sha256_bytes(self.loaded[entry["Config"]])
            self.images[config] = config
        return self.problem


def read(chunks):
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


@pytest.fixture
def image(tmp_path):
    """A record, and the folder with its blobs: a configuration and a layer of several chunks."""
    config, layer = b'{"os": "linux"}', bytes(range(256)) * 9000
    blobs = tmp_path / "oci/blobs/sha256"
    blobs.mkdir(parents=True)
    for data in (config, layer):
        (blobs / sha256_bytes(data).removeprefix("sha256:")).write_bytes(data)
    (item,) = RECORD.layers[:1]
    record = RECORD.model_copy(
        update={
            "config_digest": sha256_bytes(config),
            "layers": (item.model_copy(update={"digest": sha256_bytes(layer)}),),
        }
    )
    return tmp_path, record, config, layer


def test_archive_has_the_configuration_and_the_layers_byte_for_byte(image):
    path, record, config, layer = image
    found = read(docker_archive(path / "oci/blobs/sha256", record, TAG))
    (entry,) = json.loads(found["manifest.json"])
    assert found[entry["Config"]] == config
    assert entry["RepoTags"] == [TAG]
    assert [found[name] for name in entry["Layers"]] == [layer]


def test_blob_that_shrinks_while_it_is_sent_is_refused(image):
    path, record, _, _ = image
    stream = docker_archive(path / "oci/blobs/sha256", record, TAG)
    for _ in range(4):  # the configuration, and the header of the layer
        next(stream)
    (path / "oci/blobs/sha256" / record.layers[0].digest.removeprefix("sha256:")).write_bytes(b"x")
    with pytest.raises(CheckRefusedError, match="became shorter"):
        list(stream)


def test_image_is_loaded_once(image):
    path, record, _, _ = image
    engine = Engine()
    assert load_image(engine, path, record, TAG, SilentReporter()) is True
    assert engine.find(TAG) == record.config_digest
    assert load_image(engine, path, record, TAG, SilentReporter()) is False


def test_image_without_its_tag_is_tagged_and_not_sent(image):
    path, record, _, _ = image
    engine = Engine([record.config_digest])
    assert load_image(engine, path, record, TAG, SilentReporter()) is True
    assert (engine.loaded, engine.find(TAG)) == ({}, record.config_digest)


@pytest.mark.parametrize(
    ("problem", "kind", "words"),
    [
        ("no space left on device", MachineError, "the disk of the docker daemon is full"),
        ("invalid tar header", BuildError, "the docker daemon refuses the image mini:debian12-cpu"),
    ],
)
def test_daemon_that_refuses_the_image(image, problem, kind, words):
    path, record, _, _ = image
    with pytest.raises(kind, match=words) as caught:
        load_image(Engine(problem=problem), path, record, TAG, SilentReporter())
    assert caught.value.why == problem


@pytest.mark.parametrize(
    ("formats", "instead"),
    [(("docker",), "oci"), (("docker", "sqsh"), "sqsh"), (("docker", "oci", "sqsh"), "oci,sqsh")],
)
def test_format_docker_needs_a_daemon(tmp_path, monkeypatch, formats, instead):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    error = error_of(MachineError, engine_for, formats)
    assert "--format docker loads the image into a daemon" in error.why
    assert "there is no socket" in error.why
    assert "systemctl start docker" in error.fix
    assert error.fix.endswith(f"Without a daemon: --format {instead}.")
    assert engine_for(formats[1:]) is None
