"""Findings of pydantic in our own words."""

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from envbuild.core.validation import describe_errors


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
    ("text", "expected"),
    [
        ("{", "it is not JSON, or is truncated"),
        ("", "it is not JSON, or is truncated"),
        ("[]", "it has a wrong value"),
        ("{}", "name is missing"),
        ('{"name": 1}', "name has a wrong value (1)"),
        ('{"name": "bad"}', "name: bad is no name"),
        ('{"name": "a", "b": 1}', "the key b is unknown (another version of envbuild may have written it)"),
        ('{"name": "a", "inner": {"number": "x"}}', "inner.number has a wrong value ('x')"),
        ('{"name": "a", "b": 1, "c": 2, "d": 3, "e": 4}', "; and 1 more"),
    ],
)
def test_findings_are_described(text, expected):
    with pytest.raises(ValidationError) as caught:
        Thing.model_validate_json(text)
    message = describe_errors(caught.value)
    assert message.endswith(expected)
    assert not [word for word in ("pydantic", "type=", "\n", "Value error", "Input should") if word in message]
