"""What metadata says of other packages, by extra; and which inputs a declared range is."""

import io
import zipfile

import pytest

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.stack import Stack
from envbuild.core.errors import CheckRefusedError
from envbuild.lock.components.declarations import Declared
from envbuild.lock.components.downloads import metadata_in
from envbuild.lock.inputs.request import may_hold

LINES = (
    "torch>=2.6.0",
    "Transformer_Engine[core_cu13,pytorch]<2.12.0,>=2.9.0a0 ; extra == 'dev'",
    "transformer-engine<2 ; extra == 'l_t.s' and python_version < '3.14'",
    "transformer-engine<1 ; extra == 'dev' and python_version < '3'",
    "no requirement at all ;;",
)
MEGATRON = Declared(by="megatron-core 0.16.1", lines=LINES, extras=("mlm", "dev", "l_t.s"))


@pytest.fixture(scope="module")
def base():
    return Catalog.open(data_root()).base("debian12-cu130")


def ranges(declared, name, base, **more):
    return [(part.extra, str(part.specifier), sorted(part.asks)) for part in declared.ranges(name, base, **more)]


def test_each_extra_has_its_range_under_the_markers_of_the_base(base):
    actual = ranges(MEGATRON, "transformer-engine", base)
    assert actual == [("dev", "<2.12.0,>=2.9.0a0", ["core-cu13", "pytorch"]), ("l-t-s", "<2", [])]
    assert MEGATRON.ranges("transformer-engine", base)[0].where == "megatron-core 0.16.1 (extra dev)"


def test_what_holds_for_all_is_without_extra(base):
    assert ranges(MEGATRON, "torch", base) == [("", ">=2.6.0", [])]
    assert MEGATRON.ranges("torch", base)[0].where == "megatron-core 0.16.1"
    assert ranges(MEGATRON, "numpy", base) == []


def test_what_holds_for_all_holds_for_each_extra(base):
    lib = Declared(by="lib 1", lines=("dep>=1", "dep<3;extra=='a'", "dep[x]<2;extra=='b'"), extras=("a", "b"))
    assert ranges(lib, "dep", base) == [("a", "<3,>=1", []), ("b", "<2,>=1", ["x"])]


def test_extras_that_the_stack_asks_for_come_first_or_alone(base):
    actual = ranges(MEGATRON, "transformer-engine", base, first=("L_T_S",))
    assert [extra for extra, *_ in actual] == ["l-t-s", "dev"]
    assert ranges(MEGATRON, "transformer-engine", base, only={"l-t-s"}) == [("l-t-s", "<2", [])]
    assert ranges(MEGATRON, "torch", base, only={"dev"}) == []


def test_a_range_has_pre_releases(base):
    part = MEGATRON.ranges("transformer-engine", base)[0]
    assert [part.has(version) for version in ("2.9.0a0", "2.9.0", "2.11.1rc1", "2.12.0")] == [True, True, True, False]


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_file_that_is_not_a_wheel_is_refused(content):
    with pytest.raises(CheckRefusedError, match=r"the wheel of lib 1\.0 cannot be read"):
        metadata_in(io.BytesIO(content), "lib 1.0")


def test_a_wheel_without_metadata_is_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("lib/vendored/dep-1.0.dist-info/METADATA", "Name: dep")
    with pytest.raises(CheckRefusedError) as caught:
        metadata_in(buffer, "lib 1.0")
    assert "it has no METADATA" in caught.value.why


def stack(**components):
    fields = {"summary": "s", "driver": "mcore", "matrix": "m", "builds": [{"target": "cpu", "bases": ["b"]}]}
    return Stack.model_validate({**fields, "components": components})


@pytest.mark.parametrize(
    ("dep", "pins", "expected"),
    [
        ({"version": "==1"}, {}, False),
        ({"version": "==1"}, {"other": "1"}, False),
        ({"version": "==1"}, {"Lib": "1"}, True),
        ({"version": "==1"}, {"dep": "1"}, True),
        ({}, {}, True),
    ],
)
def test_what_declared_ranges_can_decide_is_an_input(dep, pins, expected):
    assert may_hold(stack(lib={"version": "==1", "uses": ["dep"]}, dep=dep, other={}), pins) is expected


def test_no_shipped_lock_is_decided_by_declared_ranges():
    catalog = Catalog.open(data_root())
    decided = {name for name in catalog.names("stacks") if may_hold(catalog.stack(name), {})}
    assert decided == {"nemo"}  # which ships none
