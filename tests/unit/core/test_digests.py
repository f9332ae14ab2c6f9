"""Digests name values: the same value has one name, another value another."""

import hashlib

from envbuild.core.digests import CHUNK_BYTES, canonical_json, is_digest, sha256_bytes, sha256_file


def test_canonical_json_bytes():
    assert canonical_json({"b": [1, 2.5, None], "a": "ü"}) == '{"a":"ü","b":[1,2.5,null]}'.encode()


def test_sha256_file_reads_past_one_chunk(tmp_path):
    data = b"x" * (CHUNK_BYTES + 1)
    (tmp_path / "big").write_bytes(data)
    assert sha256_file(tmp_path / "big") == sha256_bytes(data) == "sha256:" + hashlib.sha256(data).hexdigest()


def test_what_a_digest_looks_like():
    digest = sha256_bytes(b"")
    assert is_digest(digest)
    assert not any(map(is_digest, (digest[:-1], f"{digest}0", f"{digest}\n", digest.upper(), digest[7:], "")))
