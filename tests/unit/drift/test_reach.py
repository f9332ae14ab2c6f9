"""Which findings any code of the consumer can run into."""

from __future__ import annotations

import pytest
from unit.drift.test_drift import drift

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
        ({"app/main.py": BAD + "def outer():\n    used()"}, {"used": True}),
        ({"app/main.py": BAD, "app/other.py": "TARGET = 'app.main.used'"}, {"used": True}),
        # Code at import is reached without a user, also of a module that nothing imports.
        ({"app/main.py": "from lib.core.ops import f\nf(x=1)\nif a:\n    f(y=1)"}, {"app/main.py": True}),
        ({"app/main.py": "from lib.core.ops import f\nclass Unnamed:\n    y = f(x=1)"}, {"Unnamed": True}),
        (
            {"app/main.py": "", "app/deep/__init__.py": "", "app/deep/bad.py": "import lib.core.gone"},
            {"app/deep/bad.py": True},
        ),
    ],
)
def test_reach(consumer: dict[str, str], expected: dict[str, bool]):
    findings = drift(consumer, {"lib/core/ops.py": "def f(): ..."})
    assert {finding.within or finding.file: finding.reached for finding in findings} == expected
    assert all(finding.is_error() is finding.reached for finding in findings)
