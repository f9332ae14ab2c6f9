"""The native builder's decisions: what makes an image another one, and when there is nothing to do."""

import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.locks import make_lock
from unit.image.test_record import RECORD

from envbuild.catalog.catalog import Catalog, HostDistribution, Selection, definition_digest, select
from envbuild.catalog.data import data_root
from envbuild.catalog.site import Site
from envbuild.core.errors import CheckRefusedError, ConfigurationError, MachineError
from envbuild.core.progress import SilentReporter
from envbuild.image import base as bases
from envbuild.image import build
from envbuild.image.base import StoredBase, mmdebstrap
from envbuild.image.build import build_image, image_key, run_config
from envbuild.image.layers.environment import StoredEnvironment
from envbuild.image.layers.sandbox import VENV
from envbuild.image.record import BaseRecord, EnvironmentRecord
from envbuild.image.squashfs import enroot, pack
from envbuild.image.squashfs.compression import Compression
from envbuild.image.squashfs.pack import Packing
from envbuild.lock.lockfile import read_lock
from envbuild.oci.models import BaseConfig
from envbuild.rootfs import gzip_writer
from envbuild.rootfs.layer import LayerRecord
from envbuild.store.local import LocalStore
from envbuild.store.record import dump

SELECTION = select(Catalog.open(data_root()), "mcore", "cpu", "debian12", HostDistribution("debian", "12"))
BASE_DIGEST = "sha256:base"
BOTH = ("oci", "sqsh")


@pytest.fixture(autouse=True)
def _tools(monkeypatch):
    """Versions of tools that a machine running unit tests need not have."""
    monkeypatch.setattr(mmdebstrap, "mmdebstrap_version", lambda: "mmdebstrap 1.3.5")
    monkeypatch.setattr(pack, "mksquashfs_version", lambda: "mksquashfs version 4.5.1")
    monkeypatch.setattr(build, "uv_version", lambda: "0.13.8")


@pytest.fixture
def lock(tmp_path):
    make_lock(tmp_path / "lock")
    directory = read_lock(tmp_path / "lock")
    base = directory.lock.base.model_copy(update={"definition_digest": definition_digest(SELECTION.base)})
    return type(directory)(directory.path, directory.lock.model_copy(update={"base": base}))


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store", SilentReporter())


@pytest.fixture
def site(tmp_path):
    return Site(
        cache_dir=tmp_path / "store", ca_bundle=None, apt_mirror=None, find_links=(), torch_index="https://t/{build}"
    )


def put_base(store, config=BaseConfig()):  # noqa: B008 - it is frozen
    layer = LayerRecord(name="base", digest="d", diff_id=BASE_DIGEST, size_bytes=1, unpacked_bytes=1, entries=1)
    record = BaseRecord(
        schema="envbuild.base/2", layers=(layer,), made_by="mmdebstrap 1.3.5", config=config, packages={}
    )
    store.get_or_build(
        bases.KIND, bases.base_key(SELECTION.base), lambda folder: put(folder / "record.json", dump(record))
    )


def put_image(store, lock, formats):
    key = image_key(SELECTION, lock, BASE_DIGEST, formats)
    record = RECORD.model_copy(update={"key": key, "sqsh": RECORD.sqsh if "sqsh" in formats else None})
    return store.get_or_build(build.KIND, key, lambda folder: put(folder / "record.json", dump(record)))


def put(file: Path, data: bytes) -> None:
    file.write_bytes(data)


def changed(lock, **fields):
    return type(lock)(lock.path, lock.lock.model_copy(update=fields))


def test_key_is_the_same_for_the_same_things(lock):
    assert image_key(SELECTION, lock, BASE_DIGEST, BOTH) == image_key(SELECTION, lock, BASE_DIGEST, ["sqsh", "oci"])


def test_key_changes_with_whatever_decides_the_bytes(lock, monkeypatch):
    keys = [image_key(SELECTION, lock, BASE_DIGEST, BOTH)]
    keys.append(image_key(SELECTION, lock, "sha256:other", BOTH))
    keys.append(image_key(SELECTION, lock, BASE_DIGEST, ("oci",)))
    keys.append(image_key(SELECTION, changed(lock, digest="sha256:x"), BASE_DIGEST, BOTH))
    keys.append(image_key(SELECTION, changed(lock, source_date_epoch=1), BASE_DIGEST, BOTH))
    monkeypatch.setattr(pack, "mksquashfs_version", lambda: "mksquashfs version 4.6.1")
    keys.append(image_key(SELECTION, lock, BASE_DIGEST, BOTH))
    monkeypatch.setattr(build, "uv_version", lambda: "0.13.9")
    keys.append(image_key(SELECTION, lock, BASE_DIGEST, BOTH))
    monkeypatch.setattr(gzip_writer, "ENCODER", "zlib 1.3.1 level 4")
    keys.append(image_key(SELECTION, lock, BASE_DIGEST, BOTH))
    assert len(set(keys)) == len(keys)


def test_key_changes_with_the_hardware_and_not_with_the_targets_name(lock, tmp_path):
    """Two targets whose images would be the same have one."""
    own = tmp_path / "envs" / "targets"
    own.mkdir(parents=True)
    text = Catalog.open(data_root()).path("targets", "h100").read_text()
    (own / "h100-like.toml").write_text(text.replace("summary = ", 'summary = "another"  # '))
    (own / "older.toml").write_text(text.replace('"90"', '"80"'))
    (own / "fleet.toml").write_text(text + 'driver = "580.95.05"\n')
    catalog = Catalog.open(tmp_path)
    key = {
        name: image_key(Selection(catalog, "mcore", "debian12-cu130", name), lock, BASE_DIGEST, BOTH)
        for name in ("h100", "h200", "h100-like", "older", "fleet", "cpu")
    }
    assert key["h100"] == key["h200"] == key["h100-like"]
    assert len({key[name] for name in ("h100", "older", "fleet", "cpu")}) == 4


def test_image_of_another_target_with_the_same_hardware_is_taken(lock, store, site, tmp_path):
    put_base(store)
    entry = put_image(store, lock, BOTH)
    own = tmp_path / "envs" / "targets"
    own.mkdir(parents=True)
    (own / "cpu2.toml").write_text(Catalog.open(data_root()).path("targets", "cpu").read_text())
    other = Selection(Catalog.open(tmp_path), "mcore", "debian12", "cpu2")
    built = build_image(other, lock, site, store, SilentReporter())
    assert (built.path, built.built, built.record.target) == (entry.path, False, "cpu2")
    assert build_image(SELECTION, lock, site, store, SilentReporter()).record.target == "cpu"


def test_key_depends_on_how_the_sqsh_is_packed(lock):
    packings = [
        Packing(),
        Packing(compression=Compression.parse("lz4")),
        Packing(compression=Compression.parse("zstd:4")),
    ]
    keys = {image_key(SELECTION, lock, BASE_DIGEST, BOTH, packing=how) for how in packings}
    assert len(keys) == 3
    assert len({image_key(SELECTION, lock, BASE_DIGEST, ("oci",), packing=how) for how in packings}) == 1


def test_key_without_sqsh_does_not_depend_on_mksquashfs(lock, monkeypatch):
    key = image_key(SELECTION, lock, BASE_DIGEST, ("oci",))
    monkeypatch.setattr(pack, "mksquashfs_version", lambda: "mksquashfs version 4.6.1")
    assert image_key(SELECTION, lock, BASE_DIGEST, ("oci",)) == key


def test_image_that_is_there_is_not_built(lock, store, site):
    put_base(store)
    entry = put_image(store, lock, BOTH)
    built = build_image(SELECTION, lock, site, store, SilentReporter())
    assert (built.path, built.built) == (entry.path, False)


def test_image_with_sqsh_serves_who_wants_none(lock, store, site):
    put_base(store)
    entry = put_image(store, lock, BOTH)
    assert build_image(SELECTION, lock, site, store, SilentReporter(), formats=("oci",)).path == entry.path


def test_image_with_a_sqsh_that_nodes_cannot_read_serves_nobody(lock, store, site):
    put_base(store)
    both, alone = put_image(store, lock, BOTH), put_image(store, lock, ("oci",))

    def found(*readable):
        how = Packing(readable=readable)
        return build_image(SELECTION, lock, site, store, SilentReporter(), formats=("oci",), packing=how).path

    assert found() == found("gzip", "zstd") == both.path
    assert found("gzip") == alone.path


def test_image_without_sqsh_serves_on_a_machine_without_mksquashfs(lock, store, site, monkeypatch):
    put_base(store)
    entry = put_image(store, lock, ("oci",))

    def missing() -> str:
        raise MachineError("the program mksquashfs is not installed")

    monkeypatch.setattr(pack, "mksquashfs_version", missing)
    assert build_image(SELECTION, lock, site, store, SilentReporter(), formats=("oci",)).path == entry.path
    with pytest.raises(MachineError, match="mksquashfs"):
        build_image(SELECTION, lock, site, store, SilentReporter(), formats=BOTH)


def test_missing_tool_is_named_before_work_starts(lock, store, site, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    with pytest.raises(MachineError) as caught:
        build_image(SELECTION, lock, site, store, SilentReporter())
    assert "apt-get install mmdebstrap" in caught.value.fix
    assert not (store.root / "staging").exists()


class WorkBeganError(Exception):
    """The environment is being made."""


@pytest.mark.parametrize("config", [BaseConfig(workdir='/a"$(id)"'), BaseConfig(volumes=("/a b",))])
def test_base_that_no_sqsh_can_have_is_refused_before_the_environment_is_made(lock, store, site, monkeypatch, config):
    def began(*_):
        raise WorkBeganError

    put_base(store, config)
    monkeypatch.setattr(build, "check_tools", lambda *_, **__: None)
    monkeypatch.setattr(pack, "find_tool", lambda *_: None)
    monkeypatch.setattr(build, "make_environment", began)
    with pytest.raises(CheckRefusedError, match=r"cannot go into a \.sqsh"):
        build_image(SELECTION, lock, site, store, SilentReporter(), formats=BOTH)
    with pytest.raises(WorkBeganError):
        build_image(SELECTION, lock, site, store, SilentReporter(), formats=("oci",))


def test_lock_for_another_definition_of_the_base_is_refused(lock, store, site):
    other = lock.lock.base.model_copy(update={"definition_digest": "sha256:older"})
    with pytest.raises(ConfigurationError) as caught:
        build_image(SELECTION, changed(lock, base=other), site, store, SilentReporter())
    assert "envbuild lock --stack mcore" in caught.value.fix


def test_advice_for_a_lock_of_a_name_of_its_own_renews_that_one(lock):
    other = lock.lock.base.model_copy(update={"definition_digest": "sha256:older"})
    named = type(lock)(lock.path.parent / "lockfiles/mine/debian12", changed(lock, base=other).lock)
    with pytest.raises(ConfigurationError) as caught:
        build.check_lock(SELECTION, named)
    assert "envbuild lock --stack mcore --base debian12 --name mine" in caught.value.fix


# ---- a stack's variables


def parts_of(lock):
    layer = RECORD.layers[0]
    base = BaseRecord(schema="envbuild.base/2", layers=(layer,), made_by="x", packages={})
    environment = EnvironmentRecord(schema="envbuild.environment/2", layers=(), packages={})
    return build.ImageParts(
        selection=SELECTION,
        lock=lock,
        base=StoredBase(path=Path("/b"), record=base, built=False),
        environment=StoredEnvironment(record=environment, layers=(), built=False),
    )


def profile(lock, tmp_path):
    file = tmp_path / "configuration.tar.gz"
    build.write_configuration(file, parts_of(lock))
    with tarfile.open(file) as archive:
        member = archive.extractfile("etc/profile.d/envbuild.sh")
        assert member is not None
        return member.read().decode()


def test_the_stacks_variables_are_in_every_place_that_a_container_reads(lock, tmp_path):
    with_variable = changed(lock, environment={"CUDA_HOME": "{site_packages}/nvidia/cu13"})
    value = "/opt/envbuild/venv/lib/python3.11/site-packages/nvidia/cu13"
    config = run_config(parts_of(with_variable))
    assert config.environment[-1] == f"CUDA_HOME={value}"
    assert config.as_json()["Env"] == config.environment
    files = enroot.files(config, "oci:x")
    assert f"\nCUDA_HOME={value}\n".encode() in files["etc/environment"]
    script = f"PATH=/bin; {profile(with_variable, tmp_path)}\nprintenv CUDA_HOME"
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env={})
    assert shown.stdout == f"{value}\n"


def test_a_base_does_not_run_anything_at_a_login(lock, tmp_path):
    """Its variables are other people's words."""
    words = ["$(touch ran)", "`touch ran`", '";touch ran;"', "';touch ran;'", "/own/bin", "a b"]
    parts = parts_of(changed(lock, environment={"LD_LIBRARY_PATH": "/x"}))
    config = BaseConfig(environment={"PATH": ":".join(words), "LD_LIBRARY_PATH": "$(touch ran)"})
    base = replace(parts.base, record=parts.base.record.model_copy(update={"config": config}))
    file = tmp_path / "configuration.tar.gz"
    build.write_configuration(file, replace(parts, base=base))
    with tarfile.open(file) as archive:
        (tmp_path / "profile.sh").write_bytes(archive.extractfile("etc/profile.d/envbuild.sh").read())
    for shell in ("sh", "bash"):
        script = 'PATH=/bin; . ./profile.sh; /bin/echo "$PATH"; /bin/echo "$LD_LIBRARY_PATH"'
        shown = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
        path, libraries = shown.stdout.splitlines()
        assert path == f"{VENV}/bin:{':'.join(words)}:/bin"
        assert libraries == "/x:$(touch ran)"
    assert not (tmp_path / "ran").exists()


def test_image_for_gpus_says_what_it_needs_where_runtimes_and_enroot_look(lock):
    on_gpus = Selection(SELECTION.catalog, "mcore", "debian12-cu130", "h200")
    config = run_config(replace(parts_of(lock), selection=on_gpus))
    assert "NVIDIA_REQUIRE_CUDA=cuda>=13.0" in config.environment
    assert b"\nNVIDIA_REQUIRE_ARCH=arch>=9.0,arch<10.0\n" in enroot.files(config, "oci:x")["etc/environment"]
    labels = dict(config.labels)
    assert labels["envbuild.require.cuda"] == "cuda>=13.0"
    assert not any("h200" in value for value in labels.values())


def test_an_image_of_a_stack_without_variables_is_what_it_was(lock, tmp_path):
    config = run_config(parts_of(lock))
    assert [entry.partition("=")[0] for entry in config.environment] == ["PATH", "VIRTUAL_ENV", "LANG"]
    assert profile(lock, tmp_path) == (
        (data_root() / build.PROFILE).read_text().replace("@VENV@", VENV).replace("@FRONT@", f"{VENV}/bin")
    )
