"""`certify` on versions that are known to train some cases wrongly: what runs, what passes, what is not vouched for."""

import json
import shlex
from dataclasses import replace

import pytest
from helpers.certify_world import World
from helpers.fake_runner import results_of, write

from envbuild.catalog.catalog import Catalog
from envbuild.certify.certificate.keys import make_keys
from envbuild.certify.issue import vouched
from envbuild.certify.models import CaseVerdict, Numbers
from envbuild.cli.main import run
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CertificationCannotRunError, CertificationFailedError

GATHERED, TP2, BASELINE = "gpt-fp32-tp2-gathered", "gpt-fp32-tp2", "gpt-fp32-baseline"
# megatron-core 0.16.1 is locked.
ENTRIES = [
    *("gathered-logits", "interleaved-batched-p2p", "latent-key-in-tensor-parallel", "learning-rates-after-loading"),
    *("loss-gradient-in-bf16", "mamba-epsilon", "masked-loss-in-contexts", "optimizer-state-in-buckets"),
    *("overlap-of-instances", "router-losses-per-token", "sequence-loss-per-token", "sinks-of-other-ranks"),
    "whole-experts",
]
WHY = "the loss of gathered logits is that of logits that are split"
CURE = "Leave the logits split (parallel_output = true)."
CASES = """
[[cases]]
model = "gpt"

[[cases]]
model = "gpt"
tensor = 2
parallel_output = [true, false]
"""


@pytest.fixture
def mixed(world: World) -> World:
    """A world with a matrix of a right and a wrong case."""
    quick = world.selection.catalog.path("matrices", "certify-quick").read_text()
    matrices = world.project / "envs" / "matrices"
    matrices.mkdir(parents=True, exist_ok=True)
    (matrices / "mixed.toml").write_text(quick.partition("[[cases]]")[0] + CASES)
    world.selection = replace(world.selection, catalog=Catalog.open(world.project))
    return world


def certify(world: World, matrix: str = "mixed", **options: object):
    return world.certify(matrix_name=matrix, only=(), **options)


def outcomes(done) -> dict[str, list[tuple[str, str]]]:
    """How the cases of each entry ended."""
    return {
        entry.name: [(case.id, case.result) for case in entry.cases] for entry in done.statement.predicate.not_vouched
    }


def test_affected_case_is_left_out_and_not_vouched_for(mixed):
    done = certify(mixed)
    predicate = done.statement.predicate
    assert [case.id for case in predicate.cases] == [BASELINE, TP2]
    assert [case["id"] for case in mixed.calls[0]["plan"]["cases"]] == [BASELINE, TP2]
    assert predicate.whole_matrix
    assert outcomes(done) == {**{name: [] for name in ENTRIES}, "gathered-logits": [(GATHERED, "not run")]}
    entry = predicate.not_vouched[0]
    assert (entry.versions, entry.what) == ("megatron-core 0.16.1", "tensor > 1, parallel_output = false")
    assert (entry.why, entry.fix, entry.evidence.split(";")[0]) == (
        WHY,
        CURE,
        "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    )
    assert not certify(mixed).written


@pytest.mark.parametrize(
    ("scale", "cases", "result"),
    [(1.1, [BASELINE, TP2], "failed"), (1.0, [BASELINE, TP2, GATHERED], "passed")],
)
def test_known_wrong_case_that_runs_fails_no_certificate(mixed, scale, cases, result):
    mixed.faults = {"scale": {GATHERED: scale}}
    done = certify(mixed, run_known_wrong=True)
    assert [case.id for case in done.statement.predicate.cases] == cases
    assert outcomes(done)["gathered-logits"] == [(GATHERED, result)]
    assert (
        done.statement.predicate.not_vouched[0]
        .cases[0]
        .problem.startswith("parity-loss: step 1: " if result == "failed" else "")
    )
    assert any(f"wrong, as known {GATHERED}: " in note for note in mixed.reporter.lines) is (result == "failed")
    assert any(f"known     {WHY} (gathered-logits). {CURE}" in note for note in mixed.reporter.lines) is (
        result == "failed"
    )
    assert not certify(mixed, run_known_wrong=True).written


def test_another_case_that_fails_still_fails(mixed):
    mixed.faults = {"scale": {GATHERED: 1.1, TP2: 1.1}}
    with pytest.raises(CertificationFailedError) as caught:
        certify(mixed, run_known_wrong=True)
    assert caught.value.what == "2 of 3 cases failed, 1 of them known to train wrongly"
    assert caught.value.why.splitlines()[-1] == f"{WHY} (gathered-logits). {CURE}"
    assert mixed.certificates() == []


def test_entry_that_is_new_makes_a_new_certificate(mixed):
    before = certify(mixed)
    conflicts = mixed.project / "envs" / "conflicts"
    conflicts.mkdir()
    (conflicts / "new.toml").write_text(
        'summary = "s"\npackages = { torch = ">=2" }\nevidence = "seen"\nfix = "Do not."\n'
        'cases = [{ recompute = "full" }]\nshown_by = { matrix = "m", case = "c" }\n'
    )
    # The next command reads the project's files anew.
    vars(mixed.selection.catalog).pop("conflicts")
    after = certify(mixed)
    assert after.written
    assert after.statement.predicate.key != before.statement.predicate.key
    assert outcomes(after)["new"] == []


def test_nothing_that_is_right_is_left(mixed):
    with pytest.raises(CertificationCannotRunError, match="no case is left to run") as caught:
        certify(mixed, "known-wrong")
    error = caught.value
    assert (error.reason, mixed.calls) == ("known-wrong", [])
    assert "--run-known-wrong" in error.fix
    why = f"known to train wrongly: {WHY} (gathered-logits). {CURE}"
    assert f"{GATHERED}: {why}" in error.why.splitlines()
    with pytest.raises(CertificationCannotRunError, match=f"{GATHERED} is left out") as caught:
        mixed.certify(matrix_name="mixed", only=(TP2, GATHERED))
    assert caught.value.why == f"{GATHERED}: {why}"
    wrong = {"gpt-fp32-pp2-vp2-bp2p": 1.1, GATHERED: 1.1}
    mixed.faults = {"scale": wrong}
    with pytest.raises(CertificationFailedError, match=r"no case is left to certify: .* and do \(2 of 3 failed\)"):
        mixed.certify(matrix_name="known-wrong", only=tuple(wrong), run_known_wrong=True)


def verdict(case: str, *, baseline: str | None = "b", passed: bool = True, repeat: int = 1) -> CaseVerdict:
    return CaseVerdict(
        id=case,
        baseline=baseline,
        repeat=repeat,
        passed=passed,
        problems=(),
        largest_relative_difference=Numbers(),
        seconds=None,
        steps=(),
    )


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, ["b", "c", "c", "d"]),
        ({0: {"case": "b", "baseline": None, "passed": False}}, []),
        ({2: {"case": "c", "repeat": 2, "passed": False}}, ["b", "d"]),
    ],
)
def test_case_is_vouched_for_if_it_and_its_baseline_passed_in_every_repeat(changes, left):
    made = [{"case": "b", "baseline": None}, {"case": "c"}, {"case": "c", "repeat": 2}, {"case": "d"}]
    verdicts = [verdict(**changes.get(index, case)) for index, case in enumerate(made)]
    assert [case.id for case in vouched(verdicts)] == left


def test_reports_and_commands_show_what_is_not_vouched_for(mixed, answer, command, capsys, tmp_path):
    keys = make_keys(tmp_path, "own", None)
    assert command("--matrix", "mixed", "--key", keys.private) == 0
    line = (
        f"not vouched for: tensor > 1, parallel_output = false: {WHY} (megatron-core 0.16.1). {CURE} "
        f"Cases: {GATHERED} not run"
    )
    (counted,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("not vouched for")]
    assert counted.startswith(f"not vouched for: {len(ENTRIES)} known faults of the locked versions; envbuild ")
    _, done = answer("--matrix", "mixed")
    assert [entry["name"] for entry in done["not_vouched"]] == ENTRIES
    page, junit = mixed.certificates()[0].with_name("report.html"), mixed.certificates()[0].with_name("junit.xml")
    assert "Not vouched for" in page.read_text()
    assert f'<p class="quiet">{GATHERED}: not run</p>' in page.read_text()
    assert 'skipped="1"' in junit.read_text()
    assert 'message="known to train wrongly, not run: the loss of gathered' in junit.read_text()
    (tmp_path / "trust.toml").write_text(f'[keys.own]\nfile = "{keys.public}"\n')
    # The command that the line names prints them.
    assert run(shlex.split(counted.partition("; ")[2].removesuffix(" lists them"))[1:]) == 0
    assert line in capsys.readouterr().out.splitlines()
    for words in (("show",), ("verify", "--trust", str(tmp_path / "trust.toml"))):
        assert run(["certificate", words[0], str(mixed.certificates()[0]), *words[1:]]) == 0
        assert line in capsys.readouterr().out.splitlines()


def test_print_cases_lists_what_is_left_out_and_why(mixed, answer):
    _, shown = answer("--matrix", "mixed", "--print-cases")
    assert [case["id"] for case in shown["cases"]] == [BASELINE, TP2]
    why = f"known to train wrongly: {WHY} (gathered-logits). {CURE}"
    assert shown["left_out"] == [{"id": GATHERED, "why": why}]
    _, shown = answer("--matrix", "mixed", "--print-cases", "--run-known-wrong")
    assert [case["id"] for case in shown["cases"]] == [BASELINE, TP2, GATHERED]
    assert shown["left_out"] == []


def test_plan_for_another_machine_is_judged_with_the_option_that_it_was_written_with(mixed, answer, tmp_path):
    folder = tmp_path / "plan"
    words = ("--matrix", "mixed", "--in", "venv")
    assert answer(*words, "--run-known-wrong", "--plan-out", folder)[0] == 0
    lines = results_of((folder / "plan.json").read_bytes(), smoke_digest=sha256_file(folder / "smoke.pyz"))
    write(folder / "results" / "results.jsonl", lines)
    shown = next(line for line in (folder / "README.md").read_text().splitlines() if "--judge DIR" in line)
    assert "--run-known-wrong" in shlex.split(shown)
    status, error = answer(*words, "--judge", folder)
    assert (status, error["reason"]) == (13, "plan")
    status, done = answer(*words, "--judge", folder, "--run-known-wrong")
    assert (status, done["cases"][-1]["id"], done["cases"][-1]["known_wrong"]) == (0, GATHERED, ["gathered-logits"])


def test_lock_warns_of_what_trains_wrongly_with_the_cure(mixed, command, capsys):
    words = ["lock", "--stack", "mcore", "--target", "cpu", "--base", "debian12", "--no-verify"]
    assert run(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  warning: ")]
    assert len(lines) == len(ENTRIES)
    assert lines[0] == (
        "  warning: megatron-core 0.16.1 trains wrongly: tensor > 1, parallel_output = false. Leave the logits split "
        "(parallel_output = true)."
    )
    assert lines[3].endswith(". Take megatron-core>=0.19. Or train without decoupled_lr, or do not resume.")
    assert run([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["built"], answer["warnings"]) == (False, [])
    assert [entry["name"] for entry in answer["known_wrong"]] == ENTRIES
    assert answer["known_wrong"][0]["shown_by"] == {"matrix": "known-wrong", "case": GATHERED}
