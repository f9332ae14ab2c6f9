"""What surrounds an import or a call: try/except, flags, versions, questions about the provider, dead code."""

from __future__ import annotations

import textwrap

import pytest
from unit.drift.test_drift import drift

from envbuild.drift.check import find_drift
from envbuild.drift.findings import Severity, Weight
from envbuild.drift.sources import SourceTree

OPS = "lib/core/ops.py"
F = {OPS: "class A:\n    def f(self): ...\ndef f(): ..."}
BREAKS, GUARDED = "breaks", "guarded"


def severities(code: str, version: str = "2.0") -> list[str]:
    """Severities of the findings of code in which f takes no x, and `gone` does not exist."""
    head = "from lib.core.ops import f, A\nimport lib.core.ops as ops\n"
    return [finding.severity.value for finding in drift(head + textwrap.dedent(code), F, version)]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("except ImportError: pass", GUARDED),
        ("except ModuleNotFoundError: pass", GUARDED),
        ("except (ValueError, ImportError): x = 1", GUARDED),
        ("except Exception as e: print(e)", GUARDED),
        ("except: pass", GUARDED),
        ("except ImportError or ModuleNotFoundError: pass", GUARDED),
        ("except builtins.ImportError: pass", GUARDED),
        ("except THINGS: pass", GUARDED),
        ("except ValueError: pass", BREAKS),
        ("except (ValueError, KeyError): pass", BREAKS),
        ("except ValueError or ImportError: pass", BREAKS),
        ("except ImportError: raise", BREAKS),
        ("except ImportError as e: raise RuntimeError('install it') from e", BREAKS),
        ("finally: pass", BREAKS),
    ],
)
def test_imports_in_try(handler: str, expected: str):
    assert severities(f"try:\n    from lib.core import gone\n{handler}") == [expected]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("TypeError", GUARDED),
        ("Exception", GUARDED),
        ("BaseException", GUARDED),
        ("ImportError", BREAKS),
        ("AttributeError", BREAKS),
    ],
)
def test_calls_in_try(handler: str, expected: str):
    assert severities(f"try:\n    f(x=1)\nexcept {handler}:\n    pass") == [expected]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [("AttributeError", GUARDED), ("Exception", GUARDED), ("BaseException", GUARDED), ("TypeError", BREAKS)],
)
def test_attributes_in_try(handler: str, expected: str):
    assert severities(f"try:\n    ops.gone\nexcept {handler}:\n    pass") == [expected]


ENGINE = {
    "app/engine.py": "try:\n    from lib.core.ops import A\n    {}\n    fused = A.f\n"
    "except ImportError:\n    fused = None\n    {}\n",
    "app/use.py": "# lib\nfrom app.engine import fused, A\nfrom app import engine\n"
    "fused(x=1)\nengine.fused(x=1)\nA(x=1)\n",
}


@pytest.mark.parametrize(
    ("imports", "handler", "expected"),
    [
        # All imports work: the handler never runs.
        ("from lib.core.ops import f", "", {"fused", "engine", "A"}),
        # One fails: what follows it is not bound, what came before is, unless the handler takes it back.
        ("from lib.core import gone", "", {"A"}),
        ("import lib.core.gone", "A = None", set()),
        ("from lib.core import gone", "from lib.core.ops import f as fused", {"A"}),
    ],
)
def test_names_that_a_failed_import_leaves_unbound_are_not_judged_elsewhere(
    imports: str, handler: str, expected: set[str]
):
    files = {**ENGINE, "app/engine.py": ENGINE["app/engine.py"].format(imports, handler)}
    actual = [finding for finding in drift(files, F) if finding.file == "app/use.py"]
    lines = {4: "fused", 5: "engine", 6: "A"}
    assert {lines[finding.line] for finding in actual} == expected


GUARD = "try:\n    import apex.optim\n    HAVE = True\nexcept ImportError:\n    apex, HAVE = None, False\n"


@pytest.mark.parametrize(
    ("code", "optional"),
    [
        ("if HAVE:\n    f(x=1)", ["apex"]),
        ("if HAVE and other:\n    f(x=1)", ["apex"]),
        ("if apex is not None:\n    f(x=1)", ["apex"]),
        ("y = f(x=1) if HAVE else None", ["apex"]),
        ("y = HAVE and f(x=1)", ["apex"]),
        ("def go():\n    if not HAVE:\n        raise ImportError\n    f(x=1)\ngo()", ["apex"]),
        ("def go():\n    if apex is None or other:\n        return\n    f(x=1)\ngo()", ["apex"]),
        ("assert HAVE\nf(x=1)", ["apex"]),
        ("if not HAVE:\n    pass\nelse:\n    f(x=1)", ["apex"]),
        ("try:\n    from flash import a\n    f(x=1)\nexcept ImportError:\n    pass", ["flash"]),
        ("import importlib.util\nif importlib.util.find_spec('flash.ops'):\n    f(x=1)", ["flash"]),
        (
            "from importlib.util import find_spec\nFLASH = find_spec('flash') is not None\nif FLASH:\n    f(x=1)",
            ["flash"],
        ),
        ("if not HAVE:\n    f(x=1)", []),
        ("if HAVE or other:\n    f(x=1)", []),
        ("if HAVE:\n    pass\nf(x=1)", []),
        # Of the standard library, of the component itself, with another import in its place, or raised again.
        ("try:\n    import tomllib\n    T = 1\nexcept ImportError:\n    T = 0\nif T:\n    f(x=1)", []),
        ("try:\n    import app.main\n    T = 1\nexcept ImportError:\n    T = 0\nif T:\n    f(x=1)", []),
        ("try:\n    import flash\nexcept ImportError:\n    import other as flash\nif flash:\n    f(x=1)", []),
        ("try:\n    import flash\nexcept ImportError:\n    raise\nif flash:\n    f(x=1)", []),
    ],
)
def test_modules_of_others_that_code_asks_for_first(code: str, optional: list[str]):
    actual = drift(f"from lib.core.ops import f\n{GUARD}{code}", {OPS: "def f(): ..."})
    assert [list(finding.optional) for finding in actual] == [optional]


def test_suppress_is_a_try():
    code = "import contextlib\nwith contextlib.suppress(ImportError):\n    from lib.core import gone\n"
    assert severities(code) == [GUARDED]
    assert severities(code.replace("ImportError", "ValueError")) == [BREAKS]


def test_a_function_defined_in_a_try_runs_outside_of_it():
    code = """
        try:
            import lib.core
            HAVE = True
            def g():
                f(x=1)
        except Exception:
            HAVE = False
        if HAVE:
            ops.gone
        g()
    """
    assert severities(code) == [BREAKS, BREAKS]


def test_guarded_import_lists_the_lost_names():
    code = """
        try:
            from lib.core import gone, also as other
            HAVE = True
        except ImportError:
            HAVE = False
            from elsewhere import gone
    """
    findings = drift(textwrap.dedent(code), F)
    assert {finding.lost for finding in findings} == {("other", "HAVE")}
    assert {finding.why for finding in findings} == {"inside try/except ImportError"}
    assert not any(finding.weight is Weight.REFUSES for finding in findings)


LOST = """
    try:
        from lib.core import gone
        HAVE = True
    except ImportError:
        gone = None
        HAVE = False
"""


@pytest.mark.parametrize(
    "code",
    [
        "if HAVE:\n    f(x=1)",
        "if HAVE and other:\n    f(x=1)",
        "if HAVE or gone is not None:\n    f(x=1)",
        "if not HAVE:\n    pass\nelse:\n    f(x=1)",
        "if gone is not None:\n    f(x=1)",
        "if gone is None:\n    pass\nelse:\n    f(x=1)",
        "def go():\n    if not HAVE:\n        raise ImportError\n    f(x=1)\ngo()",
        "def go():\n    assert HAVE\n    f(x=1)\ngo()",
        "f(x=1) if HAVE else None",
        "HAVE and f(x=1)",
        "gone(x=1)",
    ],
)
def test_code_behind_a_lost_feature_never_runs(code: str):
    assert severities(textwrap.dedent(LOST) + code) == [GUARDED]


@pytest.mark.parametrize(
    "code",
    [
        "if not HAVE:\n    f(x=1)",
        "if HAVE or other:\n    f(x=1)",
        "if gone is None:\n    f(x=1)",
        "if gone == None:\n    f(x=1)",
        "HAVE or f(x=1)",
    ],
)
def test_code_that_runs_without_the_feature(code: str):
    assert severities(textwrap.dedent(LOST) + code) == [GUARDED, BREAKS]


def test_why_a_finding_is_guarded():
    code = "import lib.core\ntry:\n    lib.core.gone\nexcept {}:\n    pass"
    assert drift(code.format("AttributeError"), F)[0].why == "inside try/except AttributeError"
    assert drift(code.format(""), F)[0].why == "inside try/except"
    assert drift("import lib.core\nif hasattr(lib.core, 'gone'):\n    lib.core.gone", F)[0].why.startswith(
        "under a test"
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("None if other else f(x=1)", [BREAKS]),
        ("None if True else f(x=1)", []),
        ("try:\n    import lib.core\nexcept ValueError:\n    f(x=1)", [BREAKS]),
        ("try:\n    import lib.core\nexcept ImportError:\n    pass\nelse:\n    f(x=1)", [BREAKS]),
        ("try:\n    from lib.core import gone\nexcept ImportError:\n    pass\nelse:\n    f(x=1)", [GUARDED]),
        # A stand-in for an import.
        ("try:\n    import lib.core\nexcept ImportError:\n    f = other\nf(x=1)", []),
        ("try:\n    from elsewhere import B\nexcept ImportError:\n    class B: ...\nB(x=1)", []),
        ("try:\n    from lib.core import ops\nexcept ImportError:\n    from lib.core import gone", []),
        ("try:\n    from lib.core import x\nexcept ImportError:\n    from lib.core import gone", [GUARDED, BREAKS]),
        ("try:\n    import elsewhere\nexcept ImportError:\n    from lib.core import gone", [BREAKS]),
        ("try:\n    from lib.core.ops import f as g\nexcept ImportError:\n    g = other\ng(x=1)", [BREAKS]),
        ("try:\n    from lib.core.ops import f as g\nexcept ValueError:\n    g = other\ng(x=1)", []),
        # Both branches of a version that is not known.
        ("if is_torch_min_version('2'):\n    f(x=1)\nelse:\n    f(y=1)", [GUARDED, GUARDED]),
        ("for _ in a:\n    continue\n    f(x=1)", []),
        ("for _ in a:\n    break\n    f(x=1)", []),
    ],
)
def test_branches(code: str, expected: list[str]):
    assert severities(code) == expected


def test_a_try_that_catches_something_else_loses_nothing():
    (finding,) = drift("try:\n    from lib.core import gone\nexcept ValueError:\n    pass", F)
    assert finding.lost == ()


@pytest.mark.parametrize(
    ("name", "version", "code"),
    [
        ("core", "2", "import core as c\nif is_c_min_version('3'):\n    c.gone"),
        # A version that is none.
        ("core", "unknown", "import core as c\nif core_version > '1':\n    c.gone"),
    ],
)
def test_version_tests_of_a_distribution_of_one_word(name: str, version: str, code: str):
    consumer = SourceTree("app", "1", {"app/main.py": code.encode()})
    findings = find_drift(consumer, SourceTree(name, version, {"core.py": b""}))
    assert [finding.severity for finding in findings] == [Severity.GUARDED]


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("import lib.core\n    HAVE = True", []),
        ("import lib.core\n    import elsewhere\n    HAVE = True", [BREAKS]),
        ("import lib.core\n    HAVE = maybe", [BREAKS]),
        ("import lib.core\n    HAVE = False", [BREAKS]),
        ("other()\n    HAVE = True", [BREAKS]),
    ],
)
def test_a_flag_of_an_import_that_works_is_true(flag: str, expected: list[str]):
    code = f"try:\n    {flag}\nexcept ImportError:\n    HAVE = False\nif HAVE:\n    pass\nelse:\n    f(x=1)"
    assert severities(code) == expected


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("TYPE_CHECKING", []),
        ("typing.TYPE_CHECKING", []),
        ("not TYPE_CHECKING", [BREAKS]),
        ("False", []),
        ("0", []),
        ("True", [BREAKS]),
        ("other", [BREAKS]),
        ("other is not None", [BREAKS]),
        ("other == None", [BREAKS]),
        # The installed version decides, and it is known: 2.0.
        ("is_lc_min_version('1.0')", [BREAKS]),
        ("is_lcore_min_version('2.0')", [BREAKS]),
        ("utils.is_lib_core_min_version('2.1', check=False)", []),
        ("not is_lc_min_version('2.1')", [BREAKS]),
        ("lib_core_version >= Version('2.1')", []),
        ("version.parse(lib_core.__version__) < version.parse('2.1')", [BREAKS]),
        ("Version(metadata.version('lib-core')) == Version('2.0')", [BREAKS]),
        ("get_lcore_version() > PkgVersion('1.9') and other", [BREAKS]),
        ("lib_core_version >= Version('no version')", [GUARDED]),
        # Somebody else's version, or one that cannot be read.
        ("is_torch_min_version('2.0')", [GUARDED]),
        ("torch_version >= Version('2.0')", [GUARDED]),
        ("lib_core_version >= LEAST", [GUARDED]),
        ("lib_core_version in '2.0'", [GUARDED]),
        ("is_c_min_version('3.0')", [GUARDED]),
        ("lib_core_level >= '2.1'", [BREAKS]),
        ("other or is_torch_min_version('2.0')", [GUARDED]),
        # Questions about the provider itself.
        ("hasattr(ops, 'x')", [GUARDED]),
        ("getattr(A, 'x', None)", [GUARDED]),
        ("hasattr(A.f, 'x') and other", [GUARDED]),
        ("'x' in inspect.signature(f).parameters", [GUARDED]),
        ("inspect.getfullargspec(f).args", [GUARDED]),
        ("check(ops)", [BREAKS]),
        ("hasattr(**kw)", [BREAKS]),
        ("find_spec('lib.core')", [GUARDED]),
        ("HAS_X", [GUARDED]),
        ("not NEW", [GUARDED]),
        # A question about some object says nothing about the provider.
        ("hasattr(other, 'x')", [BREAKS]),
    ],
)
def test_conditions(test: str, expected: list[str]):
    head = "HAS_X = hasattr(ops, 'x')\nNEW = torch_version > Version('2')\n"
    assert severities(f"{head}if {test}:\n    f(x=1)") == expected
    assert severities(f"{head}f(x=1) if {test} else None") == expected
    assert severities(f"{head}({test}) and f(x=1)") == expected


def test_the_other_branch_of_a_version_that_is_known():
    code = "if is_lc_min_version('2.1'):\n    f(x=1)\nelse:\n    ops.gone"
    assert severities(code) == [BREAKS]
    assert [f.name for f in drift(f"import lib.core.ops as ops\n{code}", F)] == ["lib.core.ops.gone"]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("if not is_lc_min_version('3'):\n        raise ImportError", []),
        ("if is_lc_min_version('1'):\n        return", []),
        ("if not is_torch_min_version('3'):\n        return", [GUARDED]),
        ("if other:\n        return", [BREAKS]),
        ("if is_lc_min_version('1'):\n        pass", [BREAKS]),
        ("if is_torch_min_version('1'):\n        pass", [BREAKS]),
        ("if is_torch_min_version('1'):\n        pass\n    else:\n        return", [GUARDED]),
        ("assert is_torch_min_version('3')", [GUARDED]),
        ("assert other", [BREAKS]),
        ("assert is_lc_min_version('3')", []),
        ("return", []),
        ("raise ValueError", []),
    ],
)
def test_what_follows_an_early_end(before: str, expected: list[str]):
    assert severities(f"def go():\n    {before}\n    f(x=1)\ngo()") == expected


def test_code_of_a_script_does_not_run_at_import():
    (finding,) = drift("import lib.core\nif __name__ == '__main__':\n    from lib.core import gone", F)
    assert (finding.at.value, finding.why, finding.unreached) == ("function", "runs when called", "")
