"""The account of the library's fields, and a recipe against it."""

import json

import pytest
from helpers.certificates import case_of
from helpers.certify_world import statement_of

from envbuild.certify.fields.account import FieldAccount, account_of
from envbuild.certify.fields.against import against
from envbuild.certify.fields.knowledge import FieldKnowledge, RecipeKnowledge, recipes, tried_fields
from envbuild.certify.models import CaseVerdict
from envbuild.core.errors import ConfigurationError, UsageError

RECIPES = RecipeKnowledge.model_validate(
    {
        "summary": "s", "release": "v1", "recipes": ["a_config", "b_config", "hub_config"], "from_hub": "2",
        "fields": {
            "model.moe_router_topk": {"8": "0-2"},
            "model.recompute": {"full": "0"},
            "model.cross_entropy": {"native": "0-1", "te": "2"},
            "model.add_bias": {"False": "0-2"},
            "model.gone": {"1": "0"},
            "model.graph_scope": {"attn": "0-1"}, "model.sms": {"16": "0-1"},
            "model.graphs": {"te": "0"}, "model.dispatcher": {"alltoall": "1", "flex": "0"},
            "mixed_precision.bf16": {"True": "0-1"},
            "dataset.seed": {"1": "0"},
        },
        "shared": {"model.rotary_base": "rope_theta|rope_parameters.rope_theta"},
        "converters": {
            "Llama": {
                "fixed": {"model.norm": "RMSNorm"}, "mapped": {"model.layers": "n_layer"}, "computed": ["model.x"],
            }
        },
    }
)  # fmt: skip
KNOWN = FieldKnowledge.model_validate(
    {
        "summary": "s", "evidence": "e", "without_effect": {"model.timers": "measures time", "model.loud": "logs"},
        "only_with": {"model.graph_": "model.graphs", "model.sms": "model.dispatcher=flex"},
        "trials": {
            "0.16.1": {
                "caught": {"model.moe_router_topk": "reference", "model.loud": "reference"},
                "digits": ["model.timers", "model.graph_scope", "model.sms"],
            },
            "0.19.0": {"caught": {}, "digits": []},
        },
    }
)  # fmt: skip
DEFAULTS = {
    "model.moe_router_topk": "2", "model.recompute": "None", "model.cross_entropy": "native", "model.add_bias": "True",
    "model.timers": "None", "model.loud": "False", "model.lonely": "1", "model.norm": "LayerNorm",
    "model.rotary_base": "10000", "optimizer.bf16": "False", "model.layers": "2", "model.x": "0",
    "model.graphs": "none", "model.graph_scope": "full", "model.dispatcher": "allgather", "model.sms": "20",
}  # fmt: skip


def verdict(case, **values):
    changed = {f"model.{name}": value for name, value in values.items()}
    is_baseline = "baseline" in case
    configuration = {"values": changed, "defaults": DEFAULTS if is_baseline else {}}
    return CaseVerdict.model_validate(case_of(case, observed={"configuration": configuration}))


def account(*verdicts, version="0.16.1"):
    return account_of(verdicts, version, RECIPES, KNOWN)


def kind_of(made, field):
    return next(name for name in FieldAccount.model_fields if field in getattr(made, name))


BASELINE = verdict("gpt-fp32-baseline", add_bias="False")


@pytest.mark.parametrize(
    ("field", "others", "kind"),
    [
        # Of cases that have their own baseline's value, a trial alone shows that they would notice another.
        ("moe_router_topk", {"moe-fp32-baseline": {"moe_router_topk": "8"}}, "varied"),
        ("lonely", {"moe-fp32-baseline": {"lonely": "8"}}, "blind"),
        ("lonely", {"gpt-fp32-tp2": {"lonely": "8"}}, "varied"),
        # One value: that of recipes, of some of them, or of none.
        ("add_bias", {}, "fixed"),
        ("recompute", {}, "blind"),
        ("cross_entropy", {}, "blind"),
        ("lonely", {}, "fixed"),
        # Its values are in configs of a hub.
        ("rotary_base", {}, "blind"),
        ("timers", {}, "without_effect"),
        # A trial says otherwise.
        ("loud", {}, "fixed"),
        # Nothing has a use for it, but where another field is set.
        ("graph_scope", {}, "without_effect"),
        ("graph_scope", {"gpt-fp32-tp2": {"graphs": "te"}}, "blind"),
        ("sms", {"moe-fp32-tp2": {"dispatcher": "alltoall"}}, "without_effect"),
        ("sms", {"moe-fp32-tp2": {"dispatcher": "flex"}}, "blind"),
    ],
)
def test_kinds(field, others, kind):
    made = account(BASELINE, *(verdict(case, **{"add_bias": "False", **values}) for case, values in others.items()))
    assert kind_of(made, f"model.{field}") == kind
    assert made.count == len(DEFAULTS)
    if kind in ("varied", "blind"):
        assert getattr(made, kind)[f"model.{field}"][0] == DEFAULTS[f"model.{field}"]


def test_a_default_of_another_kind_of_model_is_that_kinds_alone():
    latent = verdict("latent-fp32-baseline")
    latent.observed["configuration"]["defaults"] = DEFAULTS | {"model.moe_router_topk": "8"}
    for both in ((BASELINE, latent), (latent, BASELINE)):
        assert set(account(*both).varied["model.moe_router_topk"]) == {"2", "8"}


@pytest.mark.parametrize(("version", "kind"), [("0.15.0", "varied"), ("0.18.2", "varied"), ("0.19.2", "blind")])
def test_trials_are_those_of_the_newest_release_up_to_the_version(version, kind):
    made = account(BASELINE, verdict("moe-fp32-baseline", moe_router_topk="8"), version=version)
    assert kind_of(made, "model.moe_router_topk") == kind


def test_a_driver_that_reports_no_configuration_accounts_for_nothing():
    assert account(CaseVerdict.model_validate(case_of("gpt-fp32-baseline"))) is None


def states(compared):
    return {field.name: (field.value, field.state) for field in compared.fields}


@pytest.mark.parametrize(("recipe", "state"), [("a_config", "not covered"), ("b_config", "without effect")])
def test_a_field_counts_in_a_recipe_that_sets_what_it_needs(recipe, state):
    compared = states(against(account(BASELINE, verdict("moe-fp32-tp2")), recipe, RECIPES, None, KNOWN))
    assert compared["model.graph_scope"] == ("attn", state)
    assert compared["model.sms"] == ("16", state)


def test_a_recipe_against_the_cases():
    made = account(BASELINE, verdict("moe-fp32-baseline", moe_router_topk="4", add_bias="False"))
    assert states(against(made, "a_config", RECIPES, None, KNOWN)) == {
        "model.add_bias": ("False", "fixed"),
        "model.cross_entropy": ("native", "fixed"),
        "model.dispatcher": ("flex", "not covered"),
        "model.gone": ("1", "not the library's"),
        "model.graph_scope": ("attn", "not covered"),
        "model.graphs": ("te", "not covered"),
        "model.moe_router_topk": ("8", "size"),
        "model.recompute": ("full", "not covered"),
        "model.sms": ("16", "not covered"),
        "optimizer.bf16": ("True", "not covered"),
    }


def test_fields_from_a_hub_are_unknown_without_the_file(tmp_path):
    made = account(BASELINE)
    without = states(against(made, "hub_config", RECIPES, None, KNOWN))
    unknown = {name for name, (_, state) in without.items() if state == "unknown"}
    assert unknown == {"model.rotary_base", "model.norm", "model.layers", "model.x"}
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"architectures": ["Llama"], "rope_parameters": {"rope_theta": 10000.0}, "n_layer": 32})
    )
    with_file = states(against(made, "hub_config", RECIPES, config, KNOWN))
    assert with_file["model.rotary_base"] == ("10000.0", "fixed")
    assert with_file["model.norm"] == ("RMSNorm", "not covered")
    assert with_file["model.layers"] == ("32", "not covered")
    assert with_file["model.x"] == (None, "unknown")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no such file"), ("{", "not valid JSON"), ("[]", "not a JSON object"), ("{}", "[]"),
        ('{"architectures": "Llama"}', "[]"), ('{"architectures": ["Other"]}', '["Other"]'),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config(tmp_path, content, why):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        against(account(BASELINE), "hub_config", RECIPES, path, KNOWN)
    assert why in caught.value.why


def test_a_recipe_that_there_is_not_is_refused_with_those_that_are_near():
    with pytest.raises(UsageError) as caught:
        against(account(BASELINE), "b_other_config", RECIPES, None, KNOWN)
    assert "near: b_config" in caught.value.why
    with pytest.raises(UsageError, match="--hf-config has no effect"):
        against(account(BASELINE), "a_config", RECIPES, __file__, KNOWN)


def test_the_shipped_knowledge_names_known_recipes_and_fields():
    known = recipes()
    assert {"llama3_8b_pretrain_2gpu_h100_bf16_config"} <= {*known.recipes}
    assert known.of_recipe("llama3_8b_pretrain_2gpu_h100_bf16_config")["scheduler.lr_decay_style"] == "cosine"
    assert {"LlamaForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"} <= known.converters.keys()
    tried = tried_fields()
    for trials in tried.trials.values():
        assert not trials.caught.keys() & {*trials.digits}
        assert trials.caught.keys().isdisjoint(tried.without_effect)


def test_certificate_has_the_account_and_the_command_prints_what_a_recipe_sets(world, command, capsys):
    world.certify()
    (path,) = world.certificates()
    predicate = statement_of(path)["predicate"]
    assert predicate["fields"]["varied"]["model.tensor_model_parallel_size"] == ["1", "2"]
    assert all("configuration" not in case["observed"] for case in predicate["cases"])
    only = ("--only", "gpt-fp32-tp2")
    assert command(*only, "--against", "llama3_8b_pretrain_2gpu_h100_bf16_config") == 0
    printed = capsys.readouterr().out
    assert "covered: 1 (" in printed
    assert "  model.hidden_dropout = ? (cases: 0.0)" in printed
    assert command("--against", "llama3_8b_pretrain_2gpu_h100_bf16_config") == 3
    assert "Certify first" in capsys.readouterr().err
    assert command(*only, "--hf-config", str(path)) == 2
