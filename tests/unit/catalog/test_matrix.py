"""Rows with lists of values, and bands by precision and axis."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from envbuild.catalog import toml
from envbuild.catalog.data import data_root
from envbuild.catalog.matrix import Band, Matrix, MatrixRow
from envbuild.core.errors import ConfigurationError
from envbuild_smoke.plan.axes import TABLE

QUICK = (data_root() / "envs/matrices/certify-quick.toml").read_text()
DEFAULT = {"loss_relative": 1e-3, "grad_norm_relative": 1e-2, "weights_relative": 1e-2}


def test_row_with_lists_is_a_case_for_each_combination():
    row = MatrixRow(model="gpt", tensor=(1, 2), precision=("fp32", "bf16"), compare_weights=True)
    changes = [(spec["precision"], spec["tensor"], spec["compare_weights"]) for spec in row.specs()]
    assert changes == [("fp32", 1, True), ("bf16", 1, True), ("fp32", 2, True), ("bf16", 2, True)]


def test_row_has_each_axis_of_the_table_once():
    own = {"model", "recipe", "compare_weights", "devices", "where_possible"}
    names = [axis.name for axis in TABLE]
    assert len(set(names)) == len(names)
    assert set(MatrixRow.model_fields) == {*names, *own}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tensor = [2, 0]", "tensor[1]: input should be greater than or equal to 1; found 0"),
        ("tensor = []", "tensor: needs at least 1 item; has 0"),
        ("precision = ['fp32', 'fp9']", "precision[1]: found 'fp9'; allowed: 'fp32', 'bf16', 'fp16' or 'fp8'"),
        ("devices = []", "devices: needs at least 1 item; has 0"),
        ("sequences = true", "sequences: unknown key; did you mean 'sequence'?"),
    ],
)
def test_wrong_value_of_a_row(line, expected):
    with pytest.raises(ConfigurationError) as caught:
        toml.parse(f"{QUICK}\n[[cases]]\nmodel = 'gpt'\n{line}\n", Matrix, "m.toml")
    assert f"cases[{QUICK.count('[[cases]]')}].{expected}" in caught.value.why


def test_wrong_value_in_the_only_row_is_one_thing_to_correct():
    head = QUICK.partition("[[cases]]")[0]
    with pytest.raises(ConfigurationError) as caught:
        toml.parse(f"{head}\n[[cases]]\nmodel = 'gpt'\ndata = [0, 2]\n", Matrix, "m.toml")
    assert "1 thing to correct" in caught.value.what
    assert caught.value.why.endswith("cases[0].data[0]: input should be greater than or equal to 1; found 0")
    with pytest.raises(ConfigurationError, match="1 thing to correct"):
        toml.parse(f"cases = []\n{head}", Matrix, "m.toml")


WEIGHTS = "weights_relative = 1e-4"
MOE = "moe = { num_experts = 4, router_topk = 2 }"
MAMBA = 'mamba = { hybrid_override_pattern = "MM", state_dim = 8, head_dim = 8, num_groups = 1 }'


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (WEIGHTS, "", "tolerance.fp32.weights_relative: this key is required"),
        (WEIGHTS, f"{WEIGHTS}\n[tolerance.fp32.tensor]\nloss_relative = 0.02", "tolerance.fp32.tensor: unknown key"),
        (MOE, MOE.replace("router_topk = 2", "router_topk = 1"), "router_topk: input"),
        ('kind = "gpt"\nnum_layers = 2', 'kind = "mamba-hybrid"\nnum_layers = 2', "kind mamba-hybrid needs a table"),
        (MOE, MAMBA.replace("MM", "MX"), "hybrid_override_pattern: found 'MX'; must match"),
        (MOE, MAMBA, "models.moe: kind mamba-hybrid needs a table mamba, and no other kind has one"),
    ],
)  # fmt: skip
def test_wrong_value_of_a_matrix(old, new, expected):
    assert old in QUICK
    with pytest.raises(ConfigurationError) as caught:
        toml.parse(QUICK.replace(old, new, 1), Matrix, "m.toml")
    assert expected in caught.value.why


@pytest.mark.parametrize(("size", "fits"), [(256, False), (257, True)])
def test_text_needs_a_vocabulary_of_all_bytes_and_the_end_of_a_document(size, fits):
    text = (data_root() / "envs/matrices/bridge-recipes.toml").read_text()
    assert text.count("vocabulary_size = 512") == 3
    changed = text.replace("vocabulary_size = 512", f"vocabulary_size = {size}")
    if fits:
        toml.parse(changed, Matrix, "m.toml")
        return
    with pytest.raises(ConfigurationError) as caught:
        toml.parse(changed, Matrix, "m.toml")
    assert "models.qwen25-500m-text: dataset text needs vocabulary_size of 257" in caught.value.why


def test_bounds_of_bands():
    for name, most in (("loss_relative", 0.01), ("grad_norm_relative", 0.02), ("weights_relative", 0.1)):
        Band(**DEFAULT | {name: most})
        with pytest.raises(ValidationError, match=name):
            Band(**DEFAULT | {name: most * 1.01})
