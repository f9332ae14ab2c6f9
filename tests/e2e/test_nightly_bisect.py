"""A bad component reaches a nightly: it is not published, and the night finds it by itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Tool, shared_folder
from faults.kinds import Edit
from faults.library import LIBRARY
from helpers.kept_entries import keep_base
from helpers.lock_runs import ANY, OLD
from helpers.night_place import Place, night_place
from helpers.simple_index import SimpleIndex, simple_index
from helpers.wheels import make_wheel

from envbuild.catalog.catalog import Selection
from envbuild.lock.uv.program import uv_program

BASE = "debian12"
GOOD, BAD = "0.16.1.post1", "0.16.1.post2"
OTHERS = ("liba", "libb")
TAGS = "cp311-cp311-manylinux_2_17_x86_64"
# Nearly ten minutes where other work has the machine.
BUDGET_MINUTES = 60
STACK = """\
summary = "megatron-core from an index of the test's own, and two libraries"
driver = "mcore"
matrix = "planted"

[[builds]]
target = "cpu"
bases = ["{base}"]
default_base = "{base}"

[components.torch]
version = "==2.13.0"
modules = ["torch"]

[components.megatron-core]
version = "=={core}"
modules = ["megatron.core"]

[requirements.psutil]
reason = "megatron-core does not declare it"
"""
MATRIX = """\
summary = "two of the cases of certify-quick, with a smaller model"
devices = ["cpu"]
time_limit_seconds = 300

[models.gpt]
kind = "gpt"
num_layers = 2
hidden_size = 32
num_attention_heads = 4
sequence_length = 32
vocabulary_size = 256

[training]
steps = 3
micro_batch_size = 2
global_batch_size = 8
learning_rate = 1e-3
clip_grad_norm = 1.0
weight_decay = 0.1
seed = 1234

[tolerance.fp32]
loss_relative = 1e-5
grad_norm_relative = 1e-4
weights_relative = 1e-4

[[cases]]
model = "gpt"

[[cases]]
model = "gpt"
data = 2
"""
POLICY = """\
summary = "the project's own matrix"
matrices = ["planted"]
max_age_days = 30
shipped_matrix = false
allow_not_vouched = true
"""
LIBRARY_PART = '\n[components.{name}]\nversion = "=={version}"\nmodules = ["{name}"]\n'


def write_stack(project: Path, core: str, libraries: str) -> None:
    parts = [LIBRARY_PART.format(name=name, version=libraries) for name in OTHERS]
    stack = STACK.format(base=BASE, core=core) + "".join(parts)
    for kind, content in (("stacks", stack), ("matrices", MATRIX), ("policies", POLICY)):
        file = project / "envs" / kind / "planted.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def fill(index: SimpleIndex, folder: Path) -> None:
    """Two releases of megatron-core, of which the newer one sums gradients instead of averaging them."""
    released = folder / "released"
    command = [uv_program(), "pip", "install", "-q", "--no-deps", "--python-version", "3.11", "--target", released]
    subprocess.run([*command, "megatron-core==0.16.1"], check=True)
    (metadata,) = released.glob("megatron_core-*.dist-info/METADATA")
    lines = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist: ")]
    requires = tuple(line.partition(": ")[2] for line in lines if "extra ==" not in line)
    files = {
        str(file.relative_to(released)): file.read_bytes()
        for file in (released / "megatron").rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    (plant,) = (fault.plant for fault in LIBRARY if fault.id == "gradient-scale-left-out")
    assert isinstance(plant, Edit)
    broken = files[plant.file].decode()
    for old, new in plant.changes:
        assert old in broken
        broken = broken.replace(old, new)
    info = "megatron/core/package_info.py"
    for version, changed in ((GOOD, {}), (BAD, {plant.file: broken.encode()})):
        own = {info: files[info] + f"\n__version__ = {version!r}\n".encode()}
        sources = files | own | changed
        index.add(make_wheel(folder, "megatron_core", version, TAGS, requires, sources=sources), OLD)
    for name in OTHERS:
        for version in ("1.0", "2.0"):
            index.add(make_wheel(folder, name, version, ANY, module=f"VERSION = '{version}'\n"), OLD)


@pytest.fixture
def place(tool: Tool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with night_place(tool, tmp_path, shared_folder(tmp_path_factory)) as running:
        yield running


@pytest.fixture
def own(tool: Tool, place: Place, selection: Selection, tmp_path: Path) -> Iterator[Tool]:
    """The tool in a project of its own, with an index of its own before the machine's."""
    keep_base(selection, tool.cache)
    with simple_index() as index:
        fill(index, tmp_path / "wheels")
        project = tmp_path / "project"
        project.mkdir()
        yield replace(tool, project=project, env={**place.env, "UV_INDEX": index.url})


@pytest.mark.slow
def test_a_bad_component_is_found_and_the_moving_tag_stays(own: Tool, place: Place) -> None:
    words = ["nightly", "--stack", "planted", "--targets", "cpu", "--policy", "planted"]
    words += place.words("team/planted", "planted")
    write_stack(own.project, GOOD, "1.0")
    own.run(*words)
    (good,) = place.published("team/planted")

    write_stack(own.project, BAD, "2.0")
    night = json.loads(own.run(*words, "--bisect", str(BUDGET_MINUTES), "--json", status=7).stdout)
    steps = {step["name"]: step for step in night["steps"]}
    assert steps["certify"]["error"]["fault"] == "training"
    assert (steps["certify"]["attempts"], steps["publish"]["state"]) == (2, "skipped")
    assert {"megatron-core", *OTHERS} <= {item["package"] for item in night["night"]["moved"]}
    broken = f"broken by megatron-core {GOOD} -> {BAD}"
    assert (steps["bisect"]["state"], steps["bisect"]["note"]) == ("done", broken)
    assert steps["bisect"]["seconds"] < BUDGET_MINUTES * 60
    assert place.published("team/planted") == [good]

    printed = own.run("status").stdout
    assert "suspect" in printed
    assert broken in printed
    own.run("report", "--html", "site")
    pages = [page.read_text() for page in (own.project / "site").rglob("*.html")]
    assert any("megatron-core" in page and f"{GOOD} -> {BAD}" in page.replace("&gt;", ">") for page in pages)

    # The next night trains nothing again, and still says what broke the target.
    again = json.loads(own.run(*words, "--json", status=7).stdout)
    assert {step["attempts"] for step in again["steps"] if step["name"] == "certify"} == {0}
    assert broken in own.run("status").stdout
    assert place.published("team/planted") == [good]
