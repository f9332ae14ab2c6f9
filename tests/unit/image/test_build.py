"""What makes an image another one, and when there is nothing to do."""

import pytest
from helpers.errors import error_of
from helpers.image_inputs import BASE_DIGEST, SELECTION, base_record, changed, inputs_of, put_base, small_lock
from helpers.placed_images import RECORD
from helpers.sites import context_of

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.data import data_root
from envbuild.core.errors import CheckRefusedError, ConfigurationError, MachineError
from envbuild.core.files import write_atomic
from envbuild.image import build, inputs
from envbuild.image.base import mmdebstrap
from envbuild.image.build import build_image
from envbuild.image.inputs import ImageInputs, check_inputs, image_key
from envbuild.image.squashfs import pack
from envbuild.image.squashfs.compression import Compression
from envbuild.image.squashfs.pack import Packing
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.oci.models import BaseConfig
from envbuild.rootfs import gzip_writer
from envbuild.store.record import dump


@pytest.fixture(autouse=True)
def _tools(monkeypatch):
    """Versions of tools that a machine running unit tests need not have."""
    monkeypatch.setattr(mmdebstrap, "mmdebstrap_version", lambda: "mmdebstrap 1.3.5")
    monkeypatch.setattr(pack, "mksquashfs_version", lambda: "mksquashfs version 4.5.1")
    monkeypatch.setattr(inputs, "uv_version", lambda: "0.13.8")


@pytest.fixture
def lock(tmp_path):
    return small_lock(tmp_path / "lock")


@pytest.fixture
def context(tmp_path):
    return context_of(tmp_path)


def put_image(context, lock, *, with_sqsh=True):
    key = key_of(lock, with_sqsh=with_sqsh)
    record = RECORD.model_copy(update={"key": key, "sqsh": RECORD.sqsh if with_sqsh else None})
    return context.store.get_or_build(build.KIND, key, lambda at: write_atomic(at / "record.json", dump(record))).path


def key_of(lock, **more):
    return image_key(inputs_of(lock, **more), BASE_DIGEST)


def test_key_changes_with_whatever_decides_the_bytes(lock, monkeypatch):
    assert key_of(lock) == key_of(lock)
    keys = [key_of(lock), image_key(inputs_of(lock), "sha256:other"), key_of(lock, with_sqsh=False)]
    keys += [key_of(changed(lock, digest="sha256:x")), key_of(changed(lock, source_date_epoch=1))]
    keys += [key_of(lock, packing=Packing(compression=Compression.parse(text))) for text in ("lz4", "zstd:4")]
    keys += [key_of(lock, allow=frozenset({"secrets"}))]
    monkeypatch.setattr(pack, "mksquashfs_version", lambda: "mksquashfs version 4.6.1")
    keys.append(key_of(lock))
    monkeypatch.setattr(inputs, "uv_version", lambda: "0.13.9")
    keys.append(key_of(lock))
    monkeypatch.setattr(gzip_writer, "ENCODER", "zlib 1.3.1 level 4")
    keys.append(key_of(lock))
    # What is checked of its environment: an image of before counts as built no more.
    monkeypatch.setattr(inputs.environment, "FORMAT", 10_001)
    keys.append(key_of(lock))
    assert len(set(keys)) == len(keys)


def test_key_without_sqsh_does_not_depend_on_how_one_is_packed(lock, monkeypatch):
    keys = {key_of(lock, with_sqsh=False), key_of(lock, with_sqsh=False, packing=Packing(readable=("gzip",)))}
    keys.add(key_of(lock, with_sqsh=False, packing=Packing(compression=Compression.parse("lz4"))))
    monkeypatch.setattr(pack, "mksquashfs_version", lambda: "mksquashfs version 4.6.1")
    assert keys == {key_of(lock, with_sqsh=False)}


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
        name: key_of(lock, selection=Selection(catalog, "mcore", "debian12-cu130", name))
        for name in ("h100", "h200", "h100-like", "older", "fleet", "cpu")
    }
    assert key["h100"] == key["h200"] == key["h100-like"]
    assert len({key[name] for name in ("h100", "older", "fleet", "cpu")}) == 4


def test_image_in_the_store_is_taken_also_for_another_target_of_the_same_hardware(lock, context, tmp_path):
    put_base(context, base_record())
    path = put_image(context, lock)
    own = tmp_path / "envs" / "targets"
    own.mkdir(parents=True)
    (own / "cpu2.toml").write_text(Catalog.open(data_root()).path("targets", "cpu").read_text())
    other = Selection(Catalog.open(tmp_path), "mcore", "debian12", "cpu2")
    for selection, target in ((other, "cpu2"), (SELECTION, "cpu")):
        built = build_image(inputs_of(lock, selection=selection), context)
        assert (built.path, built.built, built.record.target) == (path, False, target)


def test_image_with_a_sqsh_that_nodes_can_read_serves_where_none_is_wanted(lock, context):
    put_base(context, base_record())
    both, alone = put_image(context, lock), put_image(context, lock, with_sqsh=False)

    def found(*readable):
        return build_image(inputs_of(lock, with_sqsh=False, packing=Packing(readable=readable)), context).path

    assert found() == found("gzip", "zstd") == both
    assert found("gzip") == alone


def test_image_without_sqsh_serves_on_a_machine_without_mksquashfs(lock, context, monkeypatch):
    put_base(context, base_record())
    path = put_image(context, lock, with_sqsh=False)

    def missing() -> str:
        raise MachineError("the program mksquashfs is not installed")

    monkeypatch.setattr(pack, "mksquashfs_version", missing)
    assert build_image(inputs_of(lock, with_sqsh=False), context).path == path
    with pytest.raises(MachineError, match="mksquashfs"):
        build_image(inputs_of(lock), context)


def test_missing_tool_is_named_before_work_starts(lock, context, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    assert "apt-get install mmdebstrap" in error_of(MachineError, build_image, inputs_of(lock), context).fix
    assert not (context.store.root / "staging").exists()


class WorkBeganError(Exception):
    """The environment is being made."""


@pytest.mark.parametrize("config", [BaseConfig(workdir='/a"$(id)"'), BaseConfig(volumes=("/a b",))])
def test_base_that_no_sqsh_can_have_is_refused_before_the_environment_is_made(lock, context, monkeypatch, config):
    def began(*_):
        raise WorkBeganError

    put_base(context, base_record(config))
    monkeypatch.setattr(build, "check_tools", lambda *_, **__: None)
    monkeypatch.setattr(build, "find_mksquashfs", lambda: None)
    monkeypatch.setattr(build, "make_environment", began)
    with pytest.raises(CheckRefusedError, match=r"cannot go into a \.sqsh"):
        build_image(inputs_of(lock), context)
    with pytest.raises(WorkBeganError):
        build_image(inputs_of(lock, with_sqsh=False), context)


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("lock", "envbuild lock --stack mcore"),
        ("lockfiles/mine/debian12", "envbuild lock --stack mcore --base debian12 --name mine"),
    ],
)
def test_lock_for_another_definition_of_the_base_is_refused_with_the_command_that_renews_it(lock, path, command):
    other = lock.lock.base.model_copy(update={"definition_digest": "sha256:older"})
    stale = LockDirectory(lock.path.parent / path, changed(lock, base=other).lock)
    assert command in error_of(ConfigurationError, check_inputs, inputs_of(stale)).fix


@pytest.mark.parametrize(
    ("base", "target", "wheels", "noted"),
    [
        ("debian12-cu130", "h200", {}, True),
        ("debian12-cu130", "h200", {"transformer-engine-torch": None}, False),
        ("debian12", "cpu", {}, False),
    ],
)
def test_packages_without_a_wheel_are_noted_before_any_work(base, target, wheels, noted):
    lock = read_lock(data_root() / "lockfiles" / "mcore" / base)
    selection = Selection(Catalog.open(data_root()), "mcore", base, target)
    note = build.missing_wheels(ImageInputs(selection=selection, lock=lock, wheels=wheels))
    command = "envbuild wheels --stack mcore --base debian12-cu130 --target h200"
    assert note.endswith(command) if noted else not note
