"""Recipes: variables that a build can have, and no others."""

import pytest
from pydantic import ValidationError

from envbuild.catalog.recipe import WheelRecipe


def recipe(name: str, value: str) -> WheelRecipe:
    return WheelRecipe.model_validate({"summary": "s", "variables": {name: {"value": value, "reason": "r"}}})


@pytest.mark.parametrize("value", ["TRUE", "{sm}", "-I{cuda_major} {sm_dotted}"])
def test_values_that_a_variable_can_have(value):
    assert recipe("X", value).variables["X"].value == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a\0b", "control characters"),
        ("a\nb", "control characters"),
        ("{sms}", "{sms} is not a placeholder; there are {sm}, {sm_dotted}, {cuda_major}"),
        ("{", "is not a placeholder"),
        ("{sm", "is not a placeholder"),
    ],
)
def test_values_that_would_do_something_else_than_was_meant(value, expected):
    with pytest.raises(ValidationError) as refused:
        recipe("X", value)
    assert expected in str(refused.value)


@pytest.mark.parametrize("name", ["PATH", "TORCH_CUDA_ARCH_LIST", "CC"])
def test_what_every_build_gets_is_no_recipes_to_set(name):
    with pytest.raises(ValidationError, match=f"{name} is set by envbuild"):
        recipe(name, "x")
