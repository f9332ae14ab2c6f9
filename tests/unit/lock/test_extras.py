"""Extras that older trees and releases have under another name, or not at all."""

from types import SimpleNamespace

import pytest
from helpers.fake_git import FakeRepositories, FakeRepository

from envbuild.catalog.stack import Component
from envbuild.git.refs import GitRef
from envbuild.lock.components.declarations import Declared, declared_at_commit
from envbuild.lock.components.extras import with_former_extras
from envbuild.lock.components.select import own_choice
from envbuild.lock.inputs.pins import parse_ref

URL = "https://x/toolkit"
COMPUTED = "from setuptools import setup\nextras = {'nlp': read()}\n%s\nsetup(extras_require=extras)\n"
STATED = "[project]\nname = 'toolkit'\nversion = '1'\n[project.optional-dependencies]\n%s = ['a']\n"


def extras_of(files, ref=None, released=()):
    repositories = FakeRepositories(FakeRepository(URL, files))
    spec = Component.model_validate({"git": URL, "extras": ["llm", "audio"], "former_extras": {"llm": "nlp"}})
    item = own_choice("toolkit", spec, ref or GitRef("main"), repositories, None)

    def declared(item):
        if item.commit is None:
            return Declared(by="toolkit", lines=(), extras=released)
        return declared_at_commit(item, repositories)

    declarations = SimpleNamespace(of=declared, context=SimpleNamespace(repositories=repositories))
    found = with_former_extras({"toolkit": item}, declarations)["toolkit"]
    assert (found is item) == (found.spec.extras == ("llm", "audio"))
    assert ("extra nlp, which llm was before" in found.because) == (found is not item)
    return found.spec.extras


@pytest.mark.parametrize(
    ("files", "first"),
    [
        ({"setup.py": COMPUTED % ""}, "nlp"),
        ({"setup.py": COMPUTED % "extras['llm'] = extras['nlp']"}, "llm"),
        ({"pyproject.toml": STATED % "nlp"}, "nlp"),
        ({"pyproject.toml": STATED % "llm"}, "llm"),
        # Nothing tells: what the stack says holds.
        ({"setup.py": "setup("}, "llm"),
        ({"pyproject.toml": "[project]\nname = 'x'\ndynamic = ['dependencies', 'optional-dependencies']\n"}, "llm"),
    ],
)
def test_the_former_name_where_a_tree_lacks_the_extra(files, first):
    assert extras_of(files) == (first, "audio")


@pytest.mark.parametrize(("released", "first"), [(("LLM", "nlp"), "llm"), (("nlp",), "nlp")])
def test_the_former_name_where_a_release_lacks_the_extra(released, first):
    assert extras_of({}, parse_ref("2.2.1"), released) == (first, "audio")
