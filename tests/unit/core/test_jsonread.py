"""JSON of our own programs has one meaning, whoever reads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.core.digests import canonical_json
from envbuild.core.jsonread import loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), inner),
    max_leaves=10,
)  # fmt: skip


@given(VALUES)
def test_what_we_write_is_read_as_it_was(value):
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
