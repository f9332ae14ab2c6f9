"""Entries of envs/conflicts/: which versions and which cases they are about, and what those that ship say."""

from functools import cache
from pathlib import Path

import pytest
from helpers.rows import CAPABILITIES
from pydantic import ValidationError

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.conflict import Conflict, baselines, known_wrong
from envbuild.certify.cases.expansion import expand
from envbuild.certify.cases.known_wrong import affected_cases

CATALOG = Catalog.open(Path("/nonexistent"))
SHIPPED = {name: conflict for name, conflict in CATALOG.conflicts.items() if conflict.cases}
CPU = CAPABILITIES[0]
WRONG = {
    "summary": "s",
    "packages": {"megatron-core": "<1"},
    "evidence": "seen",
    "fix": "Do not.",
    "shown_by": {"matrix": "m", "case": "c"},
}


def entry(*cases: dict) -> Conflict:
    return Conflict.model_validate({**WRONG, "cases": cases})


@pytest.mark.parametrize(
    ("conditions", "values", "affected"),
    [
        ({"tensor": 2}, {"tensor": 2, "data": 4}, True),
        ({"tensor": 2}, {"tensor": 4}, False),
        ({"tensor": ">1"}, {"tensor": 4}, True),
        ({"tensor": ">1"}, {"tensor": 1}, False),
        ({"decoupled_lr": ">0"}, {"decoupled_lr": 5e-4}, True),
        ({"decoupled_lr": ">0"}, {"decoupled_lr": None}, False),
        ({"decoupled_lr": ">0"}, {}, False),
        ({"sequence": True}, {"sequence": True}, True),
        # To Python True is 1.
        ({"expert": 1}, {"expert": True}, False),
        ({"sequence": ">0"}, {"sequence": True}, False),
        ({"loss_mask": "uneven"}, {"loss_mask": "uneven"}, True),
        ({"norm_epsilon": "<1e-5"}, {"norm_epsilon": 1e-6}, True),
        ({"norm_epsilon": "<1e-5"}, {"norm_epsilon": 1e-5}, False),
        ({"tensor": 2, "context": 2}, {"tensor": 2, "context": 1}, False),
    ],
)
def test_case_is_affected_by_all_conditions_of_a_table(conditions, values, affected):
    assert entry(conditions).affects(values) is affected
    assert entry({"data": 9}, conditions).affects(values) is affected


def test_setting_for_people():
    made = entry({"pipeline": 2, "virtual_pipeline": ">1", "overlap_p2p_comm": False}, {"loss_mask": "uneven"})
    assert made.setting() == "pipeline = 2, virtual_pipeline > 1, overlap_p2p_comm = false; or loss_mask = uneven"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cases": [{"tensors": 2}]}, "tensors is not a field of cases or models; allowed: "),
        ({"cases": [{}]}, "a table without a field"),
        ({"cases": [{"tensor": "<=2"}]}, "pattern"),
        ({"cases": [{"tensor": 2}], "shown_by": None}, "cases need shown_by"),
        ({"shown_by": None}, "two packages or more"),
        ({"packages": {"a": "<1", "b": "<1"}}, "no fixed_in and no shown_by"),
    ],
)
def test_entry_that_is_refused(changes, why):
    with pytest.raises(ValidationError, match=why):
        Conflict.model_validate({**WRONG, **changes})


CURED = ["router-losses-in-contexts"]
# Seen with Transformer Engine from 2.13 on.
WITH_ENGINE = ["norm-of-grouped-experts"]
OF_BRIDGE = ["lora-gathered-norm"]
# Before what they are about was there.
LACKING = ["no-sinks-of-its-own"]
ALL = sorted(set(SHIPPED) - {*CURED, *WITH_ENGINE, *OF_BRIDGE, *LACKING})
LATER = sorted(set(ALL) - {"overlap-of-instances"})
NOT_YET = ["learning-rates-after-loading", "sequence-loss-per-token"]
# Trained from 0.15.3 on.
FROM_0_15_3 = ["latent-key-in-tensor-parallel", "sinks-of-other-ranks"]
NEWEST = [
    *("gathered-logits", "interleaved-batched-p2p", "latent-key-in-tensor-parallel", "loss-gradient-in-bf16"),
    *("masked-loss-in-contexts", "optimizer-state-in-buckets", "sinks-of-other-ranks"),
]


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("0.13.1", []),
        # Without the format of the optimizer's state that is wrong later.
        ("0.14.0", sorted({*ALL, *CURED, *LACKING} - {*NOT_YET, *FROM_0_15_3, "optimizer-state-in-buckets"})),
        ("0.15.0", sorted({*ALL, *CURED} - {*NOT_YET, *FROM_0_15_3})),
        ("0.15.3", sorted({*ALL, *CURED} - set(NOT_YET))),
        ("0.16.0", ALL),
        ("0.16.1", ALL),
        ("0.17.0rc0", LATER),
        ("0.18.2", LATER),
        ("0.19.0", NEWEST),
        ("0.19.2+local", NEWEST),
        ("0.20.0rc0", []),
    ],
)
def test_known_wrong_goes_as_far_as_its_evidence(version, names):
    assert sorted(known_wrong(CATALOG.conflicts, {"megatron-core": version})) == names
    engines = {engine: {"megatron-core": version, "transformer-engine": engine} for engine in ("2.11.0", "2.13.0")}
    earlier = ("0.13.1", "0.14.0", "0.15.0", "0.20.0rc0")
    with_engine = [] if names == NEWEST or version in earlier else WITH_ENGINE
    assert sorted(known_wrong(CATALOG.conflicts, engines["2.11.0"])) == names
    assert sorted(known_wrong(CATALOG.conflicts, engines["2.13.0"])) == sorted([*names, *with_engine])


@pytest.mark.parametrize(
    ("engine", "bridge", "names"),
    [("2.3.0", "0.6.2", []), ("2.4.0", "0.3.1", OF_BRIDGE), ("2.18.0", "0.7.0", OF_BRIDGE), ("2.17.1", None, [])],
)
def test_lost_gradient_of_lora_is_known_of_bridge_with_the_engines_that_lose_it(engine, bridge, names):
    versions = {"transformer-engine": engine, "megatron-bridge": bridge}
    assert sorted(known_wrong(CATALOG.conflicts, versions)) == names


@cache
def affected_everywhere(matrix: str) -> list:
    """The cases of a shipped matrix that shipped entries affect, on each kind of machine."""
    made = CATALOG.matrix(matrix)
    return [affected_cases(expand(made, matrix, where), made, SHIPPED) for where in CAPABILITIES]


@pytest.mark.parametrize("name", SHIPPED)
def test_entry_is_shown_by_a_case_of_its_own(name):
    shown = SHIPPED[name].shown_by
    known = affected_everywhere(shown.matrix)
    others = set() if name in LACKING else set(LACKING)
    assert {frozenset(actual[shown.case]) - others for actual in known if shown.case in actual} == {frozenset({name})}


def test_every_case_of_known_wrong_is_affected_and_few_of_the_other_matrices():
    few = {"hybrid-local-fp32-baseline", "hybrid-local-fp32-tp2", "moe-aux-fp32-cp2", "moe-seq-fp32-cp2"}
    few |= {f"te-bf16-dp{size}-do-oi2-ogr" for size in (2, 4)} | {f"wide-fp32-dp{size}-do-oi2-ogr" for size in (2, 4)}
    few |= {"te-moe-bf16-tp2-sp-ep2-etp1-grouped", "moe-fp32-tp2-sp-etp1", "moe-aux-fp32-tp2-sp-mask-uneven-ptl"}
    few |= {"gpt-fp32-tp2-gathered", "gpt-fp32-cp2-mask-uneven", "gpt-fp32-dp2-dlr0.0005-mask-uneven-ptl-do-resume3"}
    few |= {f"gpt-fp32-dp2-do-ogr-bk20000-resume3-in-{layout}" for layout in ("dp2", "tp2")}
    few |= {"moe-seq-fp32-baseline-ptl", "deepseek-v3-fp32-tp2-sp"}
    few |= {f"gpt-oss-fp32-{layout}" for layout in ("baseline", "tp2-sp", "dp2-ep2", "pp2")}
    few |= {f"qwen25-{size}-{kind}-pp2-vp2-bp2p" for size in ("7b", "500m") for kind in ("bf16", "local-fp32")}
    few |= {"qwen25-500m-bf16-tp2-sp-ptl-lora-gathered-norm"}
    for name in CATALOG.names("matrices"):
        matrix = CATALOG.matrix(name)
        for capabilities in CAPABILITIES:
            cases = expand(matrix, name, capabilities)
            affected = set(affected_cases(cases, matrix, SHIPPED))
            compared = {case.id for case in cases if not case.is_baseline}
            own = {*compared, "moe-seq-fp32-baseline-ptl"}
            assert affected == (own if name == "known-wrong" else few & {case.id for case in cases})


def test_case_is_affected_in_the_layout_that_it_continues_in_and_through_its_baseline():
    matrix = CATALOG.matrix("known-wrong")
    cases = expand(matrix, "known-wrong", CPU)
    names = affected_cases(cases, matrix, {"x": entry({"tensor": 2, "data": 1})})
    assert "gpt-fp32-dp2-do-ogr-bk20000-resume3-in-tp2" in names
    assert "gpt-fp32-dp2-do-ogr-bk20000-resume3-in-dp2" not in names
    masked = affected_cases(cases, matrix, {"x": entry({"loss_mask": "uneven", "context": 1})})
    assert {"gpt-fp32-baseline-mask-uneven", "gpt-fp32-cp2-mask-uneven"} <= set(masked)


def test_baselines_have_the_values_of_their_training_and_model():
    actual = list(baselines(CATALOG.matrix("known-wrong")))
    assert {values["tensor"] for values in actual} == {1}
    assert {values["micro_batch_size"] for values in actual} == {2}
    assert {values["loss_mask"] for values in actual} == {"none", "uneven"}
    assert {values.get("aux_loss_coeff") for values in actual} == {None, 0.0, 1e-2}
