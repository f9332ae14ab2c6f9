"""Which decorators keep a signature, and which __new__ leaves the constructor to __init__."""

from __future__ import annotations

import textwrap

import pytest
from unit.drift.test_drift import drift

from envbuild.drift.decorators import HARMLESS


def is_known(module: str, call: str = "f(x=1)") -> bool:
    """Whether the wrong call of the module's f is found."""
    files = {"lib/core/ops.py": textwrap.dedent(module)}
    return drift(f"from lib.core.ops import *\n{call}", files) != []


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_decorators_known_by_name(name: str):
    module, _, last = name.rpartition(".")
    assert is_known(f"import {module}\n@{name}\ndef f(): ...")
    assert is_known(f"from {module} import {last} as d\n@d()\ndef f(): ...")
    assert not is_known(f"import elsewhere\n@elsewhere.{last}\ndef f(): ...")


WRAPPERS = {
    "def w(*args, **kwargs):\n    return g(*args, **kwargs)": True,
    "async def w(*a, **k):\n    before()\n    return await g(*a, **k)": True,
    "def w(*args, **kwargs):\n    if x:\n        return g(*args, **kwargs)\n    return g(*args, **kwargs)": True,
    "def w(a, *args, **kwargs):\n    return g(*args, **kwargs)": False,
    "def w(a, /, *args, **kwargs):\n    return g(*args, **kwargs)": False,
    "def w(*args, a=1, **kwargs):\n    return g(*args, **kwargs)": False,
    "def w(*args):\n    return g(*args)": False,
    "def w(**kwargs):\n    return g(**kwargs)": False,
    "def w(*args, **kwargs):\n    return g(1, *args, **kwargs)": False,
    "def w(*args, **kwargs):\n    return g(*args, a=1, **kwargs)": False,
    "def w(*args, **kwargs):\n    return g(*other, **kwargs)": False,
    "def w(*args, **kwargs):\n    args, kwargs\n    return g(*other, **kwargs)": False,
    "def w(*args, **kwargs):\n    args, kwargs\n    return g(*args, **other)": False,
    "def w(*args, **kwargs):\n    kwargs.clear()\n    return g(*args, **kwargs)": False,
    "def w(*args, **kwargs):\n    return h(*args, **kwargs)": False,
    "def w(*args, **kwargs):\n    return 1": False,
    "def w(*args, **kwargs):\n    ...": False,
    "w = other(g)": False,
    "w = g": False,
}


@pytest.mark.parametrize(("wrapper", "known"), WRAPPERS.items())
def test_decorators_that_wrap(wrapper: str, known: bool):
    decorator = "def d(g):\n" + textwrap.indent(wrapper, "    ") + "\n    return w\n"
    assert is_known(f"{decorator}@d\ndef f(): ...") is known
    factory = "def factory(option=1):\n" + textwrap.indent(decorator, "    ") + "    return d\n"
    assert is_known(f"{factory}@factory()\ndef f(): ...") is known
    assert not is_known(f"{factory}@factory\ndef f(): ...")
    assert not is_known(f"{decorator}@d()\ndef f(): ...")


@pytest.mark.parametrize(
    ("decorator", "known"),
    [
        ("def d(g):\n    return g", True),
        ("def d(g):\n    if x:\n        return other\n    return g", False),
        ("def d(g):\n    try:\n        return other\n    except E:\n        pass\n    return g", False),
        ("def d(g):\n    match x:\n        case 1:\n            return other\n    return g", False),
        ("def d(g):\n    return other", False),
        ("def d(g):\n    return other(g)", False),
        ("def d(g):\n    def inner():\n        return other\n    return g", True),
        ("def d():\n    return g", False),
        ("def d(g):\n    register(g)", False),
    ],
)
def test_decorators_that_return_what_they_get(decorator: str, known: bool):
    assert is_known(f"{decorator}\n@d\ndef f(): ...") is known


def test_a_factory_that_may_return_something_else():
    inner = "    def d(g):\n        return g\n    def e(g): ...\n"
    factory = f"def factory():\n{inner}    if x:\n        return e\n    return d\n"
    assert not is_known(f"{factory}@factory()\ndef f(): ...")
    assert not is_known(f"{factory.replace('return e', 'return 1')}@factory()\ndef f(): ...")


@pytest.mark.parametrize(
    ("new", "known"),
    [
        ("def __new__(cls, *a, **k):\n    return super().__new__(cls)", True),
        ("def __new__(cls, *a, **k):\n    made = object.__new__(cls)\n    return made", True),
        ("def __new__(cls, *a, **k):\n    if x:\n        return object.__new__(cls)\n    return other", False),
        ("def __new__(cls, *a, **k):\n    return object.__new__(other)", False),
        ("def __new__(cls, *a, **k):\n    return object.make(cls)", False),
        ("def __new__(cls, *a, **k):\n    return object.__new__()", False),
        ("def __new__(cls, *a, **k):\n    return object.__new__(type(cls))", False),
        ("def __new__(cls, *a, **k):\n    return make(cls)", False),
        ("def __new__(cls, *a, **k):\n    made = make(cls)\n    return made", False),
        ("def __new__(cls, *a, **k):\n    made = object.__new__(cls)\n    return other", False),
        ("def __new__(cls, *a, **k):\n    self.made = object.__new__(cls)\n    return made", False),
        ("def __new__(cls, *a, **k): ...", False),
        ("def __new__(cls, x):\n    return object.__new__(cls)", False),
        ("def __new__(cls, x, *a, **k):\n    return object.__new__(cls)", False),
        ("def __new__(cls, *a):\n    return object.__new__(cls)", False),
        ("def __new__(cls, **k):\n    return object.__new__(cls)", False),
    ],
)
def test_new(new: str, known: bool):
    module = "class A:\n    def __init__(self): ...\n" + textwrap.indent(new, "    ")
    assert is_known(module, "A(x=1)") is known
