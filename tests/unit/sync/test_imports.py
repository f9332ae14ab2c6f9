"""The import check, with this very Python."""

import sys

import pytest
from helpers.locks import make_lock

from envbuild.core.errors import CheckRefusedError
from envbuild.core.process import run
from envbuild.core.progress import SilentReporter
from envbuild.sync.imports import check_imports, modules_of


def here(argv, *, what, log):
    return run(argv, what=what, log=log, check=False)


def check(modules, tmp_path, python=sys.executable):
    check_imports(modules, python, here, tmp_path, SilentReporter())


def test_modules_that_import_pass(tmp_path):
    check({"standard": ("json", "xml.dom"), "more": ("email",)}, tmp_path)


def test_every_module_that_fails_is_told_with_its_component_and_cause(tmp_path):
    with pytest.raises(CheckRefusedError) as caught:
        check({"good": ("json",), "bad": ("no_such_module_1", "json.no_such_part")}, tmp_path)
    assert caught.value.what == "2 of 3 modules of the stack do not import"
    assert "no_such_module_1 (bad)" in caught.value.why
    assert "ModuleNotFoundError: No module named 'json.no_such_part'" in caught.value.why
    assert "json (good)" not in caught.value.why


def test_an_import_that_ends_the_process_is_told_as_such(tmp_path):
    with pytest.raises(CheckRefusedError, match="do not import") as caught:
        check({"broken": ("antigravity_crash",)}, tmp_path, python=crashing_python(tmp_path))
    assert "was ended by SIGSEGV" in caught.value.why


def crashing_python(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    program.chmod(0o755)
    return str(program)


def test_an_import_does_not_help_another_one(tmp_path):
    (tmp_path / "first.py").write_text("import sys, types; sys.modules['second'] = types.ModuleType('second')")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    with pytest.raises(CheckRefusedError) as caught:
        check({"a": ("first", "second")}, tmp_path, python=str(program))
    assert caught.value.what == "1 of 2 modules of the stack do not import"
    assert "No module named 'second'" in caught.value.why


def test_neither_the_current_directory_nor_the_environment_helps(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CheckRefusedError):
        check({"a": ("only_here",)}, tmp_path)


def test_modules_come_from_the_lock(tmp_path):
    assert modules_of(make_lock(tmp_path)) == {"torch": ("torch",)}
