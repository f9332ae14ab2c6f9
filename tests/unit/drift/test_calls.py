"""Calls that a signature of the provider refuses."""

from __future__ import annotations

import pytest
from unit.drift.test_drift import calls, drift, kinds

OPS = "lib/core/ops.py"
F = {OPS: "def f(a, b=1, *, c=2, d): ..."}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("f(1, d=1)", []),
        ("f(1, 2, c=3, d=4)", []),
        ("f(b=1, a=2, d=3)", []),
        ("f(1, d=1, e=2)", ["unexpected-keyword"]),
        ("f(1, 2, 3, d=1)", ["too-many-arguments"]),
        ("f(1, a=1, d=1)", ["too-many-arguments"]),
        ("f(d=1)", ["missing-argument"]),
        ("f(1)", ["missing-argument"]),
        ("f(**kw)", []),
        ("f(*args)", []),
        ("f(e=1, **kw)", ["unexpected-keyword"]),
        ("f(1, 2, 3, *args)", ["too-many-arguments"]),
    ],
)
def test_arguments(call: str, expected: list[str]):
    assert calls(call, F[OPS]) == expected


@pytest.mark.parametrize(
    ("signature", "call", "expected"),
    [
        ("**kw", "f(e=1)", []),
        ("*args", "f(1, 2, 3)", []),
        ("a, /", "f(a=1)", ["unexpected-keyword", "missing-argument"]),
        ("a, /, **kw", "f(1, a=1)", []),
        ("a, b, *args", "f(1)", ["missing-argument"]),
    ],
)
def test_signatures(signature: str, call: str, expected: list[str]):
    assert sorted(calls(call, f"def f({signature}): ...")) == sorted(expected)


def test_the_finding_names_the_definition_and_every_keyword():
    files = {"lib/core/__init__.py": "from .ops import f", OPS: "def f(a): ..."}
    (finding,) = drift("from lib.core import f as g\n\ndef go():\n    g(1, x=1, y=2)\ngo()", files)
    assert finding.name == "lib.core.ops.f"
    assert finding.detail == "lib.core.ops.f takes no keyword 'x', 'y'"
    assert (finding.line, finding.within, finding.why) == (4, "go", "runs when go is called")


@pytest.mark.parametrize(
    "code",
    [
        "import lib.core.ops\nlib.core.ops.f(x=1)",
        "import lib.core as core\ncore.ops.f(x=1)",
        "from lib import core\ncore.ops.f(x=1)",
        "from lib.core.ops import f as g\ng(x=1)",
        "from lib.core.ops import f\nh = f\nh(x=1)",
        "from lib.core.ops import f\nh = f if a else None\nh(x=1)",
        "from lib.core.ops import *\nf(x=1)",
        "from lib.core.again import f\nf(x=1)",
        "def go():\n    from lib.core.ops import f\n    f(x=1)\ngo()",
        "from lib.core.ops import f\nclass A:\n    y = f(x=1)",
        "from lib.core.ops import f\ng = lambda f2: f(x=1)",
        "from lib.core.ops import f\n[f(x=y) for y in ()]",
        "from lib.core.ops import f\nprint(f'{f(x=1)}')",
        "from lib.core.ops import f\n@f(x=1)\ndef g(): ...",
        "from lib.core.ops import f\nasync def g():\n    async with f(x=1): ...\ng()",
        "from lib.core.ops import f\nwhile f(x=1): ...",
        "from lib.core.ops import f\nmatch a:\n    case 1:\n        f(x=1)",
        "from lib.core.ops import f\ndef g(a=f(x=1)): ...",
        "from lib.core.ops import f\ndef g(*, a, b=f(x=1)): ...",
        "from lib.core.ops import f\nclass A(f(x=1)): ...",
        "from lib.core.ops import f\nclass A(b=f(x=1)): ...",
        "from lib.core.ops import f\nf: object\nf(x=1)",
        "from lib.core.ops import f\na.b: int = 1\nf(x=1)",
        "from lib.core.ops import f\nmatch a:\n    case _:\n        f(x=1)",
        "from lib.core.ops import f\nmatch a:\n    case {'k': 1}:\n        f(x=1)",
        "from lib.core.ops import f\nmatch f(x=1):\n    case 1: ...",
    ],
)
def test_the_function_is_found_everywhere(code: str):
    findings = drift(code, {OPS: "def f(): ...", "lib/core/again.py": "from .ops import f"})
    assert kinds(findings) == [("unexpected-keyword", "breaks")]


@pytest.mark.parametrize(
    "code",
    [
        "def go(f):\n    f(x=1)",
        "def go(*f, **g):\n    f(x=1), g(x=1)",
        "def go():\n    f = other()\n    f(x=1)",
        "f = wrapped(f)\nf(x=1)",
        "def f(x): ...\nf(x=1)",
        "class f:\n    def __init__(self, x): ...\nf(x=1)",
        "[f(x=1) for f in ()]",
        "{f(x=1): 1 for f in ()}",
        "g = lambda f: f(x=1)",
        "for f in ():\n    f(x=1)",
        "with a as f:\n    f(x=1)",
        "f: int = other()\nf(x=1)",
        "if (g := (f := other())):\n    f(x=1)",
        "g: int = (f := other())\nf(x=1)",
        "g = (f := other())\nf(x=1)",
        "try: ...\nexcept ValueError as f:\n    f(x=1)",
        "if (f := other()):\n    f(x=1)",
        "def go():\n    print(f := other())\n    f(x=1)",
        "def go():\n    while (f := other()):\n        f(x=1)",
        "def go():\n    return (f := other())(x=1), f(x=1)",
        "match a:\n    case {'k': f}:\n        f(x=1)",
        "match a:\n    case {**f}:\n        f(x=1)",
        "match a:\n    case [*f]:\n        f(x=1)",
        "def set_up():\n    global f\n    f = other()\nf(x=1)",
        "def outer():\n    f = other()\n    def inner():\n        nonlocal f\n        f(x=1)",
        "del f\nf(x=1)",
        "f += 1\nf(x=1)",
        "use(f, x=1)",
        "from elsewhere import f\nf(x=1)",
        "f.attribute(x=1)",
        "f()(x=1)",
        "g = f if a else other()\ng(x=1)",
        "n = None\nn(f, x=1)",
    ],
)
def test_reassigned_name_is_unknown(code: str):
    assert drift(f"from lib.core.ops import f\n{code}", {OPS: "def f(): ..."}) == []


def test_class_scopes_are_invisible_from_their_methods():
    code = "from lib.core.ops import f\nclass A:\n    f = other\n    def go(self):\n        f(x=1)\nA().go()"
    assert kinds(drift(code, {OPS: "def f(): ..."})) == [("unexpected-keyword", "breaks")]


@pytest.mark.parametrize(
    "module",
    [
        "if a:\n    def f(): ...\nelse:\n    def f(x): ...",
        "try:\n    from elsewhere import f\nexcept ImportError:\n    def f(): ...",
        "def f(): ...\nf = wrap(f)",
        "f = make()",
        "from elsewhere import f",
        "from .inner import f",
        "def f(): ...\nf.attribute = 1\nfrom elsewhere import *\nfrom .inner import f",
    ],
)
def test_one_possible_definition_that_fits_is_enough(module: str):
    assert drift("from lib.core.ops import f\nf(x=1)", {OPS: module, "lib/core/inner.py": "def f(x): ..."}) == []


@pytest.mark.parametrize(
    "module",
    [
        "if a:\n    def f(): ...\nelse:\n    def f(y=1): ...",
        # None as a stand-in is not called.
        "try:\n    from .inner import f\nexcept ImportError:\n    f = None",
        "f = None\nif a:\n    from .inner import f",
        "import torch\njit = torch.compile\n@jit\ndef f(): ...",
    ],
)
def test_definitions_that_all_refuse(module: str):
    files = {OPS: module, "lib/core/inner.py": "def f(): ..."}
    assert kinds(drift("from lib.core.ops import f\nf(x=1)", files)) == [("unexpected-keyword", "breaks")]


def test_imports_in_a_circle_end():
    files = {OPS: "from .other import f\ndef g(): ...", "lib/core/other.py": "from .ops import f, g"}
    assert kinds(drift("from lib.core.other import f, g\nf(x=1)\ng(x=1)", files)) == [("unexpected-keyword", "breaks")]


@pytest.mark.parametrize("decorator", ["from elsewhere import d", "d = None", "d = make()", "from lib.core import d"])
def test_unknown_decorators(decorator: str):
    assert calls("f(x=1)", f"{decorator}\n@d\ndef f(): ...") == []


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("partial(f, x=1)", ["unexpected-keyword"]),
        ("partial(f)", []),
        ("partial(f, 1, 2, 3)", ["too-many-arguments"]),
        ("g = partial(f, b=1)\ng(1, x=1)", ["unexpected-keyword"]),
        ("g = partial(f, b=1)\ng(1, b=2)", []),
        ("g = partial(f, 1)\ng(1, 2)", ["too-many-arguments"]),
        ("g = partial(f, b=1)\ng()", ["missing-argument"]),
        ("g = partial(f, **kw)\ng()", []),
        ("g = partial(f)\ng(**kw)", []),
        ("g = partial(f, x=1)\ng(1, x=1)", ["unexpected-keyword", "unexpected-keyword"]),
        ("partial(**kw)", []),
    ],
)
def test_partials(call: str, expected: list[str]):
    assert calls(f"from functools import partial\n{call}", "def f(a, b=1): ...") == expected


def test_a_keyword_given_twice_is_named_once():
    code = "from functools import partial\nfrom lib.core.ops import f\ng = partial(f, x=1)\ng(x=2)"
    assert {finding.detail for finding in drift(code, {OPS: "def f(): ..."})} == {"lib.core.ops.f takes no keyword 'x'"}


def test_configurations_of_calls_are_partials():
    assert calls(
        "import nemo_run as run\nrun.Partial(f, x=1)\nrun.Config(f)\nother.Config(f, x=1)", "def f(a): ..."
    ) == ["unexpected-keyword"]


@pytest.mark.parametrize(
    "patch",
    [
        "import lib.core.ops as o\no.f = other",
        "from lib.core import ops\ndef patch():\n    ops.f = other",
        "def patch():\n    import lib.core.ops as o\n    o.f = other",
        "from lib.core import ops\nsetattr(ops, 'f', other)",
        "from lib.core import ops\nfor name in names:\n    setattr(ops, name, other)",
        "import lib.core.ops\nlib.core.ops.f, b = other",
        "import lib.core.ops\nlib.core.ops.f += 1",
    ],
)
def test_functions_that_the_consumer_patches_are_unknown(patch: str):
    consumer = {"app/patch.py": patch, "app/main.py": "from lib.core.ops import f\nf(x=1)"}
    assert drift(consumer, {OPS: "def f(): ..."}) == []


@pytest.mark.parametrize(
    "patch",
    [
        "from lib.core import ops\nops.f.attribute = other",
        "from lib.core import ops\nsetattr(ops, 'g', other)",
        "from lib.core import ops\nops.table[0] = other",
        "from lib.core import ops\nother(ops.f)",
    ],
)
def test_other_assignments_patch_nothing(patch: str):
    consumer = {"app/patch.py": patch, "app/main.py": "from lib.core.ops import f\nf(x=1)"}
    findings = drift(consumer, {OPS: "def f(): ...\ntable = []"})
    assert [finding.kind.value for finding in findings] == ["unexpected-keyword"]
