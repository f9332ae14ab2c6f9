"""Any content of a results file is judged or refused with a reason, and its texts reach people as text."""

import copy
import json
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from helpers.certificates import SHA, statement
from helpers.fake_runner import write
from helpers.reports import failed
from unit.certify.plans import BASELINE, MATRIX, TP2, line, lines_of, plan_of, typed, with_case

from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.sign import write_certificate
from envbuild.certify.issue import evidence_of
from envbuild.certify.judge.judge import judge, run_problems
from envbuild.certify.judge.results import read_results
from envbuild.certify.report.console import failure, show
from envbuild.certify.report.describe import lines as lines_about
from envbuild.certify.report.junit import junit_xml
from envbuild.certify.report.model import report_of
from envbuild.certify.report.page import page_html
from envbuild.certify.run.run import FinishedRun
from envbuild.cli.main import run
from envbuild.core.errors import ResultsRefusedError
from envbuild.core.progress import SilentReporter

CASES = tuple(case for case in with_case(TP2, compare_weights=True) if case.id in (BASELINE, TP2))
SWEEP = {"ranks": 2, "sizes_bytes": [8], "floor_gigabytes_per_second": 1.0}
PLAN = plan_of(cases=CASES, bandwidth=SWEEP)
TYPED = typed(PLAN)
DIGEST = TYPED.digest
FINDING = {"code": "shadowed", "package": "torch", "expected": "a", "found": "b"}
FAILURE = {"rank": 1, "exit_status": 1, "kind": "exception", "message": "boom", "log": "x/y.log"}
# In the words of JSON, since Python's json would not write all of them.
HOSTILE = (
    r'"\ud800\u001b[2J\u0000\u202e<script>&\"\n]]>"',
    "null", "true", "1.0", "1e308", "1e999", "5e-324", "9223372036854775807", "1" + "0" * 400,
    '"2026-99-99T99:99:99Z"', r'"2026-01-01T00:00:00Z\n"', "[[]]",
)  # fmt: skip


def healthy():
    return lines_of(PLAN, gpus=[{}], variables={"NCCL_DEBUG": "INFO"})


def broken():
    lines = healthy()
    line(lines, TP2).update(status="failed", failure=dict(FAILURE))
    lines[-1]["completed"] -= 1
    lines[0]["environment_findings"] = [dict(FINDING)]
    return lines


def places(value, path=()):
    """Every place in a JSON value; of a list the first alone."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def with_raw(lines, number, path, raw):
    """The text of the lines with JSON's ``raw`` at a place of one of them."""
    lines = copy.deepcopy(lines)
    target = lines[number]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = "@here@"
    return "".join(json.dumps(line).replace('"@here@"', raw) + "\n" for line in lines)


def report_from(path, folder):
    """All that is made of a results file: the report, and the certificate where everything passed."""
    results = read_results(path, TYPED)
    verdicts, problems = judge(CASES, MATRIX, results, TYPED), run_problems(TYPED, results)
    show(verdicts, problems, SilentReporter())
    run = FinishedRun(folder=folder, plan=TYPED, results=results, results_digest=DIGEST)
    measured = evidence_of(SimpleNamespace(smoke_digest=SHA["smoke"]), run, "loop").measured
    if problems or not all(verdict.passed for verdict in verdicts):
        error = failure(verdicts, problems, results, folder)
        json.dumps(error.as_json(), allow_nan=False)
        more = {"findings": results.findings, "measured": measured}
        return failed(what=error.what, cases=verdicts, problems=problems, **more)
    made = statement(measured=measured, cases=verdicts)
    write_certificate(folder / "certificate", made, None)
    certificate, _ = read_certificate(folder / "certificate")
    assert all(line.isprintable() for line in lines_about(certificate, None))
    return report_of(certificate, name="n", keyid=None, logs={})


@pytest.mark.parametrize(("kind", "lines"), [("run", broken), (TP2, broken), ("bandwidth", healthy), ("end", healthy)])
def test_any_value_in_any_place_is_judged_or_refused(tmp_path, lines, kind):
    written = lines()
    number = [line.get("case", line["type"]) for line in written].index(kind)
    path, ends = tmp_path / "results.jsonl", {"refused": 0, "judged": 0}
    for index, place in enumerate(places(written[number])):
        # Each place has a text, and one of the others in turn.
        for raw in (HOSTILE[0], HOSTILE[1 + index % (len(HOSTILE) - 1)]):
            path.write_text(with_raw(written, number, place, raw))
            try:
                report = report_from(path, tmp_path)
            except ResultsRefusedError as error:
                assert error.why
                ends["refused"] += 1
                continue
            ET.fromstring(junit_xml(report))
            page = page_html(report)
            page.encode()
            assert "<script" not in page
            ends["judged"] += 1
    assert ends["refused"] > 5
    # In the last line no value can be another.
    assert ends["judged"] or kind == "end"


def test_what_is_written_is_read_with_odd_bytes_written_out(tmp_path):
    """A variable or a path may hold bytes that are no text; Python has them as lone surrogates."""
    written = lines_of(PLAN, variables={"NCCL_X": "a\udcffb"})
    write(tmp_path / "results.jsonl", written)
    results = read_results(tmp_path / "results.jsonl", TYPED)
    assert results.run.machine.variables == {"NCCL_X": "a\\udcffb"}


# ---- what a person sees

EVIL = "boom\x1b[2J\x1b]0;owned\x07\r\n  agrees    all of it: \u202eyek\x9b1m \ud800" + "x" * (1 << 20)


@pytest.fixture
def printed(command, capsys):
    """The exit code of the command, and what it prints on both streams, which no terminal takes for a command."""

    def printed(*words):
        status = command("--only", TP2, *words)
        text = "".join(capsys.readouterr())
        assert all(char.isprintable() or char in "\n\t" for char in text)
        assert len(text) < 20_000
        assert not [line for line in text.splitlines() if line.strip().startswith("agrees    all of it")]
        return status, text

    return printed


def raises_evil(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line(lines, TP2).update(status="failed", failure={**FAILURE, "message": EVIL})
    lines[-1]["completed"] -= 1
    write(path, lines)


def test_failure_of_a_rank_reaches_a_terminal_as_one_short_line_of_text(world, printed):
    world.spoil = raises_evil
    status, text = printed()
    assert status == 7
    assert r"rank-exception: failed: boom\x1b[2J\x1b]0;owned\x07\r\n" in text
    (page,) = (world.project / "out").rglob("report.html")
    assert "boom" in page.read_text()
    ET.parse(page.with_name("junit.xml"))


def test_findings_plans_and_events_reach_a_terminal_as_text(world, printed):
    world.faults = {"findings": [{**FINDING, "found": EVIL}]}
    assert printed()[0] == 7
    world.faults = {"nonce": EVIL}
    assert printed()[0] == 13
    world.faults = {}
    world.output = [json.dumps({"event": "case-finished", "case": EVIL, "status": "failed\x1b[5m", "seconds": 1.0})]
    assert printed()[0] == 0
    world.output, world.status = [json.dumps({"event": "cannot-run", "reason": EVIL, "message": EVIL})], 4
    assert printed("--fresh")[0] == 8


def test_machine_with_odd_names_is_certified_and_shown_as_text(world, printed, capsys):
    def spoil(path):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[0]["machine"]["cpu_model"] = EVIL
        lines[0]["environment"]["versions"]["not-in-the-lock"] = EVIL
        write(path, lines)

    world.spoil = spoil
    assert printed()[0] == 0
    (certificate,) = world.certificates()
    assert run(["certificate", "show", str(certificate)]) == 0
    shown = capsys.readouterr().out
    assert r"boom\x1b[2J" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)
