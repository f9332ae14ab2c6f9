"""Real Megatron-Core on the CPU: every layout computes what one process computes, from the zipapp."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import zipapp
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.smoke_plans import Document, case_document, plan_document

SMOKE = Path(__file__).resolve().parents[2] / "smoke"
BASELINE = "gpt-fp32-baseline"
CASES = [
    case_document(BASELINE),
    case_document("gpt-fp32-dp2", BASELINE, data=2),
    case_document("gpt-fp32-tp2", BASELINE, tensor=2),
    case_document("gpt-fp32-pp2", BASELINE, pipeline=2),
    case_document("gpt-fp32-pp2-vp2", BASELINE, overlap=True, pipeline=2, virtual_pipeline=2),
    case_document("gpt-fp32-tp2-pp2", BASELINE, tensor=2, pipeline=2),
]
# The library's own default settings: nothing raises, the loss falls, and something else is computed.
WRONG = case_document("gpt-fp32-pp2-vp2-defaults", BASELINE, overlap=False, pipeline=2, virtual_pipeline=2)
# Another baseline: the same training once more, to compare two runs digit by digit.
AGAIN = case_document("gpt-fp32-again")

# Measured: layouts agree to 2e-8 in loss and 3e-7 in grad norm.
LOSS_RELATIVE = 1e-6
GRAD_NORM_RELATIVE = 1e-5


@dataclass(frozen=True)
class Run:
    """A run of the zipapp that has ended."""

    out: Path
    status: int
    errors: str
    run: Document
    cases: dict[str, Document]
    end: Document

    def numbers(self, case: str, name: str) -> list[float]:
        return [step[name] for step in self.cases[case]["steps"]]


@pytest.fixture(scope="module")
def smoke_pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("zipapp") / "smoke.pyz"
    zipapp.create_archive(SMOKE, target, filter=lambda path: "__pycache__" not in path.parts)
    return target


@pytest.fixture(scope="module")
def parity(smoke_pyz: Path, stack_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("parity")
    plan = folder / "plan.json"
    plan.write_text(json.dumps(plan_document(*CASES, WRONG, AGAIN)))
    out = folder / "out"
    # -I: the folder it is started in and PYTHONPATH play no part, as on a node.
    done = subprocess.run(
        [stack_python, "-I", smoke_pyz, "run", "--plan", plan, "--out", out],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    first, *cases, last = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return Run(out, done.returncode, done.stderr, first, {case["case"]: case for case in cases}, last)


def test_every_case_completes(parity: Run) -> None:
    failures = {name: case["failure"] for name, case in parity.cases.items() if case["status"] != "completed"}
    assert failures == {}
    assert parity.status == 0, parity.errors
    assert parity.end["completed"] == len(CASES) + 2


@pytest.mark.parametrize("case", [case["id"] for case in CASES[1:]])
def test_layout_reproduces_the_baseline(parity: Run, case: str) -> None:
    for name, relative in (("loss", LOSS_RELATIVE), ("grad_norm", GRAD_NORM_RELATIVE)):
        assert parity.numbers(case, name) == pytest.approx(parity.numbers(BASELINE, name), rel=relative, abs=0)


def test_baseline_trains(parity: Run) -> None:
    """The loss starts where a model that knows nothing starts, ln 512 = 6.24, and falls at every step."""
    losses = parity.numbers(BASELINE, "loss")
    assert losses[0] == pytest.approx(6.24, abs=0.1)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.05


def test_wrong_interleaving_differs_from_the_baseline(parity: Run) -> None:
    """Two stages with batched sends and receives: the next and the previous stage are the same rank."""
    losses, wrong = parity.numbers(BASELINE, "loss"), parity.numbers(WRONG["id"], "loss")
    assert wrong == sorted(wrong, reverse=True), "it is a silent failure: the loss falls"
    assert abs(wrong[0] - losses[0]) / losses[0] > 10 * LOSS_RELATIVE
    assert abs(wrong[-1] - losses[-1]) / losses[-1] > 1e-3
    assert parity.numbers(WRONG["id"], "grad_norm")[0] > 10 * parity.numbers(BASELINE, "grad_norm")[0]


def test_second_run_gives_the_same_digits(parity: Run) -> None:
    for name in ("loss", "grad_norm"):
        assert parity.numbers(AGAIN["id"], name) == parity.numbers(BASELINE, name)


def test_whole_matrix_takes_a_minute_or_less(parity: Run) -> None:
    assert sum(parity.cases[case["id"]]["seconds"] for case in CASES) < 60


def test_record_names_what_was_imported(parity: Run, stack_python: Path) -> None:
    environment = parity.run["environment"]
    site_packages = stack_python.parent.parent
    for module in ("torch", "megatron.core"):
        assert Path(environment["files"][module]).is_relative_to(site_packages)
    assert parity.run["smoke_digest"].startswith("sha256:")
    assert parity.run["environment_findings"] == []
    assert (parity.out / "checkpoints" / BASELINE / "initial" / "metadata.json").is_file()


def test_killed_rank_ends_its_case_and_no_other(smoke_pyz: Path, stack_python: Path, tmp_path: Path) -> None:
    """Rank 1 of a training that is under way is killed, as the kernel does when memory runs out."""
    cases = [case_document(BASELINE)]
    cases += [case_document(f"gpt-fp32-{name}", BASELINE, data=2) for name in ("victim", "next")]
    plan = plan_document(*cases)
    plan["models"]["gpt"].update(num_layers=1, hidden_size=16, num_attention_heads=2, sequence_length=8)
    for case in cases:
        case["training"].update(steps=400, micro_batch_size=8)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    out = tmp_path / "out"
    command = [stack_python, smoke_pyz, "run", "--plan", tmp_path / "plan.json", "--out", out]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["case"] == "gpt-fp32-victim" and event["step"] == 20:
            first_line = (out / "cases" / "gpt-fp32-victim" / "rank1.log").read_text().splitlines()[0]
            os.kill(int(first_line.rpartition(" pid ")[2]), signal.SIGKILL)
            break
    process.communicate(timeout=120)
    assert process.returncode == 1
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    baseline, victim, following = lines[1:-1]
    assert (baseline["status"], victim["status"], following["status"]) == ("completed", "failed", "completed")
    failure = victim["failure"]
    assert (failure["rank"], failure["kind"], failure["exit_status"]) == (1, "signal", -9)
    assert 20 <= len(victim["steps"]) < 400
    assert len(following["steps"]) == 400


MANAGER_WAIT = """
from megatron.core.dist_checkpointing.strategies import filesystem_async

def main(context):
    filesystem_async._get_write_results_queue().get()
"""
RUN_MANAGER_WAIT = """
import sys, threading
from pathlib import Path
from envbuild_smoke.plan_file import read_plan
from envbuild_smoke.ranks import RankProgram
from envbuild_smoke.runner import run_plan

plan = read_plan(Path("plan.json"))
library = "megatron.core.dist_checkpointing.strategies.filesystem_async"
program = RankProgram(entry="manager_wait:main", preload=(library,))
run_plan(plan, plan.cases, Path("out"), emit=lambda _: None, stop=threading.Event(), program=program)
"""


def test_time_limit_while_a_checkpoint_is_saved(stack_python: Path, tmp_path: Path) -> None:
    """A rank waits for the process that megatron-core saves through: that one must not die of being asked."""
    case = {**case_document(BASELINE), "time_limit_seconds": 5}
    (tmp_path / "plan.json").write_text(json.dumps(plan_document(case)))
    (tmp_path / "manager_wait.py").write_text(MANAGER_WAIT)
    path = os.pathsep.join([str(SMOKE), str(tmp_path)])
    command = [stack_python, "-c", RUN_MANAGER_WAIT]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, timeout=120, check=True)
    result = json.loads((tmp_path / "out" / "results.jsonl").read_text().splitlines()[1])
    assert (result["status"], result["failure"]["kind"]) == ("timed-out", "timeout"), result["failure"]
    assert not (tmp_path / "out" / "cases" / BASELINE / "rank0.failure.json").exists()
    assert "managers.py" in (tmp_path / "out" / result["failure"]["log"]).read_text()


REDIRECT_CHECK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
import megatron.core.tensor_parallel.random
from envbuild_smoke import redirect_cpu

def snapshot():
    owners = {"torch.Tensor": torch.Tensor, "torch.nn.Module": torch.nn.Module, **sys.modules}
    own = [name for name in owners if name.partition(".")[0] in ("torch", "megatron")]
    return {f"{owner}.{name}": value for owner in own for name, value in list(vars(owners[owner]).items())}

before = snapshot()
redirect_cpu.install()
after = snapshot()
changed = sorted(name for name in after if after[name] is not before.get(name))
print(json.dumps({"changed": changed, "table": sorted(r.symbol for r in redirect_cpu.PATCHED), "seen": len(after)}))
"""


def test_redirects_patch_the_symbols_of_the_table_and_no_other(stack_python: Path) -> None:
    done = subprocess.run(
        [stack_python, "-c", REDIRECT_CHECK, SMOKE], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["changed"] == found["table"]
    assert found["seen"] > 1000
