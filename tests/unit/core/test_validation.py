"""Findings of pydantic in our own words."""

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from envbuild.core.validation import in_words


class Inner(BaseModel):
    number: int


class Thing(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    inner: Inner | None = None

    @field_validator("name")
    @classmethod
    def _named(cls, name: str) -> str:
        if name == "bad":
            raise ValueError("bad is no name")
        return name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is no JSON, or is cut off"),
        ("", "it is no JSON, or is cut off"),
        ("[]", "it is not what it should be"),
        ("{}", "it has no name"),
        ('{"name": 1}', "its name is not what it should be (1)"),
        ('{"name": "bad"}', "name: bad is no name"),
        ('{"name": "a", "b": 1}', "its b is not known here (another version of envbuild may have written it)"),
        ('{"name": "a", "inner": {"number": "x"}}', "its inner.number is not what it should be ('x')"),
        ('{"name": "a", "b": 1, "c": 2, "d": 3, "e": 4}', "; and 1 more"),
    ],
)
def test_findings_are_in_words(text, said):
    with pytest.raises(ValidationError) as caught:
        Thing.model_validate_json(text)
    told = in_words(caught.value)
    assert told.endswith(said)
    assert not [word for word in ("pydantic", "type=", "\n", "Value error", "Input should") if word in told]
