"""The healthy baseline in bf16 is what the reference computes, whatever instructions multiply its matrices."""

from __future__ import annotations

import json
import os
import subprocess
import zipapp
from pathlib import Path

import pytest
from helpers.smoke_plans import read_results

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.expansion import expand
from envbuild.certify.judge.reference import compare_reference
from envbuild.certify.run.plan import Environment, Subject, make_plan
from envbuild.launch.launchers import Placement
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.results import CaseLine

BASELINE = "gpt-bf16-baseline"

DIGEST = "sha256:" + "0" * 64


# oneDNN's instruction set, and torch's. Without AVX-512 rounding decided another element of a bias, and a fixed band
# refused the stack.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "capability"), [("SSE41", "default"), ("AVX2", "avx2"), (None, None)], ids=["sse4.1", "avx2", "as it is"]
)
def test_healthy_baseline_passes(stack_python: Path, tmp_path: Path, isa: str | None, capability: str | None) -> None:
    capabilities = Capabilities(device=Device.CPU)
    matrix = Catalog.open(data_root()).matrix("certify-full")
    cases = tuple(case for case in expand(matrix, "certify-full", capabilities) if case.id == BASELINE)
    assert len(cases) == 1
    subject = Subject(
        name="x", stack="mcore", base="here", target="cpu", lock_digest=DIGEST, place=Placement.parse("venv")
    )
    plan = make_plan(subject, Environment(capabilities=capabilities, driver=Driver.MCORE), matrix, cases)
    content = json.dumps(plan).encode()
    (tmp_path / "plan.json").write_bytes(content)
    planned = parse_plan(content)
    smoke = tmp_path / "smoke.pyz"
    zipapp.create_archive(data_root() / "smoke", smoke, filter=lambda path: "__pycache__" not in path.parts)
    chosen = {"ONEDNN_MAX_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": capability}
    env = {name: value for name, value in os.environ.items() if name not in chosen}
    env |= {name: value for name, value in chosen.items() if value is not None}
    command = [stack_python, "-I", smoke, "run", "--plan", tmp_path / "plan.json", "--out", tmp_path / "out"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = read_results(tmp_path / "out")
    # Ranks have them, and the record says so.
    assert {name: lines[0]["machine"]["variables"].get(name) for name in chosen} == chosen
    (row,) = [line for line in lines if line["type"] == "case"]
    result = read_object(CaseLine, row, "case")
    verdict, problems = compare_reference(planned.cases[0], planned.models["gpt"], result)
    assert not problems
    assert verdict is not None
    # What rounding does was measured, tensor by tensor, and what float32 does to each of its parts.
    assert result.reference is not None
    assert all(tensor.spread for tensor in result.reference.gradients)
    parts = result.reference.float32_parts or ()
    assert {part.part for part in parts} == {"accumulation", "softmax", "loss", "main weights"}
    assert all(part.relative_difference is not None and part.relative_difference < 1e-4 for part in parts)
