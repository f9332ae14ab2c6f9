"""Digests name values: the same value has one name, another value another."""

import hashlib
from pathlib import Path

import pytest

from envbuild.core.digests import CHUNK_BYTES, canonical_json, is_digest, sha256_bytes, sha256_file
from envbuild.core.text import printable, printable_lines, quoted_command


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


@pytest.mark.parametrize(
    ("text", "one_line", "lines"),
    [
        ("plain, with é and 🚀", "plain, with é and 🚀", "plain, with é and 🚀"),
        ("a\n\tb", "a\\n\\tb", "a\n\tb"),
        ("\x1b[2Jdone\r\x9b1m\x00", "\\x1b[2Jdone\\r\\x9b1m\\x00", "\\x1b[2Jdone\\r\\x9b1m\\x00"),
        ("right\u202eleft\u2028", "right\\u202eleft\\u2028", "right\\u202eleft\\u2028"),
        ("\udcff\ud800", "\\udcff\\ud800", "\\udcff\\ud800"),
    ],
)
def test_what_a_terminal_acts_on_is_written_out(text, one_line, lines):
    assert (printable(text), printable_lines(text)) == (one_line, lines)


def test_a_command_is_quoted_where_a_shell_would_act():
    assert quoted_command("envbuild", "pull", "host/repo:tag") == "envbuild pull host/repo:tag"
    assert quoted_command("pull", "x;touch p;#", Path("a b")) == "pull 'x;touch p;#' 'a b'"
