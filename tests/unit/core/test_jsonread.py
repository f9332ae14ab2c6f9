"""JSON of our own programs has one meaning, whoever reads it."""

import pytest

from envbuild.core.digests import canonical_json
from envbuild.core.jsonread import loads


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
