"""The environment of a command inside an image."""

import pytest

from envbuild.launch.open_image import parse_environment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PATH=/a:/b\nLANG=C.UTF-8\n", {"PATH": "/a:/b", "LANG": "C.UTF-8"}),
        ("A=x=y\n", {"A": "x=y"}),
        ("EMPTY=\n", {"EMPTY": ""}),
        ("A=two words\n", {"A": "two words"}),
        ("A='quoted'\nB=\"double\"\nC=it's\nD='\n", {"A": "quoted", "B": "double", "C": "it's", "D": "'"}),
        ("A=1\nB=${A}/x:${A}\n", {"A": "1", "B": "1/x:1"}),
        ("B=$A ${not-a-name}\n", {"B": "$A ${not-a-name}"}),
        ("\n# comment\nno equals sign\n=value\n", {}),
    ],
)
def test_environment_is_read_as_enroot_reads_it(text, expected):
    assert parse_environment(text) == expected


def test_environment_never_takes_a_variable_of_this_machine(monkeypatch):
    monkeypatch.setenv("SECRET", "leak")
    assert parse_environment("A=${SECRET}x\n") == {"A": "x"}
