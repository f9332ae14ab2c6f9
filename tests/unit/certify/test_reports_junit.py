"""JUnit XML in the shape that GitLab and Jenkins read: counts that are right, one failure a case, text that is XML."""

import re
from xml.etree import ElementTree as ET

import pytest
from helpers.certificates import SHA, case_of
from helpers.reports import EVIL, REPORTS, failed, large

from envbuild.certify.report.junit import RUN, junit_xml

# Attributes and children as the schema of Jenkins' xUnit plugin has them; what it does not know is left out.
SHAPE = {
    "testsuites": ({"name", "tests", "failures", "errors", "skipped", "time"}, ["testsuite"]),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
        ["properties", "testcase", "system-out", "system-err"],
    ),
    "properties": (set(), ["property"]),
    "property": ({"name", "value"}, []),
    "testcase": ({"classname", "name", "time"}, ["skipped", "error", "failure", "system-out", "system-err"]),
    "failure": ({"message", "type"}, []),
    "skipped": ({"message"}, []),
    "system-out": (set(), []),
}


def check_shape(element):
    attributes, order = SHAPE[element.tag]
    assert set(element.attrib) <= attributes
    assert {"testcase": {"classname", "name", "time"}, "failure": {"message", "type"}}.get(element.tag, set()) <= set(
        element.attrib
    )
    places = [order.index(child.tag) for child in element]
    assert places == sorted(places)
    if "time" in element.attrib:
        assert re.fullmatch(r"\d+\.\d{3}", element.get("time"))
    if "timestamp" in element.attrib:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", element.get("timestamp"))
    for child in element:
        check_shape(child)


def parse(report):
    root = ET.fromstring(junit_xml(report))
    check_shape(root)
    return root


def by_name(root):
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert len(cases) == len(list(root.iter("testcase")))
    return cases


@pytest.mark.parametrize("name", REPORTS)
def test_shape_and_counts(name):
    report = REPORTS[name]()
    root = parse(report)
    (suite,) = root
    cases = suite.findall("testcase")
    failures = [case for case in cases if case.find("failure") is not None]
    for element in (root, suite):
        assert (element.get("tests"), element.get("failures")) == (str(len(cases)), str(len(failures)))
    skipped = [case for case in cases if case.find("skipped") is not None]
    assert len(skipped) == len({case.id for entry in report.not_vouched for case in entry.cases})
    assert len(cases) - len(skipped) == len(report.cases) + 1
    assert bool(failures) is not report.passed
    assert sum(case.find("failure") is not None for case in cases[1:]) == len(report.failed_cases)


def test_case_that_failed_has_its_checks_and_its_logs():
    cases = by_name(parse(failed()))
    failure = cases["gpt-fp32-pp2-vp2"].find("failure")
    assert (failure.get("type"), failure.get("message")[:20]) == ("parity-loss", "parity-loss: step 1:")
    assert failure.text.count("parity-loss: step") == 8
    case = cases["gpt-fp32-cp2"]
    assert case.find("failure").get("type") == "not-finite,rank-exception"
    # A control character is no XML; markup is text.
    assert case.find("failure").text.endswith(f"rank-exception: \ufffd[31m{EVIL}")
    assert "log: logs/gpt-fp32-cp2/rank1.log" in case.find("system-out").text


def test_run_as_a_whole_fails_for_what_is_of_no_case():
    failure = by_name(parse(failed()))[RUN].find("failure")
    assert failure.get("type") == "bandwidth,environment"
    assert "torch: expected 2.11.0+cu130, found 2.10.0" in failure.text
    assert by_name(parse(failed(problems=[], findings=[])))[RUN].find("failure") is None
    assert by_name(parse(large()))[RUN].find("failure") is None


def test_repeats_have_names_of_their_own():
    cases = [case_of("gpt-fp32-tp2", repeat=number, passed=number != 2) for number in (1, 2)]
    assert list(by_name(parse(failed(cases=cases))))[1:] == ["gpt-fp32-tp2 (repeat 1)", "gpt-fp32-tp2 (repeat 2)"]


def test_suite_has_properties_and_differences():
    root = parse(large())
    properties = {node.get("name"): node.get("value") for node in root.iter("property")}
    assert (properties["lock"], properties["whole_matrix"]) == (SHA["lock"], "true")
    assert SHA["sqsh"] in properties.values()
    output = by_name(root)["gpt-fp32-tp2-sp"].find("system-out").text
    assert "largest relative difference, loss: 2.5e-07 of 1e-05" in output
