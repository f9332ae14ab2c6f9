"""Imports of what the provider has not; the other test_drift files take `drift` from here."""

from __future__ import annotations

import textwrap

import pytest

from envbuild.drift.check import find_drift
from envbuild.drift.findings import Finding, FindingKind, Moment, Severity, Weight
from envbuild.drift.sources import SourceTree

PROVIDER = "lib-core"


def tree(name: str, version: str, files: dict[str, str], compiled: frozenset[str] = frozenset()) -> SourceTree:
    return SourceTree(name, version, {path: textwrap.dedent(text).encode() for path, text in files.items()}, compiled)


def provider(files: dict[str, str], version: str = "2.0", compiled: frozenset[str] = frozenset()) -> SourceTree:
    """A provider whose package lib.core lies in the namespace package lib."""
    return tree(PROVIDER, version, {"lib/core/__init__.py": "", **files}, compiled)


def drift(code: str | dict[str, str], files: dict[str, str], version: str = "2.0") -> list[Finding]:
    """Findings of a consumer: the text of app/main.py, or all its files."""
    consumer = {"app/main.py": code} if isinstance(code, str) else code
    return find_drift(tree("app", "1.0", consumer), provider(files, version))


def calls(code: str, module: str, **others: str) -> list[str]:
    """Kinds of the findings of code that has all names of the provider's module."""
    files = {"lib/core/ops.py": module, **{f"lib/core/{name}.py": text for name, text in others.items()}}
    return [finding.kind.value for finding in drift(f"from lib.core.ops import *\n{code}", files)]


def kinds(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.kind.value, finding.severity.value) for finding in findings]


def test_import_of_a_missing_name_breaks_at_import():
    (finding,) = drift("\nfrom lib.core.ops import gone\n", {"lib/core/ops.py": "def here(): ..."})
    assert finding == Finding(
        kind=FindingKind.MISSING_NAME,
        consumer="app 1.0",
        provider="lib-core 2.0",
        file="app/main.py",
        line=2,
        name="lib.core.ops.gone",
        detail="lib.core.ops has no 'gone'",
        severity=Severity.BREAKS,
        why="runs when the module is imported",
        at=Moment.IMPORT,
    )
    assert finding.weight is Weight.REFUSES


def test_nested_places_are_named():
    code = (
        "import lib.core\ndef go():\n    class A:\n        def m(self):\n            lib.core.gone\n    A().m()\ngo()"
    )
    assert drift(code, {})[0].within == "go.A.m"


def test_a_condition_does_not_change_the_moment():
    findings = drift("import lib.core\nif other == 1:\n    lib.core.gone\nif other:\n    lib.core.gone", {})
    assert {finding.at for finding in findings} == {Moment.IMPORT}


def test_import_inside_a_function_names_the_function():
    (finding,) = drift(
        "class A:\n    def go(self):\n        from lib.core import gone\n\nA().go()\n", {"lib/core/ops.py": ""}
    )
    assert (finding.at, finding.within) == (Moment.FUNCTION, "A.go")


@pytest.mark.parametrize(
    "code", ["import lib.core.x.y", "from lib.core.x.y import z", "from lib.core.x import y", "import lib.core.ops.x"]
)
def test_missing_module(code: str):
    (finding,) = drift(code, {"lib/core/ops.py": ""})
    assert finding.kind is FindingKind.MISSING_MODULE or finding.name == "lib.core.x.y"
    assert finding.severity is Severity.BREAKS


OPS = {"lib/core/ops.py": ""}
NOT_JUDGED: dict[str, tuple[str | dict[str, str], dict[str, str]]] = {
    "relative imports": (
        {"app/sub/main.py": "from ..core import gone\nfrom . import lib", "app/core.py": "", "app/__init__.py": ""},
        OPS,
    ),
    "other parts of a namespace": ("import lib.other\nfrom lib import other\nfrom lib.other import x", OPS),
    "names of the consumer": (
        {"app/__init__.py": "import lib.core", "app/main.py": "import lib.core\nfrom app import nothing"},
        {},
    ),
    "functions of the consumer": ("import lib.core\ndef f(): ...\nf(x=1)", {}),
    "enumerations of the consumer": ("import enum, lib.core\nclass Kind(enum.Enum): ...\nKind.B", {}),
    "folders without init": ("from lib.core.plain import ops", {"lib/core/plain/ops.py": ""}),
    "packages that change their path": (
        "import lib.core.grown.x\nfrom lib.core.grown import y",
        {"lib/core/grown/__init__.py": "__path__.append('elsewhere')"},
    ),
    "special names": ("from lib.core.ops import __file__, __version__", OPS),
    "members that the consumer adds": (
        "from lib.core.ops import Kind\nKind.B = 1\nKind.B",
        {"lib/core/ops.py": "import enum\nclass Kind(enum.Enum): ..."},
    ),
    "names that the consumer sets": (
        "import lib.core.ops as o\no.added = 1\nsetattr(o, 'x', 2)\no.added, o.x\nfrom lib.core.ops import added",
        OPS,
    ),
    "modules that the consumer replaces": (
        {
            "app/patch.py": "import sys, lib\n"
            "sys.modules['lib.core.ops'] = object()\n"
            "sys.modules['lib.core.new'] = object()",
            "app/main.py": "from lib.core.ops import gone\nimport lib.core.new\nimport lib.core.new.sub\n"
            "import lib.core.ops as ops\nops.gone\nops.here(x=1)",
        },
        {"lib/core/ops.py": "def here(): ..."},
    ),
    "a patch through a relative import": (
        {
            "app/__init__.py": "",
            "app/names.py": "import lib.core.ops as ops",
            "app/patch.py": "# lib\ndef patch():\n    from .names import ops as o\n    o.f = other",
            "app/main.py": "from lib.core.ops import f\nf(x=1)",
        },
        {"lib/core/ops.py": "def f(): ..."},
    ),
    "tests, examples and scripts": (
        {f"app/{folder}/main.py": "from lib.core import gone" for folder in ("tests", "test", "examples", "scripts")},
        {},
    ),
}


@pytest.mark.parametrize(("consumer", "files"), NOT_JUDGED.values(), ids=NOT_JUDGED)
def test_imports_and_calls_without_a_finding(consumer: str | dict[str, str], files: dict[str, str]):
    assert drift(consumer, files) == []


@pytest.mark.parametrize(
    "module",
    [
        "def x(): ...",
        "x = 1",
        "x: int = 1",
        "class x: ...",
        "import os as x",
        "try:\n    from a import x\nexcept ImportError:\n    pass",
        "if a:\n    def x(): ...",
        "for x in (): ...",
        "with a as x: ...",
        "(x := 1)",
        "match a:\n    case [x]: ...",
        "from .inner import x",
        "from .inner import *",
        "from .public import *",
        "from elsewhere import *",
        "def __getattr__(name): ...",
        "globals().update(a)",
        "def set_up():\n    global x\n    x = 1",
        "from .computed import *",
        "from .mixed import *",
    ],
)
def test_every_way_to_define_a_name(module: str):
    files = {
        "lib/core/ops.py": module,
        "lib/core/inner.py": "x = 1",
        "lib/core/public.py": "__all__ = ['x', 'y']\nx = 1",
        "lib/core/computed.py": "__all__ = [n for n in a]",
        "lib/core/mixed.py": "__all__ = ['y', name]\nx = y = 1",
    }
    assert drift("from lib.core.ops import x", files) == []


@pytest.mark.parametrize(
    ("code", "files"),
    [
        ("match a:\n    case 1:\n        from lib.core import gone", {}),
        ("from lib.core.strategies import gone", {"lib/core/strategies/__init__.py": ""}),
        ("from lib.core.ops import x", {"lib/core/ops.py": "from .y import *", "lib/core/y.py": "__all__ = []\nx = 1"}),
        ("from lib.core.ops import _x", {"lib/core/ops.py": "from .y import *", "lib/core/y.py": "_x = 1"}),
        # A circle ends.
        ("from lib.core.a import x", {"lib/core/a.py": "from .b import *", "lib/core/b.py": "from .a import *"}),
    ],
)  # fmt: skip
def test_names_that_are_not_there(code: str, files: dict[str, str]):
    assert kinds(drift(code, files)) == [("missing-name", "breaks")]


def test_compiled_extensions_exist_and_are_unknown():
    code = "from lib.core.fast import x\nfrom lib.core import fast\nfast.y()\nimport lib.core.fast.inner"
    consumer = tree("app", "1.0", {"app/main.py": code})
    assert find_drift(consumer, provider({}, compiled=frozenset({"lib.core.fast"}))) == []


def test_attributes_of_modules():
    code = """
        import lib.core as core
        import lib.core.ops
        from lib.core import ops

        def go(core_like):
            core.ops.gone()
            lib.core.ops.gone
            ops.here(), core_like.gone
            ops.gone
        go(1)
    """
    findings = drift(code, {"lib/core/ops.py": "def here(): ..."})
    assert [finding.line for finding in findings] == [7, 8, 10]
    assert {finding.name for finding in findings} == {"lib.core.ops.gone"}


ENUMERATIONS = [
    "enum.Enum",
    "enum.IntEnum",
    "enum.Flag",
    "enum.IntFlag",
    "enum.StrEnum",
    "str, enum.Enum",
    "int, enum.Enum",
]


@pytest.mark.parametrize("base", ENUMERATIONS)
def test_members_of_an_enumeration(base: str):
    files = {"lib/core/ops.py": f"import enum\nclass Kind({base}):\n    A = 1"}
    code = "from lib.core.ops import Kind\nKind.A, Kind.A.name, Kind.__members__, Kind.from_bytes, Kind.upper\nKind.B"
    (finding,) = drift(code, files)
    assert (finding.line, finding.name) == (3, "lib.core.ops.Kind.B")


@pytest.mark.parametrize(
    "kind",
    [
        "class Kind: ...",
        "class Kind(make(), enum.Enum): ...",
        "class Kind(elsewhere.Mixin, enum.Enum): ...",
        "@wrap\nclass Kind(enum.Enum): ...",
        "class Kind(enum.Enum, metaclass=Strange): ...",
    ],
)
def test_members_that_cannot_be_known(kind: str):
    files = {"lib/core/ops.py": f"import enum, elsewhere\n{kind}"}
    assert drift("from lib.core.ops import Kind\nKind.B", files) == []


def test_unparsable_files_are_reported_and_unknown():
    consumer = {"app/main.py": "from lib.core.ops import x", "app/bad.py": "import lib.core\ndef ("}
    findings = drift(consumer, {"lib/core/ops.py": "def ("})
    assert {(finding.file, finding.kind.value) for finding in findings} == {
        ("app/bad.py", "not-read"),
        ("lib/core/ops.py", "not-read"),
    }
    assert not any(finding.weight is Weight.REFUSES for finding in findings)
