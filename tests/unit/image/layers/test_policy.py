"""The policy that cuts environments into layers: by names and phases, every package into one."""

import pytest
from helpers.errors import error_of
from helpers.locks import make_lock

from envbuild.catalog import toml
from envbuild.catalog.data import data_root
from envbuild.catalog.stack import Phase
from envbuild.core.errors import ConfigurationError
from envbuild.image.layers.groups import LayerPolicy, group_packages, layer_policy
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory, read_lock

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
