"""The parts of `certify` that need no image: which cases are chosen, what is shown, how a failure is reported."""

import json
from pathlib import Path

import pytest
from helpers.certificates import swept
from helpers.notes import Notes
from unit.certify.plans import CASES, lines_of, plan_of

from envbuild.catalog.catalog import Catalog, HostDistribution, select
from envbuild.certify.cases.selection import WantedCases, chosen_cases
from envbuild.certify.certificate.statement import MeasuredBandwidth
from envbuild.certify.judge.results import Results
from envbuild.certify.models import CaseVerdict, Numbers, Problem, Step
from envbuild.certify.report.console import failure, show, show_network
from envbuild.certify.report.network import MOST_ROWS, network_lines, network_rows
from envbuild.certify.run.watcher import Watcher
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.core.progress import SilentReporter
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.results import CaseLine, EndLine, RunLine

CATALOG = Catalog.open(Path("/nonexistent"))
SELECTION = select(CATALOG, "mcore", "cpu", "debian12", HostDistribution(distribution="debian", release="12"))
MATRIX = CATALOG.matrix("certify-quick")


def chosen(*only: str, max_gpus: int | None = None, nodes: int = 1) -> list[str]:
    wanted = WantedCases(only=only, max_gpus=max_gpus, nodes=nodes)
    return [case.id for case in chosen_cases(MATRIX, "certify-quick", SELECTION, wanted)]


@pytest.mark.parametrize(
    ("only", "ids"),
    [
        (["gpt-fp32-tp2"], ["gpt-fp32-baseline", "gpt-fp32-tp2"]),
        (["gpt-fp32-pp2", "gpt-fp32-dp2", "gpt-fp32-pp2"], ["gpt-fp32-baseline", "gpt-fp32-dp2", "gpt-fp32-pp2"]),
    ],
)
def test_only_brings_the_baseline_along(only, ids):
    assert chosen(*only) == ids
    assert set(ids) < set(chosen())


def test_only_an_unknown_case_lists_the_known():
    with pytest.raises(UsageError, match="has no case 'gpt-fp32-tp3'") as caught:
        chosen("gpt-fp32-tp3")
    assert "gpt-fp32-tp2" in caught.value.why


def test_only_a_baseline_compares_nothing():
    with pytest.raises(UsageError, match="gpt-fp32-baseline alone compares nothing") as caught:
        chosen("gpt-fp32-baseline")
    assert "gpt-fp32-tp2" in caught.value.fix


def test_cases_of_more_gpus_are_left_out():
    every, few = chosen(), chosen(max_gpus=2)
    assert {"gpt-fp32-baseline", "gpt-fp32-tp2", "gpt-fp32-pp2"} < set(few)
    assert "gpt-fp32-tp2-pp2" in set(every) - set(few)
    assert chosen(max_gpus=64) == every
    assert chosen("gpt-fp32-tp2", "gpt-fp32-tp2-pp2", max_gpus=2) == ["gpt-fp32-baseline", "gpt-fp32-tp2"]
    with pytest.raises(UsageError, match="nothing is compared on 2 GPUs") as caught:
        chosen("gpt-fp32-tp2-pp2", max_gpus=2)
    assert "--max-gpus N" in caught.value.fix


def test_cases_over_more_nodes_are_left_out():
    one, two = chosen(), chosen(nodes=2)
    assert [name for name in two if name not in one] == [name for name in two if "-n2" in name] != []
    assert chosen(nodes=4) == two
    assert chosen("gpt-fp32-pp2-n2", nodes=2) == ["gpt-fp32-baseline", "gpt-fp32-pp2-n2"]
    with pytest.raises(UsageError, match="gpt-fp32-pp2-n2 is left out") as caught:
        chosen("gpt-fp32-pp2-n2", "gpt-fp32-pp2")
    assert caught.value.why == "The run has 1 node, and it is over 2 nodes (--nodes 2)."


def test_matrix_of_baselines_compares_nothing():
    bare = MATRIX.model_copy(update={"cases": MATRIX.cases[:1]})
    for only in ((), ("gpt-fp32-baseline",)):
        with pytest.raises(ConfigurationError, match="compares nothing"):
            chosen_cases(bare, "bare", SELECTION, WantedCases(only=only))


class Shown(Notes):
    update = Notes.note


def shown(*events) -> list[str]:
    reporter = Shown()
    watcher = Watcher(reporter)
    for event in events:
        watcher(event if isinstance(event, str) else json.dumps(event))
    return reporter.lines


@pytest.mark.parametrize(
    ("events", "last"),
    [
        ([{"event": "case-started", "case": "c", "index": 1, "total": 6, "devices": [0]}], "0 done; c starts"),
        ([{"event": "step", "case": "c", "step": 3, "loss": 5.5}], "0 done; c step 3, loss 5.50000"),
        ([{"event": "step", "case": "c", "step": 3, "loss": None}], "0 done; c step 3, loss not finite"),
        (
            [{"event": "case-started", "case": "c"}, {"event": "case-started", "case": "d"}],
            "0 done; c starts; d starts",
        ),
        (
            [
                {"event": "case-started", "case": "c"},
                {"event": "case-started", "case": "d"},
                {"event": "case-finished", "case": "c", "status": "failed", "seconds": 1.25},
            ],
            "1 done; d starts",
        ),
        ([{"event": "bandwidth"}], "  bandwidth measured"),
        ([{"event": "bandwidth", "nodes": [0]}], "  bandwidth measured"),
        ([{"event": "bandwidth", "nodes": [3]}], "bandwidth measured: node 3"),
        ([{"event": "bandwidth", "nodes": [1, 3]}], "bandwidth measured: 2 nodes, 1 to 3"),
    ],
)
def test_progress_of_events(events, last):
    assert shown(*events)[-1] == last


def test_case_that_is_begun_once_more_is_noted():
    event = {"event": "case-restarted", "case": "c", "repeat": 1, "message": "it died\x1b[2J"}
    assert shown(event) == ["  c: started again: it died\\x1b[2J", "0 done; c starts"]


@pytest.mark.parametrize(("more", "name"), [({}, "c"), ({"repeat": 1}, "c"), ({"repeat": 2}, "c (repeat 2)")])
def test_end_of_a_case_is_noted(more, name):
    event = {"event": "case-finished", "case": "c", "status": "completed", "seconds": 1.25, **more}
    assert shown(event) == [f"  {name}: completed in 1.2 s", "1 done"]


def test_repeats_are_noted_when_they_are_whole():
    reporter = Shown()
    watcher = Watcher(reporter, cases=2, repeats=30)
    for repeat in (1, 2):
        for case, status in (("c", "completed"), ("d", "failed" if repeat == 2 else "completed")):
            event = {"event": "case-finished", "case": case, "status": status, "seconds": 1.25, "repeat": repeat}
            watcher(json.dumps(event))
    assert [text for text in reporter.lines if "done" not in text] == [
        "  repeat 1 of 30: 2 cases ended (2 of 60)",
        "  d (repeat 2): failed in 1.2 s",
        "  repeat 2 of 30: 2 cases ended (4 of 60)",
    ]


@pytest.mark.parametrize(
    "line",
    ["", "words for people", "{", '"event"', "5", "{}", '["event"]', '{"event": "step"}', '{"event": "new"}',
     '{"event": "case-finished", "case": "c", "status": "s", "seconds": "x"}'],
)  # fmt: skip
def test_progress_leaves_other_lines_to_the_log(line):
    assert shown(line) == []


def test_why_the_runner_cannot_begin_is_kept():
    watcher = Watcher(SilentReporter())
    watcher(json.dumps({"event": "cannot-run", "reason": "too-few-gpus", "message": "needs 4, there are 2"}))
    assert watcher.cannot_run == ("too-few-gpus", "needs 4, there are 2")


def verdict(case, **changes):
    fields = {"passed": True, "problems": (), "largest_relative_difference": Numbers(), "seconds": None, "steps": ()}
    baseline = None if case.is_baseline else case.baseline_id
    return CaseVerdict(id=case.id, baseline=baseline, **(fields | changes))


def changed(model, **changes):
    return model.model_copy(update=changes)


PASSED = tuple(verdict(case) for case in CASES)
PROBLEMS = (Problem(check="parity-loss", text="step 1: loss ..."), Problem(check="steps", text="step 2: ..."))
FAILED = verdict(CASES[1], passed=False, problems=PROBLEMS)
ELSEWHERE = Problem(check="environment", text="shadowed: torch: expected a, found b")
BROKEN = Problem(check="hardware", text="GPU 1 had 3 uncorrectable ECC errors while the cases ran")
SLOW = Problem(check="bandwidth", text="all_reduce of 2 ranks reaches 1 GB/s, the floor is 2")


def results(*cases):
    """Those of a plan, with the lines of these cases."""
    run, *_, end = lines_of(plan_of())
    return Results(
        run=read_object(RunLine, run, "run"),
        end=read_object(EndLine, end, "end"),
        cases={(case.case, case.repeat): case for case in cases},
        findings=(),
    )


def failed_line(log):
    """The line of a case whose rank 1 failed, with its log."""
    failure = {"kind": "exception", "rank": 1, "exit_status": 1, "message": "boom", "log": log}
    template = lines_of(plan_of())[1]
    return read_object(CaseLine, {**template, "case": FAILED.id, "status": "failed", "failure": failure}, "case")


def test_network_is_printed_by_nodes_with_what_drains_a_bad_one():
    notes = Notes()
    failure = {"failure": "not done after 300 s", "points": [], "all_gather": [], "all_to_all": []}
    sweeps = [swept([0, 1], 187.4), swept([2, 3], 1, **failure), swept([0, 1, 2], 160)]
    measured = [MeasuredBandwidth.model_validate(sweep) for sweep in sweeps]
    drain = 'scontrol update NodeName=h3 State=DRAIN Reason="envbuild: fails"'
    show_network(network_rows(measured, {0: "h0", 2: "h2"}), [drain], notes)
    assert notes.lines == [
        "  network   nodes 0 (h0) and 1: NET/IB, P2P/CUMEM, all_reduce 187, all_gather 187, all_to_all 187 GB/s",
        "  network   nodes 2 (h2) and 3: not done after 300 s",
        "  network   3 nodes: NET/IB, P2P/CUMEM, all_reduce 160, all_gather 160, all_to_all 160 GB/s",
        f"  drain     {drain}",
    ]


def test_of_many_pairs_the_terminal_has_the_slowest():
    pairs = [MeasuredBandwidth.model_validate(swept([node, node + 1], 100 + node)) for node in range(0, 200, 2)]
    lines = list(network_lines(network_rows(pairs[::-1], {})))
    assert len(lines) == MOST_ROWS + 1
    assert lines[0].startswith("nodes 0 and 1: ")
    assert lines[-1] == "... and 84 faster; the report has all"


@pytest.mark.parametrize(
    ("verdicts", "problems", "what", "why"),
    [
        (
            (PASSED[0], FAILED, *PASSED[2:]),
            (),
            "1 of 6 cases failed",
            ["gpt-fp32-dp2: parity-loss: step 1: loss ...", "gpt-fp32-dp2: steps: step 2: ..."],
        ),
        (PASSED, (ELSEWHERE,), "the environment is not what was locked", [str(ELSEWHERE)]),
        (PASSED, (BROKEN,), "the GPUs are not what they have to be, or had errors", [str(BROKEN)]),
        (PASSED, (SLOW,), "the network between the GPUs is not what it has to be", [str(SLOW)]),
    ],
)
def test_failure_names_cases_checks_and_where_the_logs_are(verdicts, problems, what, why):
    error = failure(verdicts, problems, results(), Path("/run"))
    assert error.what == what
    assert error.why.splitlines() == why
    assert "No certificate was written" in error.fix
    assert "/run" in error.fix
    assert error.log is None
    assert error.as_json()["problems"] == [problem.model_dump() for problem in problems]
    assert [case["passed"] for case in error.as_json()["cases"]] == [verdict.passed for verdict in verdicts]


def test_failure_shows_the_log_of_the_rank_that_failed(tmp_path):
    """Where known failures are looked for."""
    log = tmp_path / "results" / "logs" / "rank1.log"
    log.parent.mkdir(parents=True)
    log.write_text("RuntimeError: boom")
    failed = failed_line("logs/rank1.log")
    assert failure((FAILED,), (), results(failed), tmp_path).log == log


@pytest.mark.parametrize("named", ["../outside.log", "link.log", "/absolute"])
def test_log_that_is_not_among_those_of_the_run_is_not_shown(tmp_path, named):
    """A results file may name any file; its end would stand in the report."""
    outside = tmp_path / "run/outside.log"
    (tmp_path / "run/results").mkdir(parents=True)
    outside.write_text("secret")
    (tmp_path / "run/results/link.log").symlink_to(outside)
    log = str(outside) if named == "/absolute" else named
    failed = failed_line(log)
    assert failure((FAILED,), (), results(failed), tmp_path / "run").log is None
    (tmp_path / "run/smoke.log").touch()
    assert failure((FAILED,), (), results(failed), tmp_path / "run").log == tmp_path / "run/smoke.log"


def test_one_line_a_case():
    reporter = Shown()
    numbers = Numbers(loss=1e-8, grad_norm=2e-7, weights=3e-6)
    agrees = changed(PASSED[1], largest_relative_difference=numbers)
    step = Step(step=1, loss=6.0, grad_norm=1.0, seconds=0.1)
    show(
        (changed(PASSED[0], steps=(step,)), agrees, changed(FAILED, repeat=2)),
        (Problem(check="steps", text="x"),),
        reporter,
    )
    within = "loss within 1.0e-08, grad norm within 2.0e-07, gradients within 0.0e+00, weights within 3.0e-06"
    assert reporter.lines == [
        "  baseline  gpt-fp32-baseline: loss 6.00000; reference: not compared",
        f"  agrees    gpt-fp32-dp2 (1 of 2 repeats): {within}",
        "  FAILED    gpt-fp32-dp2 (repeat 2): parity-loss: step 1: loss ... (and 1 more)",
        "  FAILED    steps: x",
    ]


def test_a_line_begins_with_the_gradients_which_name_a_tensor():
    reporter = Shown()
    gradients = Problem(check="parity-gradients", text="the gradient of a.weight ...")
    show((changed(FAILED, problems=(*PROBLEMS, gradients)),), (), reporter)
    assert reporter.lines == ["  FAILED    gpt-fp32-dp2: parity-gradients: the gradient of a.weight ... (and 2 more)"]


def test_failure_of_many_repeats_names_them_and_can_be_read():
    verdicts = [changed(FAILED, repeat=number) for number in range(1, 101)]
    error = failure(verdicts, (), results(), Path("/run"))
    assert error.what == "100 of 100 runs of cases failed"
    lines = error.why.splitlines()
    assert lines[2] == "gpt-fp32-dp2 (repeat 2): parity-loss: step 1: loss ..."
    assert (len(lines), lines[-1]) == (60, "... and 141 more; --json and the report have all")
    assert len(error.as_json()["cases"]) == 100
