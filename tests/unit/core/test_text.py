"""What somebody else wrote reaches a terminal as text: no colour, no title, no line that overwrites another."""

import pytest

from envbuild.core.text import printable, printable_lines


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
