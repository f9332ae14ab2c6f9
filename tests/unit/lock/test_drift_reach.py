"""Which findings the entries can run into."""

from __future__ import annotations

import pytest
from unit.lock.test_drift import drift

CORE = {"lib/core/ops.py": "def f(): ..."}
BAD = "from lib.core.ops import f\n\ndef used():\n    f(x=1)\n"


def reached(consumer: dict[str, str], *entries: str) -> dict[str, bool]:
    """By function or file, whether its finding is reached."""
    return {finding.within or finding.file: finding.reached for finding in drift(consumer, CORE, entries=entries)}


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


IMPORTS = [
    "import app.deep.bad",
    "import os, app.deep.bad as b",
    "from app.deep import bad",
    "from app.deep import (\n    other,\n    bad,\n)",
    "from app.deep import other, \\\n    bad",
    "from . import deep\nfrom .deep import bad",
    "from .deep.bad import used",
    "def go():\n    from app.deep.bad import used",
    "try:\n    import app.deep.bad\nexcept ImportError: ...",
    "import importlib\nimportlib.import_module('app.deep.bad')",
    "TARGET = 'app.deep.bad.used'",
]


@pytest.mark.parametrize("code", IMPORTS)
def test_modules_that_the_entries_import(code: str):
    consumer = {
        "app/__init__.py": "",
        "app/main.py": code,
        "app/deep/__init__.py": "",
        "app/deep/bad.py": "from lib.core import gone",
    }
    assert reached(consumer, "app.main") == {"app/deep/bad.py": True}


def test_modules_that_import_each_other():
    consumer = {"app/main.py": "import app.bad", "app/bad.py": "from lib.core import gone\nimport app.main"}
    assert reached(consumer, "app.main") == {"app/bad.py": True}


def test_packages_on_the_way_are_imported():
    consumer = {"app/main.py": "import app.deep.other", "app/deep/__init__.py": "from lib.core import gone"}
    consumer["app/deep/other.py"] = ""
    assert reached(consumer, "app.main") == {"app/deep/__init__.py": True}


def test_modules_that_nothing_imports_are_not_reached():
    consumer = {"app/main.py": "import app.deep", "app/deep/__init__.py": "", "app/deep/bad.py": "import lib.core.gone"}
    assert reached(consumer, "app.main") == {"app/deep/bad.py": False}
    assert reached(consumer) == {"app/deep/bad.py": True}


def test_what_lies_below_an_entry_is_an_entry():
    consumer = {"app/deep/__init__.py": "", "app/deep/bad.py": BAD + "# used"}
    assert reached(consumer, "app.deep") == {"used": True}
    consumer["app/deep/main.py"] = "import app.far"
    consumer["app/far.py"] = BAD.replace("used", "idle") + "# idle"
    assert reached(consumer, "app.deep") == {"used": True, "idle": False}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("import app.bad\napp.bad.used()", True),
        ("from app.bad import used as u\nu()", True),
        ("from app.bad import used as u\n__all__ = ['u']", True),
        ("import app.bad\ngetattr(app.bad, 'used')()", True),
        ("import app.bad\nREGISTRY = {'target': 'app.bad.used'}", True),
        ("import app.bad", False),
        ("from app.bad import used", True),
        ("import app.bad\napp.bad.other()", False),
        ("import app.bad\napp.bad.caller()", True),
        ("import app.bad\napp.bad.Child()", True),
        ("import app.bad\n'a sentence about used things'", False),
    ],
)
def test_functions_outside_the_entries_need_a_user(entry: str, expected: bool):
    bad = BAD + "if a:\n    def idle():\n        used()\n"
    bad += "def other(): ...\ndef caller():\n    used()\nclass Child(Mother): ...\nclass Mother:\n    x = used\n"
    assert reached({"app/main.py": entry, "app/bad.py": bad}, "app.main") == {"used": expected}


@pytest.mark.parametrize("table", ["TABLE = [used]", "if a:\n    TABLE = {'x': used}", "register(used)"])
def test_tables_at_module_level_use_what_they_hold(table: str):
    assert reached({"app/main.py": "import app.bad", "app/bad.py": BAD + table}, "app.main") == {"used": True}


def test_without_entries_a_name_anywhere_is_a_use():
    assert reached({"app/main.py": BAD + "def outer():\n    used()"}) == {"used": True}


def test_class_bodies_run_at_import():
    bad = "from lib.core.ops import f\nclass Unnamed:\n    y = f(x=1)"
    consumer = {"app/main.py": "import app.bad", "app/bad.py": bad}
    assert reached(consumer, "app.main") == reached(consumer) == {"Unnamed": True}


def test_relative_imports_of_a_package_start_in_it():
    consumer = {"app/deep/__init__.py": "from . import bad", "app/deep/bad.py": "from lib.core import gone"}
    consumer["app/main.py"] = "import app.deep\nfrom app import main"
    assert reached(consumer, "app.main") == {"app/deep/bad.py": True}


def test_other_names_of_a_function_lead_to_it():
    middle = "from app.bad import used as other\ndef go():\n    other()"
    consumer = {"app/main.py": "import app.middle\napp.middle.go()", "app/middle.py": middle, "app/bad.py": BAD}
    assert reached(consumer, "app.main") == {"used": True}


def test_each_reason_stands_for_itself():
    bad = BAD + "def unnamed():\n    f(x=1)\ndef idle():\n    used()"
    consumer = {"app/main.py": "import app.bad", "app/bad.py": bad}
    assert reached(consumer, "app.main") == {"used": False, "unnamed": False}


def test_export_lists_and_imports_use_nothing():
    bad = BAD + "__all__ = ['used']\ndef idle():\n    used()"
    consumer = {"app/main.py": "import app.bad", "app/bad.py": bad, "app/more.py": ""}
    assert reached(consumer, "app.main") == {"used": False}


def test_decorated_functions_may_be_called_by_a_registry():
    registered = BAD.replace("def used", "@register\ndef used") + "# used"
    quiet = BAD.replace("def used", "@no_grad()\ndef used") + "# used"
    assert reached({"app/main.py": "import app.bad", "app/bad.py": registered}, "app.main") == {"used": True}
    assert reached({"app/main.py": "import app.bad", "app/bad.py": quiet}, "app.main") == {"used": False}


def test_code_at_import_is_reached_without_a_user():
    bad = "from lib.core.ops import f\nf(x=1)\nif a:\n    f(y=1)"
    assert reached({"app/main.py": "import app.bad", "app/bad.py": bad}, "app.main") == {"app/bad.py": True}


def test_methods_outside_the_entries_need_a_user_too():
    bad = "from lib.core.ops import f\nclass A:\n    def go(self):\n        f(x=1)\n    # go\n"
    assert reached({"app/main.py": "import app.bad\napp.bad.A()", "app/bad.py": bad}, "app.main") == {"A.go": False}
    assert reached({"app/main.py": "import app.bad\napp.bad.A().go()", "app/bad.py": bad}, "app.main") == {"A.go": True}


def test_an_unreadable_module_on_the_way_stops_nothing():
    consumer = {
        "app/main.py": "import app.bad, app.broken\napp.bad.used()",
        "app/bad.py": BAD,
        "app/broken.py": "def (",
    }
    assert reached(consumer, "app.main") == {"used": True}
