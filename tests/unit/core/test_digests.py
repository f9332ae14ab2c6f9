"""Digests name values: the same value has one name, another value another."""

import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st

from envbuild.core.digests import CHUNK_BYTES, canonical_json, digest_of, sha256_bytes, sha256_file, short

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_canonical_json_is_json_of_the_same_value(value):
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(text, values, max_size=5), st.randoms())
def test_canonical_json_ignores_the_order_of_keys(value, random):
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)


@given(st.lists(values, max_size=4))
def test_canonical_json_takes_tuples_for_lists(value):
    assert digest_of(tuple(value)) == digest_of(value)


@given(values, values)
def test_digest_differs_when_the_json_differs(one, other):
    assert (digest_of(one) == digest_of(other)) == (
        json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    )


def test_canonical_json_bytes():
    assert canonical_json({"b": [1, 2.5, None], "a": "ü"}) == '{"a":"ü","b":[1,2.5,null]}'.encode()


def test_sha256_file_reads_past_one_chunk(tmp_path):
    data = b"x" * (CHUNK_BYTES + 1)
    (tmp_path / "big").write_bytes(data)
    assert sha256_file(tmp_path / "big") == sha256_bytes(data) == "sha256:" + hashlib.sha256(data).hexdigest()


def test_short_is_the_first_twelve_digits():
    assert short("sha256:" + "0123456789abcdef" * 4) == "0123456789ab"
