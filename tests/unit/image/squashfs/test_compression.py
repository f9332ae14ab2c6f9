"""Compressions of a .sqsh, and clusters whose nodes do not know them."""

import pytest
from helpers.errors import error_of

from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.image.squashfs.compression import DEFAULT, NAMES, Compression, check_readable


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zstd", "-comp zstd -Xcompression-level 1"),
        ("zstd:22", "-comp zstd -Xcompression-level 22"),
        ("gzip", "-comp gzip -Xcompression-level 6"),
        ("gzip:9", "-comp gzip -Xcompression-level 9"),
        ("lz4", "-comp lz4"),
        ("lzo", "-comp lzo -Xalgorithm lzo1x_1_15"),
        ("lzo:8", "-comp lzo -Xcompression-level 8"),
    ],
)
def test_compression_in_words_of_mksquashfs(text, words):
    assert " ".join(Compression.parse(text).options()) == words
    assert str(Compression.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "xz", "zstd:", "zstd:0", "zstd:23", "gzip:10", "lz4:1", "zstd:3:3", "zstd:٣", "gzip:-1"]
)
def test_unknown_compression_is_refused(text):
    error = error_of(UsageError, Compression.parse, text)
    assert error.why
    assert error.fix


def test_what_nodes_cannot_read_is_refused_with_what_they_can():
    with pytest.raises(ConfigurationError, match=r"cannot read a \.sqsh compressed with zstd") as caught:
        check_readable(DEFAULT, ("lz4", "gzip"), "old")
    assert 'sqsh_compression = ["lz4", "gzip"]' in caught.value.why
    assert "--sqsh-compression lz4" in caught.value.fix


def test_what_nodes_can_read_passes():
    check_readable(DEFAULT, ("lz4", "zstd"), "new")
    for name in NAMES:
        check_readable(Compression(name=name), (), "silent")
