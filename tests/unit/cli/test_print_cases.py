"""`certify --print-cases`, and by which matrix a case is."""

import json

import pytest
from helpers.locks import MAIN, make_lock
from helpers.stack_files import write_stack

from envbuild.catalog.stack import Driver
from envbuild.cli import bisect as bisect_command
from envbuild.cli.main import run
from envbuild.core.errors import UsageError
from envbuild.nightly.bisect.bisect import BisectRequest


def test_print_cases(project, capsys):
    arguments = ["certify", "--stack", "mcore", "--target", "cpu", "--base", "debian12", "--print-cases"]
    assert run([*arguments, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    cases = {case["id"]: case for case in output["cases"]}
    assert cases["gpt-fp32-tp2-pp2"] == {
        "id": "gpt-fp32-tp2-pp2",
        "processes": 4,
        "nodes": 1,
        "baseline": "gpt-fp32-baseline",
        "compares_weights": False,
    }
    assert {case["why"] for case in output["left_out"]} == {"it is over 2 nodes (--nodes 2)"}
    assert run([*arguments, "--only", "gpt-fp32-dp2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["gpt-fp32-baseline  1 process", "gpt-fp32-dp2       2 processes"]
    assert "pairs of axes: " in lines[2]


def test_print_cases_takes_the_packages_of_the_lock(project, capsys):
    arguments = ["certify", "--stack", "mcore", "--target", "a100", "--base", "debian12-cu130"]
    arguments += ["--matrix", "certify-full", "--print-cases", "--json"]
    lock = make_lock(project / "lockfiles/mcore/debian12-cu130", f"{MAIN}mamba-ssm==2.2.4\n")
    assert run(arguments) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["lock"] == lock.digest
    assert "hybrid-bf16-pp2" in {case["id"] for case in output["cases"]}
    assert "mamba-ssm" not in " ".join(case["why"] for case in output["left_out"])


def test_print_cases_without_a_lock_notes_whose_packages_it_takes(project, capsys):
    write_stack(project, "bare", {"torch": {"version": "==2.13.0"}}, base="debian12")
    assert run(["certify", "--stack", "bare", "--target", "cpu", "--base", "debian12", "--print-cases", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["lock"] is None
    assert "there is no lock of stack bare on base debian12: cases are left out by the packages that the stack's" in err


def test_print_cases_of_a_matrix_without_a_case_of_the_stack_is_refused_as_its_run_is(capsys):
    words = ["certify", "--stack", "nemo-2.7", "--target", "h200", "--matrix", "certify-quick"]
    for more in (["--print-cases"], []):
        assert run([*words, *more, "--json"]) == 8
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["reason"], "driver nemo" in error["what"]) == ("no-cases", True)


@pytest.mark.parametrize("driver", [None, Driver.NEMO, Driver.BRIDGE])
def test_default_matrix_is_that_of_the_driver_that_the_lock_names(project, capsys, driver):
    """Stack nemo trains with NeMo or, at commits since 3.0, with Megatron-Bridge."""
    words = ["certify", "--stack", "nemo", "--target", "h200", "--base", "debian13-cu130"]
    matrix = f"{driver.value if driver else 'nemo'}-recipes"
    if driver:
        make_lock(project / "lockfiles/nemo/debian13-cu130", stack="nemo", driver=driver)
    assert run([*words, "--print-cases", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matrix"] == matrix
    if driver:
        assert run([*words, "--in", "venv", "--plan-out", str(project / "plan")]) == 0
        assert f"--matrix {matrix} " in (project / "plan/README.md").read_text()


def test_a_bisection_of_a_case_is_by_the_matrix_of_the_driver_that_the_lock_names(project, monkeypatch):
    asked: list[BisectRequest] = []

    def stop(request: BisectRequest, *_: object) -> None:
        asked.append(request)
        raise UsageError("enough")

    monkeypatch.setattr(bisect_command, "bisect", stop)
    base = make_lock(project / "good", stack="nemo", driver=Driver.NEMO).base
    place = base.model_copy(update={"name": "debian13-cu130"})
    for name, driver in (("good", Driver.NEMO), ("bad", Driver.BRIDGE)):
        make_lock(project / name, stack="nemo", driver=driver, base=place)
    assert run(["bisect", "good", "bad", "--case", "a-case"]) == 2
    assert asked[0].trial.text == "case a-case of matrix bridge-recipes"


def test_print_cases_of_a_named_lock_that_is_not_there_is_refused(project, capsys):
    words = ["certify", "--stack", "mcore", "--target", "cpu", "--base", "debian12", "--print-cases"]
    assert run([*words, "--name", "no"]) == 3
    assert "there is no lock of stack mcore on base debian12 named no" in capsys.readouterr().err


def test_print_cases_lists_what_is_left_out_and_why(project, capsys):
    arguments = ["certify", "--stack", "mcore", "--target", "a100", "--matrix", "certify-full", "--print-cases"]
    assert run([*arguments, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    left_out = {case["id"]: case["why"] for case in output["left_out"]}
    assert left_out["hybrid-bf16-pp2"] == "it needs the package mamba-ssm, which the environment does not have"
    assert left_out["te-fp8-dp2"] == "precision = fp8 needs GPUs of SM 89 or newer; the target has SM 80"
    assert not left_out.keys() & {case["id"] for case in output["cases"]}
    assert run([*arguments, "--max-gpus", "2", "--json"]) == 0
    fewer = {case["id"]: case["why"] for case in json.loads(capsys.readouterr().out)["left_out"]}
    assert fewer["te-fp8-dp2"] == left_out["te-fp8-dp2"]
    assert run(arguments) == 0
    left = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert [line.partition(": ")[0] for line in left] == [
        "left out, it is for device cpu",
        "left out, it needs the package mamba-ssm, which the environment does not have",
        "left out, it needs the package flash-attn, which the environment does not have",
        "left out, precision = fp8 needs GPUs of SM 89 or newer; the target has SM 80",
        "left out, it is over 2 nodes (--nodes 2)",
        "left out, it is over 4 nodes (--nodes 4)",
        *["left out, known to train wrongly"] * 7,
    ]
