"""The key of an environment: its layers, the base under them, and what is checked of it."""

from dataclasses import replace

from helpers.image_inputs import changed, inputs_of, parts_of, small_lock

from envbuild.catalog.data import data_root
from envbuild.catalog.stack import Driver
from envbuild.image.layers import environment
from envbuild.image.layers.environment import environment_key
from envbuild.image.layers.groups import LayerPlan
from envbuild.oci.models import BaseConfig


def test_key_changes_with_layers_base_modules_variables_driver_and_what_checks_them(tmp_path, monkeypatch):
    lock = small_lock(tmp_path / "lock")
    base = parts_of(inputs_of(lock)).base
    inputs = inputs_of(lock).environment(base)
    plans = (LayerPlan(name="python", packages={}, key="sha256:1"), LayerPlan(name="fast", packages={}, key="sha256:2"))
    component = lock.lock.components["megatron-core"]
    modules = {**lock.lock.components, "megatron-core": component.model_copy(update={"modules": ("another",)})}
    other_base = parts_of(inputs_of(lock), BaseConfig(workdir="/srv")).base
    keys = [
        environment_key(inputs, plans),
        environment_key(inputs, plans[::-1]),
        environment_key(replace(inputs, base=other_base), plans),
        environment_key(replace(inputs, lock=changed(lock, components=modules)), plans),
        environment_key(replace(inputs, lock=changed(lock, environment={"A": "b"})), plans),
        environment_key(replace(inputs, lock=changed(lock, driver=Driver.BRIDGE)), plans),
    ]
    monkeypatch.setattr(environment, "smoke_bytes", lambda: b"another runner")
    keys.append(environment_key(inputs, plans))
    monkeypatch.setattr(environment, "stub_source", lambda name: data_root() / "containers/native/profile.sh")
    keys.append(environment_key(inputs, plans))
    monkeypatch.setattr(environment, "FORMAT", 10_001)
    keys.append(environment_key(inputs, plans))
    assert len(set(keys)) == len(keys)
