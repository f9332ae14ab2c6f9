"""Keys of layers: what decides their bytes, and nothing else of a lock."""

from pathlib import Path

import pytest
from helpers.errors import error_of
from helpers.locks import MAIN, make_lock

from envbuild.catalog import toml
from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.stack import Phase
from envbuild.core.errors import ConfigurationError
from envbuild.image.base import StoredBase
from envbuild.image.layers import groups
from envbuild.image.layers.groups import LayerPolicy, group_packages, layer_policy, plan_layers
from envbuild.image.record import BaseRecord
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory, read_lock
from envbuild.rootfs import gzip_writer
from envbuild.rootfs.layer import LayerRecord

BASE = Catalog.open(data_root()).base("debian12")
LAYER = LayerRecord(name="base", digest="d", diff_id="sha256:b", size_bytes=1, unpacked_bytes=1, entries=1)


def made(diff_id: str = "sha256:b", **packages: str) -> StoredBase:
    debs = {name.replace("_", "."): version for name, version in packages.items()}
    record = BaseRecord(
        schema="envbuild.base/2", layers=(LAYER.model_copy(update={"diff_id": diff_id}),), made_by="x", packages=debs
    )
    return StoredBase(path=Path("/b"), record=record)


HERE = made(python3_11="3.11.2-6", openssl="3.0")


@pytest.fixture(autouse=True)
def _uv(monkeypatch):
    monkeypatch.setattr(groups, "uv_version", lambda: "0.13.8")


@pytest.fixture
def lock(tmp_path):
    make_lock(tmp_path / "lock")
    return read_lock(tmp_path / "lock")


def keys(lock, base=BASE, base_made=HERE, **more):
    return {plan.name: plan.key for plan in plan_layers(lock, base, base_made, **more)}


def changed(one, other):
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def with_main(tmp_path, text, **changes):
    make_lock(tmp_path / "other", text, **changes)
    return read_lock(tmp_path / "other")


def test_layers_have_the_packages_of_their_layers(lock):
    found = {plan.name: dict(plan.packages) for plan in plan_layers(lock, BASE, HERE)}
    assert found == {
        "python": {},
        "cuda": {"torch": "2.13.0+cpu"},
        "fast": {"uvicorn": "0.30"},
        "components": {"megatron-core": "0.16.1"},
    }


@pytest.mark.parametrize(
    ("old", "new", "layers"),
    [
        ("megatron-core==0.16.1", "megatron-core==0.16.2", {"components"}),
        ("sha256:bb", "sha256:dd", {"components"}),
        ("sha256:cc", "sha256:dd", {"cuda"}),
        ("uvicorn[standard]==0.30", "uvicorn==0.31", {"fast"}),
        ("uvicorn[standard]==0.30", "uvicorn==0.30\nnumpy==2", {"slow"}),
        ("    # via megatron-core\n", "    # via another\n", set()),
    ],
)
def test_a_package_changes_its_own_layer_alone(lock, tmp_path, old, new, layers):
    assert changed(keys(lock), keys(with_main(tmp_path, MAIN.replace(old, new)))) == layers


def test_stack_commit_and_date_of_the_lock_change_no_layer(lock, tmp_path):
    other = with_main(tmp_path, MAIN, stack="another", source_date_epoch=1)
    assert keys(lock) == keys(other)


def test_tools_and_platform_change_every_layer(lock, monkeypatch):
    found = [keys(lock), keys(lock, base=BASE.model_copy(update={"glibc": "2.39"}))]
    monkeypatch.setattr(groups, "uv_version", lambda: "0.13.9")
    found.append(keys(lock))
    monkeypatch.setattr(gzip_writer, "ENCODER", "zlib 1.3.1 level 4")
    found.append(keys(lock))
    monkeypatch.setattr(groups, "FORMAT", 99)
    found.append(keys(lock))
    for name in found[0]:
        assert len({item[name] for item in found}) == len(found)


def test_what_is_built_with_the_layers_below_depends_on_them(lock, tmp_path):
    def from_git(directory, commit):
        item = directory.lock.components["megatron-core"].model_copy(update={"git": "https://x", "commit": commit})
        components = {**directory.lock.components, "megatron-core": item}
        return LockDirectory(directory.path, directory.lock.model_copy(update={"components": components}))

    one = from_git(lock, "abc")
    assert changed(keys(one), keys(from_git(lock, "def"))) == {"components"}
    below = from_git(with_main(tmp_path, MAIN.replace("0.30", "0.31")), "abc")
    assert changed(keys(one), keys(below)) == {"fast", "components"}


def test_a_wheel_of_the_wheelhouse_stands_for_its_package(lock):
    class Wheel:
        def __init__(self, digest):
            self.record = type("Record", (), {"digest": digest})()

    one, other = ({"megatron-core": Wheel(digest)} for digest in ("sha256:1", "sha256:2"))
    assert changed(keys(lock), keys(lock, wheels=one)) == {"components"}
    assert changed(keys(lock, wheels=one), keys(lock, wheels=other)) == {"components"}


ORDER = ["python", "cuda", "slow", "fast", "compiled", "components"]
LOCKS = sorted(path.parent for path in (data_root() / "lockfiles").glob("*/*/stack.lock.toml"))


@pytest.mark.parametrize(
    ("name", "phase", "component", "layer"),
    [
        ("torch", Phase.MAIN, True, "cuda"),
        ("nvidia-cudnn-cu13", Phase.MAIN, False, "cuda"),
        # Whichever phase needs it first.
        ("nvidia-cutlass-dsl", Phase.COMPILE, False, "cuda"),
        ("onnx", Phase.COMPILE, False, "slow"),
        ("onnx", Phase.MAIN, False, "slow"),
        ("numpy", Phase.MAIN, False, "slow"),
        ("numpy", Phase.MAIN, True, "components"),
        ("nemo-run", Phase.MAIN, True, "components"),
        ("transformer-engine-torch", Phase.COMPILE, True, "compiled"),
        ("transformer-engine-cu13", Phase.COMPILE, False, "compiled"),
        ("nvidia-modelopt", Phase.MAIN, False, "fast"),
        ("torchx", Phase.MAIN, False, "fast"),
    ],
)
def test_layer_of_a_package(name, phase, component, layer):
    assert layer_policy().layer_of(name, phase, component=component) == layer


def test_layers_lie_in_their_order():
    assert list(layer_policy().order) == ORDER


@pytest.mark.parametrize("path", LOCKS, ids=[f"{path.parent.name}-{path.name}" for path in LOCKS])
def test_every_package_of_the_shipped_locks_is_in_one_layer(path):
    lock = read_lock(path)
    found = group_packages(lock, layer_policy())
    packages = [name for names in found.values() for name in names]
    assert sorted(packages) == sorted(lock.packages())
    assert list(found) == [name for name in ORDER if name in found]
    assert "torch" in found["cuda"]
    assert "megatron-core" in found["components"]


def test_components_from_git_are_of_their_phase(tmp_path):
    lock = make_lock(tmp_path)
    (tmp_path / PHASE_FILES["git"]).write_text("own @ git+https://x/own@abc\nkernels @ git+https://x/k@def\n")
    phases = {**lock.phases, "git": lock.phases["git"].model_copy(update={"packages": 2})}
    locked = lock.components["megatron-core"].model_copy(update={"git": "https://x/own", "commit": "abc"})
    more = {"own": locked, "kernels": locked.model_copy(update={"phase": Phase.COMPILE})}
    changed = lock.model_copy(update={"phases": phases, "components": {**lock.components, **more}})
    found = group_packages(LockDirectory(tmp_path, changed), layer_policy())
    assert found["components"] == ["megatron-core", "own"]
    assert found["compiled"] == ["kernels"]


RULE = 'order = ["python", "a", "b"]\n[[rules]]\nlayer = "a"\nnames = ["x"]\n[[rules]]\nlayer = "b"\n'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('layer = "b"', 'layer = "c"', "rules name c; allowed: a, b"),
        ('layer = "b"', 'layer = "b"\nnames = ["y"]', "some packages would belong to no layer"),
        ('"a", "b"]', '"a", "a"]', "rules name b"),
        ('"a", "b"]', '"a", "b", "b"]', "order names a layer twice"),
        ("names", "name", "name"),
    ],
)
def test_invalid_policy_is_refused(old, new, message):
    assert toml.parse(RULE, LayerPolicy, "layers.toml").layer_of("y", Phase.MAIN, component=False) == "b"
    error = error_of(ConfigurationError, toml.parse, RULE.replace(old, new, 1), LayerPolicy, "layers.toml")
    assert message in f"{error.what} {error.why}"


def test_files_that_may_differ_are_those_that_no_program_needs():
    assert layer_policy().may_differ("tests/__init__.py")
    assert not layer_policy().may_differ("torch/testing/__init__.py")
    assert not layer_policy().may_differ("pynvml.py")
