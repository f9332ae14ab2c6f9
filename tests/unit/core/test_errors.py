"""One class of error, one exit code, one table."""

import inspect
import json
import re
from pathlib import Path

import pytest

from envbuild.catalog.data import data_root
from envbuild.core import errors
from envbuild.core.errors import (
    ERROR_CLASSES,
    CertificationFailedError,
    EnvbuildError,
    FailedRun,
    InterruptedByUserError,
)

# The table of the design; a code never changes its meaning.
DESIGN = {
    "InternalError": 1,
    "UsageError": 2,
    "ConfigurationError": 3,
    "ResolutionError": 4,
    "CheckRefusedError": 5,
    "BuildError": 6,
    "CertificationFailedError": 7,
    "CertificationCannotRunError": 8,
    "PublicationRefusedError": 9,
    "NetworkError": 10,
    "MachineError": 11,
    "CertificateRefusedError": 12,
    "ResultsRefusedError": 13,
    "StaleImageError": 14,
    "InterruptedByUserError": 130,
}


def test_exit_codes_are_those_of_the_design():
    assert {cls.__name__: cls.exit_code for cls in ERROR_CLASSES} == DESIGN


def test_every_error_class_is_listed():
    defined = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, EnvbuildError)} - {
        EnvbuildError
    }
    assert defined == set(ERROR_CLASSES)


def test_docs_table_lists_exactly_the_error_classes():
    rows = re.findall(
        r"^\| (\d+) \| (.+) \|$", (data_root() / "docs" / "reference" / "exit-codes.md").read_text(), re.MULTILINE
    )
    expected = [("0", "done, or nothing to do"), *((str(cls.exit_code), cls.meaning) for cls in ERROR_CLASSES)]
    assert rows == expected


@pytest.mark.parametrize("cls", [cls for cls in ERROR_CLASSES if cls is not InterruptedByUserError])
def test_json_has_what_why_and_fix(cls):
    error = cls("it failed", why="because", fix="do this", log=Path("/some/log"))
    assert json.loads(json.dumps(error.as_json())) == {
        "kind": cls.__name__,
        "exit_code": cls.exit_code,
        "what": "it failed",
        "why": "because",
        "fix": "do this",
        "log": "/some/log",
    }


def test_failed_certification_carries_its_cases_where_there_are_any():
    error = CertificationFailedError(
        "it failed", run=FailedRun(cases=[{"id": "a"}], environment_findings=[{"code": "c"}])
    )
    shown = json.loads(json.dumps(error.as_json()))
    assert (shown["cases"], shown["environment_findings"]) == ([{"id": "a"}], [{"code": "c"}])
    assert CertificationFailedError("it failed", run=FailedRun()).as_json()["cases"] == []


@pytest.mark.parametrize("cls", ERROR_CLASSES)
def test_context_keeps_class_and_fields(cls):
    error = cls("a", fix="c")
    error.log = Path("x.log")
    other = error.with_context(what="b", why="why")
    assert (type(other), str(other), other.what, other.why, other.fix) == (cls, "b", "b", "why", "c")
    assert other.as_json() == error.as_json() | {"what": "b", "why": "why"}
    assert error.what == "a"
