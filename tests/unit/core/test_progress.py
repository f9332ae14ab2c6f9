"""What people see: plain lines where there is no terminal, a live display on a real one (a pty)."""

import os
import pty
import re

import pytest
from helpers.processes import forked

from envbuild.core import progress
from envbuild.core.progress import PlainReporter, RichReporter, SilentReporter, choose_reporter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_plain_updates_come_at_most_every_15_seconds(clock, capsys):
    reporter = PlainReporter()
    with reporter.step("build"):
        for second in range(61):
            reporter.update(f"second {second}")
            clock.now += 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "second" in line]
    assert lines == [f"  build: second {second}" for second in (15, 30, 45, 60)]


def test_plain_nested_steps_print_updates_under_the_right_title(clock, capsys):
    reporter = PlainReporter()
    with reporter.step("outer"):
        with reporter.step("inner"):
            clock.now += 15
            reporter.update("a")
        clock.now += 15
        reporter.update("b")
    assert capsys.readouterr().err.splitlines() == [
        "* outer ...",
        "* inner ...",
        "  inner: a",
        "  inner: done in 15.0 s",
        "  outer: b",
        "  outer: done in 30.0 s",
    ]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_plain_step_that_fails_prints_stopped(clock, capsys, error):

    def work() -> None:
        with PlainReporter().step("resolve"):
            clock.now += 1
            raise error

    with pytest.raises(error):
        work()
    assert capsys.readouterr().err.splitlines()[-1] == "  resolve: stopped after 1.0 s"


def test_plain_update_drops_escape_codes_and_long_text(clock, capsys):
    reporter = PlainReporter()
    clock.now += 15
    reporter.update("\x1b[1;32mgreen\x1b[0m\x1b[K " + "x" * 500)
    line = capsys.readouterr().err
    assert "green xxx" in line
    assert len(line) < 200


def test_notes_and_titles_hold_nothing_that_a_terminal_acts_on(clock, capsys):
    """They have words of tools, of images and of results in them."""
    reporter = PlainReporter()
    with reporter.step("open \x1b]0;owned\x07"):
        reporter.note("rank 1 failed:\n\tdone\r\x1b[2K  certified \udcff")
    message = capsys.readouterr().err
    assert "rank 1 failed:\n\tdone\\r\\x1b[2K  certified \\udcff\n" in message
    assert "\x1b" not in message

    def work() -> None:
        reporter = RichReporter()
        with reporter.step("open \x1b]0;owned\x07"):
            reporter.note("done\r\x1b[5m certified \udcff")

    shown = on_a_terminal(work)
    assert "Traceback" not in shown
    assert "done\\r\\x1b[5m certified \\udcff" in shown
    assert "\x1b[5m" not in shown
    assert "\x1b]0" not in shown


def test_plain_reporter_goes_on_when_its_reader_left(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", closefd=False) as stream:
        monkeypatch.setattr("sys.stderr", stream)
        done = False
        with PlainReporter().step("resolve"):
            done = True
        os.dup2(os.open("/dev/null", os.O_WRONLY), writer)
    assert done


def test_choose_reporter_by_the_kind_of_stderr(capsys):
    assert isinstance(choose_reporter(quiet=True), SilentReporter)
    assert isinstance(choose_reporter(quiet=False), PlainReporter)


def on_a_terminal(action, columns: int = 80) -> str:
    """What ``action`` shows on a terminal of its own."""
    master, slave = pty.openpty()

    def child() -> None:
        os.close(master)
        os.dup2(slave, 1)
        os.dup2(slave, 2)
        os.environ.update(TERM="xterm", COLUMNS=str(columns))
        os.environ.pop("NO_COLOR", None)
        import sys

        sys.stderr = os.fdopen(2, "w", closefd=False)
        action()

    with forked(child):
        os.close(slave)
        shown = b""
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # EIO: the other end is closed
                break
            if not chunk:
                break
            shown += chunk
    os.close(master)
    return shown.decode()


def test_rich_reporter_on_a_terminal():
    def work() -> None:
        reporter = choose_reporter(quiet=False)
        assert isinstance(reporter, RichReporter)
        with reporter.step("outer [bold]"):
            with reporter.step("inner"):
                reporter.update("\x1b[5mcompiling [red]3/4 🚀")
                reporter.note("a note [red]")
            with pytest.raises(ZeroDivisionError), reporter.step("broken"):
                raise ZeroDivisionError

    shown = on_a_terminal(work)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "\x1b[" in shown
    assert "\x1b[5m" not in shown
    assert "inner: compiling [red]3/4 🚀" in text
    assert "a note [red]" in text
    endings = [line.split() for line in text.splitlines() if re.match(r"\s*(done|stopped) ", line)]
    assert [words[:2] for words in endings] == [["done", "inner"], ["stopped", "broken"], ["done", "outer"]]
    assert "Traceback" not in text


def test_rich_reporter_keeps_long_updates_on_one_line():
    def work() -> None:
        reporter = RichReporter()
        with reporter.step("step"):
            reporter.update("x" * 500)

    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_a_terminal(work, columns=40))
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= 40
    assert "step: xxx" in text
