"""``envbuild image inspect|diff``: what is asked for in the wrong way, and what a difference ends with."""

import json

import pytest
from helpers.layer_tars import file, layout_of

from envbuild.cli.main import run
from envbuild.oci.models import RunConfig

pytestmark = pytest.mark.usefixtures("project")


def layout(folder, content, name="base", **labels):
    folder.mkdir()
    config = RunConfig(labels=tuple(labels.items()))
    layout_of(folder, file("etc/x", content), config=config, tag="t", name=name)
    return str(folder / "oci")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["image", "inspect"], "Neither IMAGE nor --stack"),
        (["image", "inspect", "x", "--stack", "s"], "Both IMAGE and --stack"),
        (["image", "--stack", "s", "inspect", "x"], "options of `image inspect` come after its name"),
        (["image", "diff", "x"], "NEW"),
        (["image", "diff", "x", "y", "--times"], "--times needs --files"),
        (["image", "diff", "x", "y", "--times"], "envbuild image diff x y --files --times"),
        (["image", "inspct"], "inspct"),
    ],
)
def test_wrong_command_line(arguments, words, capsys):
    assert run(arguments) == 2
    assert words in capsys.readouterr().err


def test_image_that_is_not_there(capsys):
    assert run(["image", "inspect", "nothing"]) == 3
    assert "there is no image nothing" in capsys.readouterr().err


def test_an_empty_name(capsys):
    assert run(["image", "inspect", ""]) == 3
    message = capsys.readouterr().err
    assert "there is no image ''" in message
    assert "The name is empty" in message


def test_difference_is_a_result_and_an_exit_code_when_asked(tmp_path, capsys):
    one, two = layout(tmp_path / "one", b"1", a="b"), layout(tmp_path / "two", b"2", a="c")
    assert run(["image", "diff", one, two, "--json", "--files", "--quiet"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not printed["equal"]
    assert printed["configuration"] == [{"name": "label a", "from": "b", "to": "c"}]
    assert [file["path"] for file in printed["files"]] == ["/etc/x"]
    assert run(["image", "diff", one, two, "--exit-code"]) == 5
    assert run(["image", "diff", one, one, "--exit-code"]) == 0
    shown = capsys.readouterr().out
    assert "label a: b -> c" in shown
    assert "layers: 0 of 1 are shared" in shown
    assert list((tmp_path / "cache/staging").iterdir()) == []


def test_layout_is_inspected(tmp_path, capsys):
    assert run(["image", "inspect", layout(tmp_path / "one", b"1", a="b"), "--json", "--quiet"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["kind"], printed["platform"], printed["configuration"]["labels"]) == (
        "layout",
        "linux/amd64",
        {"a": "b"},
    )
    assert [layer["files"] for layer in printed["layers"]] == [1]


def blob_of(folder):
    return max(path for path in (folder / "oci/blobs/sha256").iterdir() if path.read_bytes()[:2] == b"\x1f\x8b")


def cut(content):
    return content[:-20]


def turned(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(("damage", "words"), [(cut, "the blob has"), (turned, "The digest of the blob should be")])
@pytest.mark.parametrize("command", [["inspect"], ["diff", "../one/oci"]])
def test_blob_is_compared_with_its_digest_also_where_its_scan_is_cached(tmp_path, capsys, damage, words, command):
    layout(tmp_path / "one", b"1")
    two = layout(tmp_path / "two", b"1")
    assert run(["image", *command, two]) == 0
    blob = blob_of(tmp_path / "two")
    blob.write_bytes(damage(blob.read_bytes()))
    assert run(["image", *command, two]) == 5
    assert words in capsys.readouterr().err


def test_texts_of_an_image_do_not_reach_the_terminal_raw(tmp_path, capsys):
    one = layout(tmp_path / "one", b"1", name="RUN \x1b]0;owned\x07", a="b")
    two = layout(tmp_path / "two", b"2", name="RUN \x1b]0;owned\x07", a="\x1b[2J\x9b\nlabels:")
    for command in (["inspect", two], ["inspect", two], ["diff", one, two]):
        assert run(["image", *command]) == 0
        shown, message = capsys.readouterr()
        assert "\\x1b[2J\\x9b\\nlabels:" in shown
        assert "\x1b" not in shown + message
    assert run(["image", "inspect", one + ":\x1b[2J"]) == 5
    index = tmp_path / "one/oci/index.json"
    index.write_text(index.read_text().replace('"t"', '"\\u001b[2J"'))
    assert run(["image", "inspect", one + ":none"]) == 5
    assert "in it are: \\x1b[2J" in capsys.readouterr().err
