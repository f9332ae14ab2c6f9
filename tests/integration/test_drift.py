"""The drift check on releases from the index: NeMo 2.7.3 against a megatron-core it works with, and one it does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from envbuild.drift import Finding, Moment, Weight, write_wheel
from envbuild.drift.check import find_drift
from envbuild.drift.sources import SourceTree
from envbuild.lock.uv.program import uv_program

# Its diffusion models and the collections before NeMo 2.0 ask for a megatron-core of another time.
UNUSED = ("nemo/collections/diffusion", "nemo/collections/nlp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


def released(folder: Path, name: str, version: str, python: str = "3.12") -> SourceTree:
    """The sources of a release, as its wheel installs them."""
    target = folder / f"{name}-{version}"
    options = ["--no-deps", "--no-build", "--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    subprocess.run(
        [uv_program(), "pip", "install", "-q", *options, "--target", target, f"{name}=={version}"], check=True
    )
    path = folder / f"{name}-{version}.whl"
    content = {file.relative_to(target).as_posix(): file.read_bytes() for file in target.rglob("*") if file.is_file()}
    write_wheel(path, name, version, {file: text for file, text in content.items() if ".dist-info/" not in file})
    return SourceTree.from_wheel(path)


@pytest.fixture(scope="module")
def nemo(folder: Path) -> SourceTree:
    return released(folder, "nemo-toolkit", "2.7.3")


@pytest.fixture(scope="module")
def working(folder: Path) -> SourceTree:
    return released(folder, "megatron-core", "0.15.3")


@pytest.fixture(scope="module")
def findings(folder: Path, nemo: SourceTree) -> list[Finding]:
    return find_drift(nemo, released(folder, "megatron-core", "0.16.1"))


def refusing(findings: list[Finding]) -> list[Finding]:
    """What a lock is refused by."""
    used = [finding for finding in findings if not finding.file.startswith(UNUSED)]
    return [finding for finding in used if finding.weight is Weight.REFUSES]


@pytest.mark.slow
def test_nemo_2_7_with_megatron_core_0_16(findings: list[Finding]):
    (optimizer,) = [finding for finding in findings if "no_weight_decay_cond" in finding.detail]
    assert optimizer.weight is Weight.REFUSES
    assert optimizer.name == "megatron.core.optimizer.get_megatron_optimizer"
    assert optimizer.file == "nemo/lightning/_strategy_lib.py"
    assert optimizer.within == "setup_megatron_optimizer"
    strategies = "megatron.core.dist_checkpointing.strategies.tensorstore"
    by_file = {finding.file: finding for finding in findings if finding.name == strategies}
    assert by_file["nemo/lightning/io/pl.py"].weight is Weight.REFUSES
    teardown = by_file["nemo/utils/callbacks/dist_ckpt_io.py"]
    assert (teardown.at, teardown.weight) == (Moment.IMPORT, Weight.WARNS)
    assert "HAVE_MEGATRON_CORE" in teardown.lost
    assert {finding.file for finding in refusing(findings)} == {
        "nemo/lightning/_strategy_lib.py",
        "nemo/lightning/io/pl.py",
    }


@pytest.mark.slow
def test_nemo_2_7_fits_megatron_core_0_15(nemo: SourceTree, working: SourceTree):
    findings = find_drift(nemo, working)
    assert refusing(findings) == []
    assert not any("no_weight_decay_cond" in finding.detail or "tensorstore" in finding.name for finding in findings)


@pytest.mark.slow
def test_megatron_core_0_12_calls_the_fused_rotary_embedding_as_the_next_transformer_engine_has_it(folder: Path):
    """Behind a test for 2.2.0.dev0, which the release 2.2.0 passes and does not have the argument."""
    core = released(folder, "megatron-core", "0.12.3", python="3.10")

    def interleaved(engine: str) -> list[tuple[str, str]]:
        findings = find_drift(core, released(folder, "transformer-engine", engine, python="3.10"))
        about = [finding for finding in findings if "interleaved" in finding.detail]
        return [(entry.file, entry.name) for entry in about if entry.weight is Weight.REFUSES]

    rotary = "transformer_engine.pytorch.dot_product_attention.rope.apply_rotary_pos_emb"
    assert interleaved("2.2.0") == [("megatron/core/extensions/transformer_engine.py", rotary)]
    assert interleaved("2.3.0") == []
