"""What makes the drift check quick and must not change what it finds: functions left out, readings kept, a process."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path

import pytest
from unit.drift.test_drift import drift, kinds, provider, tree

from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.drift import Comparison, find_drift_apart, worker, write_wheel
from envbuild.drift.check import find_drift
from envbuild.drift.sources import SourceTree
from envbuild.drift.syntax import children, walk

OPS = {"lib/core/ops.py": "def f(a): ...\nclass K:\n    def __init__(self, a): ...\n    def m(self, a): ...\n"}
BROKEN = [("unexpected-keyword", "breaks")]


@pytest.mark.parametrize(
    "code",
    [
        "from lib.core.ops import f\ndef go(): f(1, b=2)",
        "from lib.core.ops import f as größe\ndef go(): größe(1, b=2)",
        # Python reads both spellings as one name.
        "from lib.core.ops import f as fi\ndef go(): \ufb01(1, b=2)",
        "from lib.core.ops import *\ndef go(): f(1, b=2)",
        "def go():\n    from lib.core.ops import f\n    f(1, b=2)",
        "from lib.core.ops import K\nclass A(K):\n    def m(self): super().m(1, b=2)",
        "from lib.core.ops import K\nclass A(K): ...\ndef go(): A(1, b=2)",
        "from lib.core.ops import K\nclass A(K): ...\nclass B(A):\n    def m(self): super().m(1, b=2)",
        "from lib.core.ops import f\ng = f\ndef go():\n    def inner(): g(1, b=2)\n    return inner",
        "from functools import partial\nfrom lib.core.ops import f\np = partial(f, 1)\ndef go(): p(b=2)",
        "from lib import core\ndef go(): core.ops.f(1, b=2)",
        "from lib.core.ops import f\ndef go():\n    'text'\n    @f(1, b=2)\n    def inner(): ...\n    return inner",
        "from lib.core.ops import f\ndef go():\n    @f(1, b=2)\n    class A: ...",
        "from lib.core.ops import f\ndef go(a=f(1, b=2)):\n    'text'",
    ],
)
def test_function_that_can_reach_the_provider_is_walked(code):
    assert kinds(drift(code, OPS)) == BROKEN


def test_function_that_reaches_the_provider_through_another_module_is_walked():
    files = {"app/base.py": "from lib.core.ops import K\nclass A(K): ...\n", "app/main.py": "# lib\n"}
    files["app/main.py"] += "from app.base import A\ndef go(): A(1, b=2)\n"
    assert kinds(drift(files, OPS)) == BROKEN


def test_a_tree_that_was_compared_before_is_compared_as_if_it_were_new():
    app = {"app/main.py": "from lib.core.ops import K\nclass A(K):\n    def m(self): super().m(1, b=2)\n"}
    base = {"base/main.py": "from app.main import A\nfrom app import gone\nA(1, b=2)\n", "base/bad.py": "app ("}
    consumer, used, user = tree("app", "1", {"app/__init__.py": "", **app}), provider(OPS), tree("base", "1", base)
    for _ in range(2):
        assert kinds(find_drift(consumer, used)) == BROKEN
        actual = [("not-read", "guarded"), ("missing-name", "breaks")]
        assert kinds(find_drift(user, consumer)) == actual


def test_unparsable_files_are_reported_in_every_comparison():
    consumer = tree("app", "1", {"app/main.py": "import lib.core\nimport app.bad\napp.bad.x()\n", "app/bad.py": "("})
    for _ in range(2):
        assert kinds(find_drift(consumer, provider(OPS))) == [("not-read", "guarded")]


def test_walking_meets_the_nodes_of_the_standard_library():
    source = Path(ast.__file__).read_text()
    node = ast.parse(source)
    plain = ast.expr_context | ast.operator | ast.cmpop | ast.boolop | ast.unaryop
    assert walk(node) == [inner for inner in ast.walk(node) if not isinstance(inner, plain)]
    for entry in ast.walk(node):
        assert children(entry) == [child for child in ast.iter_child_nodes(entry) if not isinstance(child, plain)]


def wheels(folder: Path) -> dict[str, Path]:
    consumer = {"app/main.py": b"from lib.core.ops import gone\n"}
    files = {"src/lib/core/__init__.py": b"", **{f"src/{file}": text.encode() for file, text in OPS.items()}}
    write_wheel(folder / "app.whl", "app", "1.0", consumer)
    write_wheel(folder / "lib.whl", "lib-core", "2.0", files)
    return {"app": folder / "app.whl", "lib": folder / "lib.whl"}


def test_subprocess_finds_the_same(tmp_path):
    paths = wheels(tmp_path)
    trees = {name: SourceTree.from_wheel(path) for name, path in paths.items()}
    findings = find_drift_apart(paths, Comparison(pairs=[("app", "lib"), ("lib", "app")]), tmp_path)
    assert findings == {("app", "lib"): find_drift(trees["app"], trees["lib"]), ("lib", "app"): []}
    assert kinds(findings["app", "lib"]) == [("missing-name", "breaks")]


def test_a_wheel_that_cannot_be_read_is_refused_as_if_it_were_read_here(tmp_path):
    paths = wheels(tmp_path)
    paths["lib"].write_bytes(b"no archive")
    with pytest.raises(CheckRefusedError, match=r"cannot read the sources in lib\.whl") as refused:
        find_drift_apart(paths, Comparison(pairs=[("app", "lib")]), tmp_path)
    with pytest.raises(CheckRefusedError) as here:
        SourceTree.from_wheel(paths["lib"])
    assert (refused.value.why, refused.value.fix) == (here.value.why, here.value.fix)


def test_process_that_ends_early_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(worker.sys, "executable", "/bin/false")
    with pytest.raises(MachineError, match="cannot compare the sources of components"):
        find_drift_apart(wheels(tmp_path), Comparison(pairs=[("app", "lib")]), tmp_path)


def test_a_written_wheel_holds_what_it_was_given(tmp_path):
    write_wheel(tmp_path / "a.whl", "My_App", "abc123", {"app/a.py": b"x", "src/app/b.py": b"y"})
    read = SourceTree.from_wheel(tmp_path / "a.whl")
    assert (read.title, read.files) == ("my-app abc123", {"app/a.py": b"x", "app/b.py": b"y"})
    assert zipfile.is_zipfile(tmp_path / "a.whl")
