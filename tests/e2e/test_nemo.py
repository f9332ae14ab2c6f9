"""NeMo's own pretrain on CPUs: what agrees, and what the plain recipe and a broken resume do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool

pytestmark = pytest.mark.soak

# nemo-2.7 without what needs a GPU: Transformer Engine, flash-attn, mamba-ssm.
STACK = """\
summary = "NeMo 2.7.3 on CPUs"
driver = "nemo"
matrix = "nemo-recipes"
as_of = "2026-05-15"

[[builds]]
target = "cpu"
bases = ["debian12", "ubuntu2204", "ubuntu2404"]
default_base = "host"

[components.torch]
version = "==2.13.0"
as_of = "2026-11-01"
modules = ["torch"]

[components.nemo-toolkit]
version = "==2.7.3"
extras = ["llm"]
modules = ["nemo.collections.llm.recipes"]

[components.megatron-core]
version = ">=0.15,<0.16"
modules = ["megatron.core"]

[components.nemo-run]
version = "==0.11.1"
as_of = "2026-09-19"
modules = ["nemo_run"]

[requirements.psutil]
reason = "megatron-core needs it to save checkpoints"

[requirements.pulp]
reason = "nemo.collections.llm needs it"

[requirements.pyarrow]
version = "<23"
reason = "NumPy 1"

[requirements.setuptools]
version = "<81"
reason = "pkg_resources"
"""
OPTIONS = ("--stack", "nemo-cpu", "--target", "cpu")
STRATEGY = "lightning/pytorch/strategies/megatron_strategy.py"
LOADS_OPTIMIZER = "        return self.ckpt_load_optimizer\n"


@pytest.fixture(scope="module")
def nemo(tmp_path_factory: pytest.TempPathFactory, site_cache: Path) -> Tool:
    """A project with NeMo for CPUs installed in ``.venv``."""
    project = tmp_path_factory.mktemp("nemo")
    file = project / "envs" / "stacks" / "nemo-cpu.toml"
    file.parent.mkdir(parents=True)
    file.write_text(STACK)
    tool = Tool(project, site_cache)
    tool.run("lock", *OPTIONS, "--no-verify")
    tool.run("sync", *OPTIONS, "--into", ".venv")
    return tool


def certify(tool: Tool, *words: str) -> Any:
    return json.loads(tool.run("certify", *OPTIONS, "--in", "venv", *words, "--json").stdout)


def test_layouts_text_and_resumed_trainings_agree_with_one_process(nemo: Tool) -> None:
    answer = certify(nemo)
    assert len(answer["cases"]) >= 14
    assert any("resume4-in-tp2" in case["id"] for case in answer["cases"])
    assert any("text" in case["id"] and "resume4" in case["id"] for case in answer["cases"])


def test_plain_recipe_of_two_interleaved_stages_is_refused_and_its_cure_agrees(nemo: Tool) -> None:
    left_out = certify(nemo, "--matrix", "nemo-known-wrong")
    assert [case["id"] for case in left_out["cases"]][1:] == ["qwen25-7b-local-fp32-pp2-vp2"]
    assert not any(case["result"] != "not run" for entry in left_out["not_vouched"] for case in entry["cases"])
    ran = certify(nemo, "--matrix", "nemo-known-wrong", "--run-known-wrong")
    (plain,) = [case for entry in ran["not_vouched"] for case in entry["cases"]]
    assert (plain["id"], plain["result"]) == ("qwen25-7b-local-fp32-pp2-vp2-bp2p", "failed")
    assert plain["problem"].startswith("parity-loss: step 1: ")


def test_nemo_that_resumes_without_its_optimizer_is_refused(nemo: Tool) -> None:
    shutil.copytree(nemo.project / ".venv", nemo.project / "broken", symlinks=True)
    (strategy,) = (nemo.project / "broken").glob(f"lib/python*/site-packages/nemo/{STRATEGY}")
    text = strategy.read_text()
    assert text.count(LOADS_OPTIMIZER) == 1
    strategy.write_text(text.replace(LOADS_OPTIMIZER, "        return False\n"))
    # Whose files are not those of the lock, either.
    words = ("--only", "qwen25-7b-local-fp32-resume4", "--in", "venv", "--venv", "broken")
    done = nemo.run("certify", *OPTIONS, *words, status=7)
    assert "qwen25-7b-local-fp32-resume4: parity-loss: step 6: " in done.stderr + done.stdout
