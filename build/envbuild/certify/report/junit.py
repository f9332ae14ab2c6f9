"""JUnit XML as GitLab and Jenkins read it: a test case for each case and repeat, and one for the run as a whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from envbuild.certify.models import CaseVerdict, Numbers, Problem
from envbuild.certify.report.describe import describe_reference, describe_spread, difference
from envbuild.certify.report.model import Report

RUN = "the run as a whole"
# What XML 1.0 allows; logs and messages of tools hold other things.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# A message is shown in one line of a table.
MESSAGE_LENGTH = 300


def junit_xml(report: Report) -> bytes:
    """The report as JUnit XML."""
    suite = ET.Element("testsuite")
    _properties(suite, report)
    _run(suite, report)
    for case in report.cases:
        _case(suite, case, report)
    _skipped(suite, report)
    counts = {
        "name": _text(f"envbuild certify {report.name}"),
        "tests": str(len(suite.findall("testcase"))),
        "failures": str(len(suite.findall("testcase/failure"))),
        "errors": "0",
        "skipped": str(len(suite.findall("testcase/skipped"))),
        "time": _seconds(sum(case.seconds or 0 for case in report.cases)),
    }
    for name, value in counts.items():
        suite.set(name, value)
    # The schema's dateTime has no zone.
    suite.set("timestamp", report.measured.started_at.removesuffix("Z"))
    root = ET.Element("testsuites", counts)
    root.append(suite)
    ET.indent(root)
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _properties(suite: ET.Element, report: Report) -> None:
    properties = ET.SubElement(suite, "properties")
    facts = {
        "stack": report.stack,
        "base": report.base,
        "target": report.target,
        "form": report.form,
        "launcher": report.launcher,
        "lock": report.lock_digest,
        **report.digests,
        "matrix": report.matrix,
        "matrix_is_shipped": str(report.matrix_is_shipped).lower(),
        "whole_matrix": str(report.whole_matrix).lower(),
        "envbuild": report.envbuild,
    }
    for name, value in facts.items():
        ET.SubElement(properties, "property", name=_text(name), value=_text(value))


def _run(suite: ET.Element, report: Report) -> None:
    # JUnit has failures of test cases alone, so the run is one.
    element = ET.SubElement(suite, "testcase", classname="run", name=RUN, time="0.000")
    _failure(element, report.problems)
    if report.log:
        ET.SubElement(element, "system-out").text = _text(f"log: {report.log}")


def _case(suite: ET.Element, case: CaseVerdict, report: Report) -> None:
    repeated = any(other.repeat > 1 for other in report.cases)
    element = ET.SubElement(
        suite,
        "testcase",
        classname=_text(report.matrix),
        name=_text(f"{case.id} (repeat {case.repeat})" if repeated else case.id),
        time=_seconds(case.seconds or 0),
    )
    _failure(element, case.problems)
    lines = [] if case.baseline is None else [f"baseline: {case.baseline}"]
    off = {name: difference(case.largest_relative_difference, case.tolerance, name) for name in Numbers.model_fields}
    lines += [f"largest relative difference, {name}: {text}" for name, text in off.items() if text != "-"]
    if case.baseline is None:
        lines.append(f"reference: {describe_reference(case.reference)}")
        lines.append(f"weights moved: {describe_spread(case.spread)}")
    lines += [f"log: {path}" for path in report.logs.get(case.id, ())]
    if lines:
        ET.SubElement(element, "system-out").text = _text("\n".join(lines))


def _skipped(suite: ET.Element, report: Report) -> None:
    """The cases that are known to train wrongly, and are not among those that count."""
    counted = {case.id for case in report.cases}
    skipped: dict[str, list[str]] = {}
    for entry in report.not_vouched:
        for case in entry.cases:
            if case.id not in counted:
                why = f"known to train wrongly, {case.result}: {entry.why} {case.problem}"
                skipped.setdefault(case.id, []).append(why.rstrip())
    for name, reasons in skipped.items():
        element = ET.SubElement(suite, "testcase", classname=_text(report.matrix), name=_text(name), time="0.000")
        ET.SubElement(element, "skipped", message=_text("; ".join(reasons)))


def _failure(element: ET.Element, problems: Sequence[Problem]) -> None:
    """One element for all of them: GitLab shows the first alone."""
    if not problems:
        return
    first = problems[0]
    kinds = ",".join(dict.fromkeys(problem.check for problem in problems))
    message = first.text.splitlines()[0][:MESSAGE_LENGTH] if first.text else first.check
    failure = ET.SubElement(element, "failure", type=_text(kinds), message=_text(f"{first.check}: {message}"))
    failure.text = _text("\n".join(f"{problem.check}: {problem.text}" for problem in problems))


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
