"""Components that a stack has on bases for one device only."""

import pytest
from helpers.stack_files import BASE, GPU_BASE, write_base, write_stack, write_target

from envbuild.catalog.catalog import Catalog, Selection, definition_digest
from envbuild.catalog.fields import Device
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.lock.inputs.pins import parse_pins

LIB = {"version": "==1", "uses": ["kernels", "other"]}
COMPONENTS = {"lib": LIB, "other": {}, "kernels": {"device": "cuda", "phase": "compile"}, "slow": {"device": "cpu"}}
ON_CPU = {"lib": {"version": "==1", "uses": ["other"]}, "other": {}, "slow": {"device": "cpu"}}


@pytest.fixture
def catalog(tmp_path) -> Catalog:
    write_base(tmp_path)
    write_base(tmp_path, GPU_BASE, cuda="13.0")
    write_target(tmp_path, "gpu", sm=("90",))
    both = [{"target": "cpu", "bases": [BASE]}, {"target": "gpu", "bases": [GPU_BASE]}]
    write_stack(tmp_path, "s", COMPONENTS, builds=both)
    write_stack(tmp_path, "on-cpu", ON_CPU, builds=both)
    return Catalog.open(tmp_path)


def on(catalog: Catalog, base: str, name: str = "s") -> Selection:
    return Selection(catalog, name, base, "cpu" if base == BASE else "gpu")


def test_what_is_for_another_device_is_no_part_of_the_stack(catalog):
    without, with_cuda = on(catalog, BASE).stack, on(catalog, GPU_BASE).stack
    assert list(without.components) == ["lib", "other", "slow"]
    assert list(with_cuda.components) == ["lib", "other", "kernels"]
    assert without.components["lib"].uses == ("other",)
    assert with_cuda.components["lib"].uses == ("kernels", "other")


def test_a_variable_for_gpus_is_set_on_bases_with_cuda_alone(tmp_path, catalog):
    both = [{"target": "cpu", "bases": [BASE]}, {"target": "gpu", "bases": [GPU_BASE]}]
    variables = {
        "HEADERS": {"value": "{site_packages}/include", "reason": "r", "device": "cuda"},
        "PLAIN": {"value": "1", "reason": "r"},
    }
    write_stack(tmp_path, "plain", COMPONENTS, builds=both, environment={"PLAIN": variables["PLAIN"]})
    write_stack(tmp_path, "more", COMPONENTS, builds=both, environment=variables)
    assert list(on(catalog, GPU_BASE, "more").stack.environment) == ["HEADERS", "PLAIN"]
    assert list(on(catalog, BASE, "more").stack.environment) == ["PLAIN"]
    assert definition_digest(on(catalog, BASE, "more").stack) == definition_digest(on(catalog, BASE, "plain").stack)


def test_a_variable_follows_the_bases_cuda(tmp_path, catalog):
    variable = {"value_for_cuda": {"12": "{site_packages}/old", "13": "{site_packages}/new"}, "reason": "r"}
    write_stack(tmp_path, "s", COMPONENTS, environment={"HEADERS": variable, "PLAIN": {"value": "1", "reason": "r"}})
    stack = catalog.stack("s")
    assert stack.variables_on("12") == {"HEADERS": "{site_packages}/old", "PLAIN": "1"}
    assert stack.variables_on("13") == {"HEADERS": "{site_packages}/new", "PLAIN": "1"}
    assert stack.variables_on(None) == stack.variables_on("14") == {"PLAIN": "1"}
    for wrong in ({"reason": "r"}, variable | {"value": "1"}):
        write_stack(tmp_path, "s", COMPONENTS, environment={"HEADERS": wrong})
        with pytest.raises(ConfigurationError) as caught:
            catalog.stack("s")
        assert "either value or value_for_cuda" in caught.value.why


@pytest.mark.parametrize("path", ["../x", "/x", "a//x", "a/./x", "a/../x", ".hidden", "a/"])
def test_a_file_of_a_stack_is_below_site_packages(tmp_path, catalog, path):
    entry = {"text": "x", "reason": "r"}
    write_stack(tmp_path, "s", COMPONENTS, files={"a.b/c_d/Makefile": entry})
    assert list(catalog.stack("s").files) == ["a.b/c_d/Makefile"]
    write_stack(tmp_path, "s", COMPONENTS, files={path: entry})
    with pytest.raises(ConfigurationError):
        catalog.stack("s")


def test_a_component_for_gpus_changes_nothing_on_bases_without(catalog):
    # So the lock there stays what its inputs give.
    assert definition_digest(on(catalog, BASE).stack) == definition_digest(on(catalog, BASE, "on-cpu").stack)
    assert definition_digest(on(catalog, GPU_BASE).stack) != definition_digest(on(catalog, GPU_BASE, "on-cpu").stack)


def test_takeover_has_its_components_by_device_too(tmp_path, catalog):
    takeover = {
        "without": "x",
        "driver": "bridge",
        "lead": "bridge",
        "reason": "r",
        "components": {"bridge": {"uses": ["fused"]}, "fused": {"device": "cuda"}},
    }
    write_stack(tmp_path, "s", {"lib": {"uses": ["fused"]}}, anchor="lib", takeover=takeover)
    whole = catalog.stack("s")
    cpu, cuda = whole.on(Device.CPU), whole.on(Device.CUDA)
    assert cpu.takeover is not None
    assert list(cpu.taken_over().components) == ["lib", "bridge"]
    assert (cpu.components["lib"].uses, cpu.takeover.components["bridge"].uses) == ((), ())
    assert cuda == whole


@pytest.mark.parametrize(
    ("components", "anchor", "expected"),
    [
        ({"lib": {"device": "cuda"}, "other": {}}, "lib", "components.lib.device: lib decides the companions"),
        ({"lib": {"device": "cuda"}, "other": {"device": "cpu"}}, None, "components: each has a device"),
        ({"lib": {"device": "gpu"}}, None, "components.lib.device: found 'gpu'; allowed: 'cpu' or 'cuda'"),
    ],
)
def test_a_stack_that_could_lack_what_it_needs_is_refused(tmp_path, components, anchor, expected):
    write_base(tmp_path)
    write_stack(tmp_path, "s", components, **({"anchor": anchor} if anchor else {}))
    with pytest.raises(ConfigurationError) as caught:
        Catalog.open(tmp_path).stack("s")
    assert expected in f"{caught.value.what}\n{caught.value.why}"


def test_a_pin_of_what_is_on_other_bases_only_is_explained(catalog):
    with pytest.raises(UsageError, match="stack s has kernels on bases with CUDA only") as caught:
        parse_pins("s", on(catalog, BASE).stack, {"Kernels": "1.0"}, catalog.stack("s"))
    assert 'device = "cuda"' in caught.value.why
    with pytest.raises(UsageError, match="stack s has slow on bases without CUDA only"):
        parse_pins("s", on(catalog, GPU_BASE).stack, {"slow": "1.0"}, catalog.stack("s"))
    with pytest.raises(UsageError, match="stack s has no component 'nothing' to pin"):
        parse_pins("s", on(catalog, BASE).stack, {"nothing": "1.0"}, catalog.stack("s"))


def test_stack_mcore_has_transformer_engine_where_there_is_cuda(tmp_path):
    catalog = Catalog.open(tmp_path)
    without = Selection(catalog, "mcore", "debian12", "cpu").stack
    with_cuda = Selection(catalog, "mcore", "debian12-cu130", "h200").stack
    assert list(without.components) == ["torch", "megatron-core"]
    assert [*with_cuda.components] == ["torch", "megatron-core", "transformer-engine", "transformer-engine-torch"]
    assert with_cuda.components["megatron-core"].uses == ("transformer-engine",)
