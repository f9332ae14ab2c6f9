"""Which findings the code of a stack can run into."""

from __future__ import annotations

import pytest
from unit.drift.test_drift import drift, provider, tree

from envbuild.drift import Finding, Weight
from envbuild.drift.check import find_drift
from envbuild.drift.reach import Reach, StackPart

OPS = {"lib/core/ops.py": "def f(): ..."}
BAD = "from lib.core.ops import f\n\ndef used():\n    f(x=1)\n"


@pytest.mark.parametrize(
    ("consumer", "expected"),
    [
        ({"app/main.py": BAD + "def unused():\n    f(x=1)\nused()"}, {"used": True, "unused": False}),
        # Methods count by name, and special methods always.
        (
            {
                "app/main.py": "from lib.core.ops import f\n"
                "class A:\n    def __call__(self):\n        f(x=1)\n    def go(self):\n        f(x=1)\nA()"
            },
            {"A.__call__": True, "A.go": False},
        ),
        # A longer name is another name; a name anywhere is a use.
        ({"app/main.py": BAD + "used_up()\nmisused()"}, {"used": False}),
        ({"app/main.py": BAD + "def outer():\n    used()\nouter()"}, {"used": True}),
        ({"app/main.py": BAD, "app/other.py": "TARGET = 'app.main.used'"}, {"used": True}),
        ({"app/main.py": BAD, "app/other.py": "def go():\n    return f'{used()}'\ngo()"}, {"used": True}),
        ({"app/main.py": BAD, "app/other.py": "from app.main import (\n    a,\n    used,\n)"}, {"used": True}),
        # Code that is not reached reaches nothing: neither itself, nor others, nor what it imports.
        ({"app/main.py": BAD + "def other():\n    used()"}, {"used": False}),
        ({"app/main.py": BAD + "    used()"}, {"used": False}),
        ({"app/main.py": BAD + "def one():\n    two()\ndef two():\n    one(used())"}, {"used": False}),
        # Comments and texts for people are no use.
        ({"app/main.py": BAD + '# used()\n"""Call used(), if you like."""\nx = "not used here"'}, {"used": False}),
        # A framework calls what its subclasses have; a base that does nothing does not.
        (
            {"app/main.py": BAD.replace("def", "class A(lightning.Callback):\n  def") + "A()"},
            {"A.used": True},
        ),
        # Of torch's modules it is known what is called.
        ({"app/main.py": BAD.replace("def", "class A(torch.nn.Module):\n  def") + "A()"}, {"A.used": False}),
        (
            {"app/main.py": BAD.replace("def used", "class A(torch.nn.Module):\n  def forward") + "A()"},
            {"A.forward": True},
        ),
        ({"app/main.py": BAD.replace("def", "class A(Generic[T]):\n  def") + "A()"}, {"A.used": False}),
        (
            {
                "app/main.py": BAD.replace("def", "class A(Own):\n  def") + "A()",
                "app/own.py": "class Own(Trainer): ...\nclass Plain: ...",
            },
            {"A.used": True},
        ),
        (
            {"app/main.py": BAD.replace("def", "class A(Plain):\n  def") + "A()", "app/own.py": "class Plain: ..."},
            {"A.used": False},
        ),
        # A decorator may hand a function to others.
        ({"app/main.py": BAD.replace("def", "@registry.add(1)\ndef")}, {"used": True}),
        ({"app/main.py": BAD.replace("def", "@torch.no_grad()\ndef")}, {"used": False}),
        # The default of a parameter is made where the function is defined.
        ({"app/main.py": BAD + "def other(\n    a=used(),\n): ..."}, {"used": True}),
        # Lines inside brackets and behind a backslash belong to their statement, wherever they begin.
        ({"app/main.py": BAD + "def other():\n    x = (\n1,\n)\n    used()"}, {"used": False}),
        ({"app/main.py": BAD + "def other():\n    x = \\\n1\n    used()"}, {"used": False}),
        (
            {"app/main.py": BAD + "class A:\n    ...\nif a:\n    def other():\n        used()\n    other()"},
            {"used": True},
        ),
        # What stands before a form feed is no indentation, and a tab behind code neither.
        ({"app/main.py": BAD + "def unused(): ...\n \fdef other():\n    used()\nother()"}, {"used": True}),
        ({"app/main.py": BAD + "class A:\n    def go(self):\t# go\n        used()\nA()"}, {"used": False}),
        # Code at import is reached without a user, also of a module that nothing imports.
        ({"app/main.py": "from lib.core.ops import f\nf(x=1)\nif a:\n    f(y=1)"}, {"app/main.py": True}),
        ({"app/main.py": "from lib.core.ops import f\nclass Unnamed:\n    y = f(x=1)"}, {"Unnamed": True}),
        (
            {"app/main.py": "", "app/deep/__init__.py": "", "app/deep/bad.py": "import lib.core.gone"},
            {"app/deep/bad.py": True},
        ),
    ],
)
def test_functions_that_nothing_names_warn(consumer: dict[str, str], expected: dict[str, bool]):
    findings = drift(consumer, OPS)
    assert {finding.within or finding.file: finding.weight is Weight.REFUSES for finding in findings} == expected
    assert {finding.weight for finding in findings} <= {Weight.REFUSES, Weight.WARNS}
    assert all(bool(finding.unreached) is not (finding.weight is Weight.REFUSES) for finding in findings)


FAMILIES = {
    "app/__init__.py": "",
    "app/llm/__init__.py": "from app.llm.api import pretrain\nfrom . import recipes",
    "app/llm/api.py": "from lib.core.ops import f\ndef pretrain():\n    f(x=1)\ndef _hidden():\n    f(x=1)",
    "app/llm/recipes.py": "from lib.core.ops import f\ndef recipe():\n    f(x=1)",
    "app/vision/__init__.py": "import lib.core.gone",
}


def reached(files: dict[str, str], *modules: str) -> dict[str, bool]:
    app = tree("app", "1", {**FAMILIES, **files})
    findings = find_drift(app, provider(OPS), Reach([StackPart(app, modules)]))
    return {finding.within or finding.file: finding.weight is Weight.REFUSES for finding in findings}


def test_modules_that_the_stack_does_not_import_warn():
    llm = {"pretrain": True, "_hidden": False, "recipe": True}
    assert reached({}, "app", "app.llm") == {**llm, "app/vision/__init__.py": False}
    assert reached({}, "app.vision") == {**dict.fromkeys(llm, False), "app/vision/__init__.py": True}
    # Its outermost package alone says nothing of what is used.
    assert reached({}, "app")["app/vision/__init__.py"]


@pytest.mark.parametrize(
    "imports",
    [
        "import app.vision",
        "from app import vision",
        "from .. import vision",
        "from ..vision import gone",
        "try:\n    import app.vision\nexcept ImportError:\n    pass",
        "def used():\n    import app.vision\nused()",
        "load('app.vision')",
        "load(f'app.{name}')",
        "from importlib import import_module\nimport_module(name)",
    ],
)
def test_modules_are_followed_through_every_import_that_is_reached(imports: str):
    where = "app/extra.py" if "import_module" in imports else "app/llm/recipes.py"
    files = {"app/llm/api.py": "import app.extra", "app/extra.py": "", where: imports}
    assert reached(files, "app.llm")["app/vision/__init__.py"]


def test_module_that_only_unused_code_imports_is_not_reached():
    actual = reached({"app/llm/recipes.py": "", "app/llm/api.py": "def _unused():\n    import app.vision"}, "app.llm")
    assert actual == {"app/vision/__init__.py": False}


def findings_of_used(user: str) -> list[Finding]:
    app = tree("app", "1", {"app/__init__.py": "", "app/main.py": BAD, "app/other.py": BAD.replace("used", "rest")})
    users = tree("user", "1", {"user/__init__.py": user})
    return find_drift(app, provider(OPS), Reach([StackPart(app, ("app",), is_used=True), StackPart(users, ("user",))]))


def test_component_that_others_use_is_entered_through_them():
    used, rest = findings_of_used("from app.main import used")
    assert (used.weight, rest.weight) == (Weight.REFUSES, Weight.WARNS)
    assert rest.reason == "nothing that the stack imports leads to app.other"
    (named, _) = findings_of_used("import app.main")
    assert named.reason == "nothing that the stack reaches names used"


def test_features_that_are_off_and_files_that_cannot_be_read_warn():
    (lost,) = drift("try:\n    from lib.core import gone\n    HAVE = True\nexcept ImportError:\n    HAVE = False", {})
    assert (lost.weight, lost.reason) == (
        Weight.WARNS,
        "inside try/except ImportError, without: gone, HAVE",
    )
    (unread,) = drift("import lib.core\n(", {})
    assert unread.weight is Weight.WARNS
    (replaced,) = drift("try:\n    from lib.core import gone\nexcept ImportError:\n    from app import gone", {})
    assert replaced.weight is Weight.PASSES


LIBRARY = {
    "app/__init__.py": "",
    "app/train.py": "def forward_step(): ...",
    "app/models/__init__.py": "from app.models.gemma import Gemma\nfrom app.models.llama import Llama",
    "app/models/gemma/__init__.py": "from .spec import Gemma",
    "app/models/gemma/spec.py": "from lib.core.ops import f\nclass Gemma:\n    def __init__(self):\n        f(x=1)\n"
    "def forward_step(): ...",
    "app/models/gemma/other.py": "from app.models.gemma.spec import Gemma\nGemma()",
    "app/models/llama.py": "class Llama: ...\nLlama()",
    "app/recipes/gemma.py": "from app.models import Gemma\ndef recipe():\n    return Gemma()\nrecipe()",
}


@pytest.mark.parametrize(
    ("files", "modules", "refused"),
    [
        ({}, ("app",), False),
        # The stack names it.
        ({}, ("app", "app.models.gemma"), True),
        ({}, ("app", "app.models.llama", "app.models", "app.recipes.gemma"), False),
        # The library builds on it.
        ({"app/train.py": "from app.models import Gemma\ndef train():\n    Gemma()\ntrain()"}, ("app",), True),
        ({"app/train.py": "import app.models.gemma.spec as spec\nspec.run()"}, ("app",), True),
        ({"app/train.py": "from app.models.gemma.spec import forward_step"}, ("app",), True),
        ({"app/train.py": "from app.models.gemma import forward_step"}, ("app",), True),
        ({"app/train.py": "def forward_step(): ...\nforward_step()"}, ("app",), False),
        # One other model builds on it, or two do.
        ({"app/models/llama.py": "from app.models.gemma import Gemma\nGemma()"}, ("app",), False),
        (
            {f"app/models/{name}.py": "from app.models.gemma import Gemma\nGemma()" for name in ("llama", "qwen")},
            ("app",),
            True,
        ),
        (
            {"app/models/llama.py": "from .gemma import Gemma\nclass Llama(Gemma): ...", "app/x.py": "Llama()"},
            ("app",),
            True,
        ),
        # What its import runs into, all run into.
        ({"app/models/gemma/spec.py": "from lib.core.ops import f\nf(x=1)"}, ("app",), True),
    ],
)
def test_drift_in_one_model_family_warns(files: dict[str, str], modules: tuple[str, ...], refused: bool):
    app = tree("app", "1", {**LIBRARY, **files})
    (finding,) = find_drift(app, provider(OPS), Reach([StackPart(app, modules)]))
    assert (finding.weight is Weight.REFUSES) is refused
    if not refused:
        assert finding.reason == "only models of app.models.gemma run into it, which the stack does not name"


def test_a_class_that_tests_for_what_is_missing_only_warns():
    test = "    def can(self):\n        try:\n            from lib.core.ops import gone\n        except ImportError:\n"
    code = f"class {{}}:\n    def go(self):\n        lib.core.ops.gone()\n{test}            return False\n"
    for name, weight in (("A", Weight.WARNS), ("A:\n    pass\nclass B", Weight.WARNS)):
        (finding, _) = drift(f"import lib.core.ops\n{code.format(name)}A().go()\nB().can()", OPS)
        assert (finding.weight, finding.reason.partition(" ")[2]) == (weight, "tests elsewhere whether it is there")
    other = (
        f"class A:\n    def go(self):\n        lib.core.ops.gone()\nclass B:\n{test}            return False\nA().go()"
    )
    assert drift(f"import lib.core.ops\n{other}", OPS)[0].weight is Weight.REFUSES
    # A module is not one thing: what it tests for in one place it may need in another.
    module = "try:\n    from lib.core.ops import gone\nexcept ImportError:\n    pass\nfrom lib.core.ops import gone\n"
    assert [finding.weight for finding in drift(module, OPS)] == [Weight.WARNS, Weight.REFUSES]
