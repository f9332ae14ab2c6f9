"""A virtual environment and the wheels of its lock: RECORDs that were changed with the files are found."""

import json

import pytest
from helpers.locks import lock_mcore

from envbuild.certify.run import locked_files
from envbuild.certify.run.locked_files import installed_records, locked_records, record_problems

CODE = "megatron/core/model.py,sha256=abc,12\n"


def package(venv, name="megatron_core", version="0.16.1", record=CODE, tag="py3-none-any"):
    info = venv / "lib/python3.11/site-packages" / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "RECORD").write_text(record)
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")
    return venv


@pytest.mark.parametrize(
    ("record", "differs"),
    [
        (CODE, False),
        # What installers write, and files without a hash.
        (f"../../../bin/x,sha256=1,1\nmegatron/core/a.pyc,sha256=1,1\n{CODE}", False),
        (f"a.dist-info/INSTALLER,sha256=1,2\nx,,\n{CODE}", False),
        (CODE.replace("abc", "abd"), True),
        ("", True),
        (f"{CODE}megatron/core/more.py,sha256=1,1\n", True),
    ],
)  # fmt: skip
def test_a_record_that_is_not_the_wheels(tmp_path, record, differs):
    locked = installed_records(package(tmp_path / "fresh"))
    problems = record_problems(locked, package(tmp_path / "venv", record=record))
    assert [problem.check for problem in problems] == ["environment"] * differs
    assert all(problem.text.startswith("megatron-core: ") for problem in problems)


def test_packages_that_were_compiled_or_are_absent_are_not_compared(tmp_path):
    fresh = package(package(tmp_path / "fresh"), name="antlr4", tag="cp311-cp311-linux_x86_64")
    assert installed_records(fresh).keys() == {"megatron-core"}
    assert record_problems(installed_records(fresh), tmp_path / "empty") == []


def test_lock_is_installed_once(world, monkeypatch):
    made = []

    def fill(_lock, into, scope, _logs, _context):
        made.append(scope.phases)
        package(into)

    monkeypatch.setattr(locked_files, "fill_environment", fill)
    lock = lock_mcore(world.project)
    first, second = (locked_records(lock, world.context) for _ in range(2))
    assert first == second == installed_records(package(world.project / "same"))
    assert made == [("main",)]


def test_a_changed_environment_is_not_certified(world, command, tmp_path, monkeypatch, capsys):
    from envbuild.certify import certify

    locked = installed_records(package(tmp_path / "fresh"))
    monkeypatch.setattr(certify, "locked_records", lambda _lock, _context: locked)
    venv = package(tmp_path / "venv", record=CODE.replace("abc", "abd"))
    words = ("--only", "gpt-fp32-tp2", "--in", "venv", "--venv", venv, "--json")
    assert command(*words) == 7
    assert json.loads(capsys.readouterr().out)["error"]["problems"][0]["check"] == "environment"
    package(venv)
    assert command(*words) == 0
