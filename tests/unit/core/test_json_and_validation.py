"""Findings of pydantic in our own words."""

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from envbuild.core.digests import canonical_json
from envbuild.core.jsonread import loads
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


def test_what_we_write_is_read_as_it_was():
    value = {"a": [None, True, 2**63 - 1, -1.5e-300, "\u20ac\0"], "": {}}
    assert loads(canonical_json(value)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "a key twice"),
        ("[NaN]", "JSON has no NaN"),
        ("-Infinity", "JSON has no -Infinity"),
        ("1e999", "1e999 is too large"),
        ("-1e999", "-1e999 is too large"),
        ("9223372036854775808", "9223372036854775808 is too large"),
        ("1" + "0" * 400, "1000000000000000000000000000000000000000 is too large"),
        ("1" + "0" * 5000, ""),
        ("[" * 100_000, "nested too deeply"),
        ("", ""),
        (b"\xff", ""),
        ("{} {}", ""),
    ],
)
def test_what_readers_would_take_differently_is_refused(text, words):
    with pytest.raises(ValueError, match=words or None):
        loads(text)
