"""What somebody else wrote reaches a terminal as text: no colour, no title, no line that overwrites another."""

from pathlib import Path

import pytest

from envbuild.core.text import printable, printable_lines, quoted_command


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
