"""Extras that older trees and releases have under another name, or not at all."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.fake_git import FakeRepositories, FakeRepository, fake_tree
from helpers.locks import lock_context

from envbuild.lock.components.declarations import Declarations, Declared

URL = "https://x/toolkit"
COMPUTED = "from setuptools import setup\nextras = {'nlp': read()}\n%s\nsetup(extras_require=extras)\n"
STATED = "[project]\nname = 'toolkit'\nversion = '1'\n[project.optional-dependencies]\n%s = ['a']\n"


def extras_of(files, released=None):
    repositories = FakeRepositories(FakeRepository(URL, files))
    component = fake_tree(repositories.open(URL), extras=["llm", "audio"], former_extras={"llm": "nlp"}).component
    declarations = Declarations(SimpleNamespace(context=lock_context(Path("/nonexistent"), repositories)))
    if released is not None:
        component = replace(component, commit=None, git="", specifier="==1")
        declarations._declared["kernels", "==1"] = Declared(by="kernels", lines=(), extras=released)
    changed = declarations.with_former_extras({"kernels": component})["kernels"]
    assert (changed is component) == (changed.spec.extras == ("llm", "audio"))
    assert ("extra nlp, which llm was before" in changed.because) == (changed is not component)
    return changed.spec.extras


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
    assert extras_of({}, released) == (first, "audio")
