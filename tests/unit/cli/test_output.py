"""A result that cannot be written is a failure with one message; a message that cannot be written changes nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.cli.commands import COMMANDS
from envbuild.cli.common import Session
from envbuild.cli.main import run
from envbuild.cli.report import print_error, render
from envbuild.core.errors import UsageError

ENVBUILD = [sys.executable, "-m", "envbuild"]


def redirected(redirection: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'"$@" {redirection}', "sh", *ENVBUILD, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "redirection", "why"),
    [
        (["list", "targets"], ">/dev/full", "No space left on device"),
        (["list", "targets", "--json"], ">&-", "It is closed"),
        (["--version"], ">/dev/full", "No space left on device"),
        (["lock", "--help"], "<&- >&-", "closed"),
    ],
)
def test_result_that_cannot_be_written_is_one_error(tmp_path, arguments, redirection, why):
    done = redirected(redirection, arguments, tmp_path)
    assert done.returncode == 11
    assert done.stderr.count("error: ") == 1
    assert done.stderr.startswith("error: standard output cannot be written\n")
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "redirection"),
    [(["nope"], "2>/dev/full"), (["nope", "--json"], ">/dev/full 2>/dev/full"), (["list"], ">&- 2>&-")],
)
def test_exit_code_holds_where_nothing_can_be_printed(tmp_path, arguments, redirection):
    assert redirected(redirection, arguments, tmp_path).returncode == 2


def test_json_error_that_cannot_be_written_is_printed_once(tmp_path):
    done = redirected(">/dev/full", ["nope", "--json"], tmp_path)
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)
    assert "no such command 'nope'" in done.stderr


def test_silence_needs_no_standard_output(tmp_path):
    done = redirected(">&-", ["list", "targets", "--quiet"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_that_cannot_be_written_does_not_stop_the_work(tmp_path):
    code = "import sys; from envbuild.core.progress import PlainReporter\nwith PlainReporter().step('x'): print('done')"
    command = ["sh", "-c", '"$@" 2>/dev/full', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path).stdout == "done\n"


def test_no_file_of_the_work_gets_the_number_of_a_closed_stream(tmp_path):
    code = "from envbuild.cli.output import *\nopen_closed_streams()\n"
    code += "open('g', 'w').write(str(open('f', 'w').fileno() > 2))"
    subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert (tmp_path / "g").read_text() == "True"


@pytest.mark.parametrize("name", list(COMMANDS))
@pytest.mark.parametrize("arguments", [["{}", "--json", "--help"], ["{}", "-h", "--json"], ["--json", "{}", "--help"]])
def test_help_of_a_command_as_an_object(name, arguments, capsys):
    assert run([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert run([word.format(name) for word in arguments]) == 0
    assert json.loads(capsys.readouterr().out) == {"help": text}


def test_result_holds_nothing_that_a_terminal_acts_on(capsys):
    """Names and versions in it are what somebody wrote; JSON has escapes of its own."""
    Session(as_json=False, quiet=False).done({}, "torch \x1b[2J\udcff:\ta", "b")
    assert capsys.readouterr().out == "torch \\x1b[2J\\udcff:\ta\nb\n"
    Session(as_json=True, quiet=False).done({"torch": "\x1b[2J\udcff"})
    assert capsys.readouterr().out == '{\n  "torch": "\\u001b[2J\\udcff"\n}\n'


def test_error_holds_nothing_that_a_terminal_acts_on_and_no_endless_line():
    error = UsageError("open \x1b[2J", why="x" * 10**6 + "\nnext\r\x1b[2K", fix="do\x07", log=Path("/tmp/\x9b"))
    lines = render(error, [], colour=False).splitlines()
    assert all(line.isprintable() for line in lines)
    assert (max(map(len, lines)) < 5000, lines[0], lines[2]) == (True, r"error: open \x1b[2J", r"         next")
    assert lines[3] == r"         \x1b[2K"


@pytest.mark.parametrize(("value", "coloured"), [(None, True), ("", True), ("1", False)])
def test_no_color_counts_unless_it_is_empty(value, coloured, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    print_error(UsageError("no", why="why", fix="fix"))
    assert ("\x1b[" in capsys.readouterr().err) is coloured
