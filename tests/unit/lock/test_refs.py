"""What a text after --pin means is decided by its looks alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.core.errors import ConfigurationError
from envbuild.git.refs import GitRef
from envbuild.lock.inputs.refs import SpecifierRef, VersionRef, parse_ref, ref_text

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("text", [">=2.7,<3", "==2.7.*", "~=2.3.0", "!=2.4", "<=1.0.post1", "===2.7.3", ">2, <3"])
def test_parse_ref_specifier(text):
    assert parse_ref(text) == SpecifierRef(text)


@pytest.mark.parametrize(
    "text",
    ["2.7.3", "0.16.1", "2.3.2.post1", "2.3.0rc4", "2.7.0+cu128", "1!2.0", "2.3", "2024", "123456", "2.0.dev20240115"],
)
def test_parse_ref_version(text):
    assert parse_ref(text) == VersionRef(text)


@pytest.mark.parametrize(
    "text",
    [
        "main",
        "v2.3.0",
        "V2.3",
        "v2024",
        "core_v0.19.0",
        "r2.3.0",
        "dev/some-work",
        "25.04-alpha",
        "refs/heads/2.3",
        "naïve",
        SHA,
        SHA.upper(),
        SHA[:9],
    ],
)
def test_parse_ref_git(text):
    assert parse_ref(text) == GitRef(text)


@pytest.mark.parametrize("digits", ["1234567", "20240115", "123c456", "1234567a1"])
def test_parse_ref_seven_hex_digits_are_a_commit_though_pep_440_takes_them(digits):
    assert parse_ref(digits) == GitRef(digits)
    assert parse_ref(digits).may_be_commit
    assert parse_ref(f"version:{digits}") == VersionRef(digits)


def test_parse_ref_six_hex_digits_are_no_commit():
    assert parse_ref("123456") == VersionRef("123456")
    assert parse_ref("abcdef") == GitRef("abcdef")
    assert not GitRef("abcdef").may_be_commit
    assert GitRef("abcdef0").may_be_commit


@pytest.mark.parametrize("name", ["2.3", "2024", "2.7.3", "main", "=x", "<y"])
def test_parse_ref_git_prefix_settles(name):
    assert parse_ref(f"git:{name}") == GitRef(name)


@pytest.mark.parametrize("version", ["v2.3.0", "2.7.3"])
def test_parse_ref_version_prefix_settles(version):
    assert parse_ref(f"version:{version}") == VersionRef(version)
    assert VersionRef(version).specifier == f"=={version}"


def test_parse_ref_ignores_space_around():
    assert parse_ref(" 2.7.3\n") == VersionRef("2.7.3")


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
def test_parse_ref_text_keeps_a_prefix_that_is_needed(text):
    assert ref_text(parse_ref(text)) == text


@pytest.mark.parametrize("name", ["main", "v2.3.0", "2.7.3"])
def test_parse_ref_text_drops_a_prefix_that_is_not(name):
    prefix = "version:" if name[0].isdigit() else "git:"
    assert ref_text(parse_ref(prefix + name)) == name
