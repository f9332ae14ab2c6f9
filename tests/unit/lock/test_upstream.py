"""Upstream's own pins, from trees shaped like NeMo's and Megatron-Bridge's."""

import json
from pathlib import Path

import pytest
from helpers.fake_git import FakeRepository, fake_tree

from envbuild.catalog.catalog import Catalog
from envbuild.core.errors import ConfigurationError
from envbuild.lock.components.models import Companion
from envbuild.lock.components.upstream import LLM_COLLECTION, OVERRIDES, companions

BASE = Catalog.open(Path("/nonexistent")).base("debian12")
SHA = "3cdfd613e68e0000000000000000000000000000"


def pins_of(files=None, **more):
    return companions(fake_tree(FakeRepository("https://x/r", files or {}, **more)), BASE)


def manifest(**entries):
    return json.dumps({"ngc-pytorch": "x", "vcs-dependencies": entries, "pypi-dependencies": {}})


def overrides(*lines):
    return f"[tool.uv]\noverride-dependencies = {json.dumps(lines)}\n"


def test_a_tree_without_pins_has_none():
    assert pins_of() == {}
    assert pins_of({"pyproject.toml": "[project]\nname = 'x'\n"}) == {}


def test_manifest_of_nemo():
    entries = {
        "megatron-lm": {"repo": "https://x/m", "ref": SHA},
        "transformer_engine": {"repo": "https://x/te", "ref": "v2.2"},
        "apex": {"repo": "https://x/apex"},
        "trt-llm": {"repo": "https://x/trt", "ref": SHA},
    }
    where = "requirements/manifest.json"
    assert pins_of({where: manifest(**entries)}) == {
        "megatron-core": Companion(package="megatron-core", where=where, git="https://x/m", ref=SHA),
        # Which no stack knows.
        "trt-llm": Companion(package="trt-llm", where=where, git="https://x/trt", ref=SHA),
        # One repository, two packages.
        **{
            name: Companion(package=name, where=where, git="https://x/te", ref="v2.2")
            for name in ("transformer-engine", "transformer-engine-torch")
        },
    }


def test_sources_of_megatron():
    text = f'''[tool.uv.sources]
Transformer_Engine = {{ git = "https://x/te.git", rev = "{SHA}" }}
tagged = [{{ git = "https://x/t", tag = "v1", marker = "sys_platform == 'linux'" }}]
moving = {{ git = "https://x/m", branch = "main" }}
elsewhere = {{ git = "https://x/e", rev = "v1", marker = "sys_platform == 'win32'" }}
megatron-core = {{ path = "3rdparty/Megatron-LM" }}
'''
    pins = pins_of({"pyproject.toml": text})
    assert {name: (pin.git, pin.ref, pin.where) for name, pin in pins.items()} == {
        "transformer-engine": ("https://x/te.git", SHA, "pyproject.toml [tool.uv.sources]"),
        "transformer-engine-torch": ("https://x/te.git", SHA, "pyproject.toml [tool.uv.sources]"),
        "tagged": ("https://x/t", "v1", "pyproject.toml [tool.uv.sources]"),
    }


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"vcs-dependencies": []}', manifest(**{"megatron-lm": {"repo": "x"}})]
)
def test_manifest_of_another_form_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"requirements/manifest\.json of https://x/r at aaaaaaaaaaaa"):
        pins_of({"requirements/manifest.json": text})


def test_submodule_of_bridge_wins_over_its_overrides():
    place = "3rdparty/Megatron-LM"
    pins = pins_of(
        {"pyproject.toml": overrides("megatron-core==0.1")},
        submodules={place: SHA},
        submodule_urls={place: "https://x/m.git"},
    )
    assert pins == {
        "megatron-core": Companion(package="megatron-core", where=f"submodule {place}", git="https://x/m.git", ref=SHA)
    }


@pytest.mark.parametrize(
    ("line", "git", "ref"),
    [
        ("te @ git+https://x/te.git@v2.2", "https://x/te.git", "v2.2"),
        ("te @ git+https://x/te@release/2.2#subdirectory=a", "https://x/te", "release/2.2"),
        ("te @ git+ssh://git@github.com/a/te@v2", "ssh://git@github.com/a/te", "v2"),
        ("te @ git+https://user@x/te@v2", "https://user@x/te", "v2"),
    ],
)
def test_overrides_from_git(line, git, ref):
    (pin,) = pins_of({"pyproject.toml": overrides(line)}).values()
    assert (pin.package, pin.git, pin.ref, pin.specifier) == ("te", git, ref, "")


@pytest.mark.parametrize(
    "line", ["te @ git+https://x/te", "te @ git+ssh://git@github.com/a/te", "te @ https://x/a.whl"]
)
def test_overrides_that_pin_nothing_are_left_out(line):
    assert pins_of({"pyproject.toml": overrides(line)}) == {}


def test_an_overridden_package_with_a_source_is_taken_from_there():
    sources = '[tool.uv.sources]\ntransformer_engine = { git = "https://x/te", rev = "r" }\n'
    sources += 'foo = { git = "https://x/foo", rev = "r", marker = "python_version > \'3\'" }\n'
    pins = pins_of({"pyproject.toml": overrides("transformer-engine[pytorch]>=2.9,<2.10", "foo==1") + sources})
    for name in ("transformer-engine", "transformer-engine-torch"):
        assert (pins[name].git, pins[name].ref, pins[name].where) == ("https://x/te", "r", OVERRIDES)
    assert pins["foo"].specifier == "==1"


def test_overrides_of_versions():
    pins = pins_of({"pyproject.toml": overrides("Foo_Bar[x]>=1,<2", "torch>=2; sys_platform == 'never'", "any")})
    assert list(pins) == ["foo-bar"]
    assert pins["foo-bar"].specifier in {">=1,<2", "<2,>=1"}


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "tool = 1\n",
        "[tool]\nuv = 1\n",
        "[[tool.uv.sources]]\na = 1\n",
        "[tool.uv]\noverride-dependencies = ['>>']\n",
        "[tool.uv]\noverride-dependencies = [1]\n",
        "[tool.uv]\nsources = 1\n",
        "[tool.uv.sources]\nte = 1\n",
        "[tool.uv.sources]\nte = { git = 'https://x/te', rev = 'v1', marker = 'so?' }\n",
    ],
)
def test_pyproject_of_another_form_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml of https://x/r"):
        pins_of({"pyproject.toml": text})


def test_llm_collection():
    for files, has in (({"nemo/collections/llm/__init__.py": ""}, True), ({"nemo/collections/asr/a.py": ""}, False)):
        assert fake_tree(FakeRepository("https://x/r", files)).has_folder(LLM_COLLECTION) is has
