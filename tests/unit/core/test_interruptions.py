"""Ctrl-C stays Ctrl-C, whatever the cleaning up behind it raises."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from envbuild.cli.report import explain
from envbuild.core.errors import BuildError, InterruptedByUserError
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.interruptions import has_come, refuse_hidden_interruption, stoppable


def close_twice(path: Path) -> None:
    """What shutil.rmtree does when a signal comes between the closing of a folder and the note that it is closed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.close(descriptor)
        raise KeyboardInterrupt
    finally:
        os.close(descriptor)


def raised_by(work) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_machine_errors_pass_an_interruption_on(tmp_path):
    with pytest.raises(KeyboardInterrupt), machine_errors(tmp_path):
        close_twice(tmp_path)


def test_an_error_behind_an_interruption_is_explained_as_one(tmp_path):
    error = raised_by(lambda: close_twice(tmp_path))
    assert isinstance(error, OSError)
    assert isinstance(explain(error), InterruptedByUserError)


def test_error_raised_from_an_interruption_is_one_too(tmp_path):
    def build() -> None:
        try:
            close_twice(tmp_path)
        except OSError as error:
            raise BuildError("cannot build", why="It failed.", fix="See the log.") from error

    error = raised_by(build)
    assert explain(error).exit_code == 130
    with pytest.raises(KeyboardInterrupt):
        refuse_hidden_interruption(error)


def test_an_error_that_replaces_an_interruption_on_purpose_stays_what_it_is():
    def stop() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise BuildError("gave up", why="It was told to.", fix="Go on.") from None

    assert isinstance(explain(raised_by(stop)), BuildError)


def run_main(work: str) -> subprocess.CompletedProcess[str]:
    """envbuild's main() with ``work`` as the body of its command."""
    body = "\n".join(f"    {line}" for line in work.strip().splitlines())
    # Under nohup these tests have SIGHUP ignored.
    code = "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code += f"from pathlib import Path\nfrom envbuild.cli import main\ndef run(arguments):\n{body}\n"
    code += "    return 0\nmain._dispatch = run\nmain.main()\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


SWALLOWED = """
try:
    os.kill(os.getpid(), {number})
except KeyboardInterrupt as error:
    text = repr(error)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_library_that_keeps_but_the_name_of_an_interruption(number):
    """As pydantic does it: its SchemaError has the word KeyboardInterrupt in its text, and no exception behind it."""
    done = run_main(SWALLOWED.format(number=int(number)) + "raise ValueError(text)")
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr


def test_known_failure_after_a_lost_signal_keeps_its_class():
    known = "from envbuild.core.errors import BuildError\nraise BuildError('it', why='so', fix='do')"
    done = run_main(SWALLOWED.format(number=int(signal.SIGINT)) + known)
    assert done.returncode == 6, done.stderr


def test_an_unknown_failure_without_a_signal_is_a_fault():
    assert run_main("raise ValueError('KeyboardInterrupt')").returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_removing_a_tree_is_interrupted_wherever_the_signal_comes(tmp_path, number):
    """The signal comes at the moment when a folder of the tree has just been closed."""
    (tmp_path / "tree" / "below" / "deeper").mkdir(parents=True)
    done = run_main(f"""
close, sent = os.close, []
def closed(descriptor):
    close(descriptor)
    if not sent:
        sent.append(1)
        os.kill(os.getpid(), {int(number)})
from envbuild.core.files import remove_tree
os.close = closed
remove_tree(Path({str(tmp_path / "tree")!r}))
""")
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr
    assert "descriptor" not in done.stderr
    remove_tree(tmp_path / "tree")


def test_a_thread_ends_the_work_of_the_main_one_and_nothing_else() -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def waits() -> None:
        with stoppable() as stop:
            thread = threading.Timer(0, stop)
            thread.start()
            threading.Event().wait(300)
            pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        waits()
    assert not has_come()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_what_another_thread_does_is_not_ended() -> None:
    ended: list[bool] = []

    def waits() -> None:
        with stoppable() as stop:
            stop()
            ended.append(False)

    thread = threading.Thread(target=waits)
    thread.start()
    thread.join()
    assert ended == [False]
