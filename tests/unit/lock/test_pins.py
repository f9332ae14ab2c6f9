"""What a text after --pin means is decided by its looks alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.core.errors import ConfigurationError
from envbuild.git.refs import GitRef
from envbuild.lock.inputs.pins import SpecifierRef, VersionRef, parse_ref, ref_text

SHA = "0123456789abcdef0123456789abcdef01234567"


SPECIFIERS = (">=2.7,<3", "==2.7.*", "~=2.3.0", "!=2.4", "<=1.0.post1", "===2.7.3", ">2, <3")
VERSIONS = ("2.7.3", "2.3.2.post1", "2.3.0rc4", "2.7.0+cu128", "1!2.0", "2.3", "2024", "123456", "2.0.dev20240115")
# Names, and all 40 or at least 7 digits of a commit, though PEP 440 takes some of these.
NAMES = ("main", "v2.3.0", "V2.3", "v2024", "core_v0.19.0", "dev/some-work", "25.04-alpha", "refs/heads/2.3", "naïve")
COMMITS = (SHA, SHA.upper(), SHA[:9], "1234567", "20240115", "123c456", "1234567a1")


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        *((text, SpecifierRef(text)) for text in SPECIFIERS),
        *((text, VersionRef(text)) for text in VERSIONS),
        *((text, GitRef(text)) for text in (*NAMES, *COMMITS, "abcdef")),
        *((f"git:{name}", GitRef(name)) for name in ("2.3", "2024", "main", "=x", "<y")),
        *((f"version:{version}", VersionRef(version)) for version in ("v2.3.0", "2.7.3", "1234567")),
        (" 2.7.3\n", VersionRef("2.7.3")),
    ],
)
def test_parse_ref(text, ref):
    assert parse_ref(text) == ref


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("git:", "empty"),
        ("version:main", "not a PEP 440 version"),
        ("version:>=2", "not a PEP 440 version"),
        (">=2.7 <3", "begins like a version specifier"),
        ("=2.7", "begins like a version specifier"),
        ("2.7.*", "==2.7.*"),
        ("main~3", "name the commit itself"),
        ("v1.0^{}", "name the commit itself"),
        ("a..b", "name the commit itself"),
        ("main@{yesterday}", "name the commit itself"),
        ("-upload-pack=x", "is not allowed"),
        ("git:--upload-pack=x", "is not allowed"),
        ("two words", "is not allowed"),
        ("a\x00b", "is not allowed"),
        ("ref.lock", "is not allowed"),
        ("a/.b", "is not allowed"),
        ("a//b", "is not allowed"),
        ("a/", "is not allowed"),
        ("@", "is not allowed"),
    ],
)
def test_parse_ref_refuses(text, part):
    with pytest.raises(ConfigurationError) as caught:
        parse_ref(text)
    assert part in caught.value.why
    assert "version:" in caught.value.fix
    assert caught.value.exit_code == 3


@given(st.text(alphabet="git:version0123456789abcdef.*<>=!~,-+/ rcmn", max_size=12))
def test_parse_ref_text_of_a_ref_is_that_ref(text):
    try:
        ref = parse_ref(text)
    except ConfigurationError:
        return
    assert parse_ref(ref_text(ref)) == ref


@pytest.mark.parametrize("text", ["git:2.3", "version:v2.3.0", "version:1234567", "git:=x", "main", "2.7.3", ">=2"])
def test_ref_text_keeps_a_prefix_that_is_needed(text):
    assert ref_text(parse_ref(text)) == text


@pytest.mark.parametrize("text", ["git:main", "git:v2.3.0", "version:2.7.3"])
def test_ref_text_drops_a_prefix_that_is_not(text):
    assert ref_text(parse_ref(text)) == text.partition(":")[2]
