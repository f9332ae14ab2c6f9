"""Which findings any code of the consumer can run into."""

from __future__ import annotations

from unit.drift.test_drift import drift

CORE = {"lib/core/ops.py": "def f(): ..."}
BAD = "from lib.core.ops import f\n\ndef used():\n    f(x=1)\n"


def reached(consumer: dict[str, str]) -> dict[str, bool]:
    """By function or file, whether its finding is reached."""
    return {finding.within or finding.file: finding.reached for finding in drift(consumer, CORE)}


def test_functions_that_nothing_names_are_not_reached():
    consumer = {"app/main.py": BAD + "def unused():\n    f(x=1)\nused()"}
    assert reached(consumer) == {"used": True, "unused": False}
    assert [finding.is_error() for finding in drift(consumer, CORE)] == [True, False]


def test_methods_count_by_name_and_special_methods_always():
    consumer = {
        "app/main.py": "from lib.core.ops import f\n"
        "class A:\n    def __call__(self):\n        f(x=1)\n    def go(self):\n        f(x=1)\nA()"
    }
    assert reached(consumer) == {"A.__call__": True, "A.go": False}


def test_a_longer_name_is_another_name():
    assert reached({"app/main.py": BAD + "used_up()\nmisused()"}) == {"used": False}


def test_a_name_anywhere_is_a_use():
    assert reached({"app/main.py": BAD + "def outer():\n    used()"}) == {"used": True}
    assert reached({"app/main.py": BAD, "app/other.py": "TARGET = 'app.main.used'"}) == {"used": True}


def test_code_at_import_is_reached_without_a_user():
    assert reached({"app/main.py": "from lib.core.ops import f\nf(x=1)\nif a:\n    f(y=1)"}) == {"app/main.py": True}
    assert reached({"app/main.py": "from lib.core.ops import f\nclass Unnamed:\n    y = f(x=1)"}) == {"Unnamed": True}


def test_a_module_that_nothing_imports_is_reached():
    consumer = {"app/main.py": "", "app/deep/__init__.py": "", "app/deep/bad.py": "import lib.core.gone"}
    assert reached(consumer) == {"app/deep/bad.py": True}
