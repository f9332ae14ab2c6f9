"""What ships under envs/, and what the docs show, is what the models and the JSON schemas allow."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jsonschema
import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from envbuild.catalog import knowledge, toml
from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import SPECIFIER_PATTERN
from envbuild.catalog.models import EXTENDABLE, KINDS
from envbuild.cli.schema import ALL, schema_of
from envbuild.core import tomlread

ROOT = data_root()
FILES = sorted(path for path in (ROOT / "envs").rglob("*.toml") if path.parent.name != knowledge.FOLDER)
BLOCK = re.compile(r"^```toml\n# (?:envs/(\w+)/\S+|(config)|(trust))\.toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = [
    pytest.param(match[1] or (match[2] and "site") or match[3], match[4], id=f"{page.name}-{number}")
    for page in PAGES
    for number, match in enumerate(BLOCK.finditer(page.read_text()), 1)
]


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def validate(text: str, kind: str) -> None:
    # Through JSON, as an editor does.
    validator(kind).validate(json.loads(json.dumps(tomlread.loads(text))))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_file_loads_and_fits_its_schema(path: Path):
    kind = path.parent.name
    assert Catalog.shipped().any(kind, path.stem)
    validate(path.read_text(), kind)


def test_knowledge_is_complete_and_read():
    files = {path.stem for path in (ROOT / "envs" / knowledge.FOLDER).iterdir()}
    read = {"cuda": knowledge.cuda(), "packages": knowledge.packages(), "install-scripts": knowledge.install_scripts()}
    # Their own tests read them.
    assert files == {*read, "recipes", "fields"}
    cuda, scripts = read["cuda"], read["install-scripts"]
    assert set(cuda.dropped_by) <= set(cuda.first_cuda)
    assert set(cuda.jetson) <= set(cuda.first_cuda)
    assert set(scripts.repositories) <= set(scripts.variables.values())


def test_every_kind_has_a_shipped_definition():
    assert {path.parent.name for path in FILES} == set(KINDS)


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_example_in_the_docs_loads_and_fits_its_schema(kind, text, tmp_path):
    if kind in EXTENDABLE:  # it may extend a shipped one
        (tmp_path / "envs" / kind).mkdir(parents=True)
        (tmp_path / "envs" / kind / "example.toml").write_text(text)
        assert Catalog.open(tmp_path).any(kind, "example")
    else:
        assert toml.parse(text, ALL[kind], "example")
    validate(text, kind)


def test_docs_show_every_kind():
    """Also proves that the pattern above finds blocks at all."""
    assert {example.values[0] for example in EXAMPLES} == set(ALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_toml_blocks_in_the_docs_name_their_file(page):
    """A block without a name would be checked by nothing."""
    assert len(re.findall(r"^```toml", page.read_text(), re.MULTILINE)) == len(BLOCK.findall(page.read_text()))


def test_shipped_definitions_name_only_what_exists():
    catalog = Catalog.open(Path("/nonexistent"))
    # stack() looks for the names in it.
    assert all(catalog.stack(name).builds for name in catalog.names("stacks"))


@pytest.mark.parametrize("kind", list(ALL))
def test_schema_refuses_unknown_keys(kind):
    with pytest.raises(jsonschema.ValidationError):
        validate("no_such_key = 1", kind)


@pytest.mark.parametrize("text", ["bla", "1.0", "==", "=1.0", ">=1 <2", "==1;", ">= ,1", "==="])
def test_schema_refuses_what_is_no_specifier(text):
    stack = (ROOT / "envs/stacks/mcore.toml").read_text()
    with pytest.raises(jsonschema.ValidationError):
        validate(stack.replace('version = "==2.13.0"', f'version = "{text}"'), "stacks")
    for kind in ("companions", "conflicts"):
        assert SPECIFIER_PATTERN in {node.get("pattern") for node in nodes(schema_of(kind))}


@pytest.mark.parametrize(
    "text",
    ["", " ,", "1.0", "==1.0+cu130.x-y", " >= 1!2.0.post1, <3.dev0", "~=2.1rc1,!=2.1.*", "===any-thing.at+all", "==v1"],
)
def test_schema_allows_what_packaging_does(text):
    try:
        SpecifierSet(text)
        allowed = True
    except InvalidSpecifier:
        allowed = False
    assert bool(re.search(SPECIFIER_PATTERN, text)) is allowed


def nodes(schema: object) -> Iterator[dict]:
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from nodes(value)
