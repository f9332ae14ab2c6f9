"""Programs are run for real: small Python and shell children."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.processes import alive, forked, in_child, wait_until

from envbuild.core import exit_status, orphans, process, spawn
from envbuild.core.background import run_in_background
from envbuild.core.errors import BuildError, MachineError, NetworkError
from envbuild.core.exit_status import describe_status, mask
from envbuild.core.process import ProcessOptions, StreamLimits, answer, find_tool, run, stream

# A parent that starts a child of its own, writes both pids into the folder given, and waits.
FAMILY = """\
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
child = os.fork()
name = "parent" if child else "child"
(folder / (name + ".part")).write_text(str(os.getpid()))
(folder / (name + ".part")).rename(folder / name)
time.sleep(3600)
"""


LIMITED = ProcessOptions(timeout_seconds=1000)


@pytest.fixture
def end_time(monkeypatch):
    """Ends the time of a ``LIMITED`` program. Called when it is at work, however slowly it started."""
    monotonic = time.monotonic
    return lambda: monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 2000)


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-S", "-c", code, *map(str, arguments)]


def sh(code: str, *arguments: str) -> list[str]:
    return ["sh", "-c", code, "sh", *arguments]


def family(folder: Path) -> list[int]:
    files = [folder / "parent", folder / "child"]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize(("code", "status"), [("exit 0", 0), ("exit 255", 255), ("kill -KILL $$", -signal.SIGKILL)])
def test_run_returns_the_exit_status_or_the_signal(code, status):
    assert run(sh(code), what="try", check=False).status == status


def test_run_raises_the_given_error_class_with_the_last_lines(tmp_path):
    with pytest.raises(NetworkError, match="cannot fetch it: sh exited with status 7") as caught:
        run(
            sh("seq 100; exit 7"),
            what="fetch it",
            log=tmp_path / "log",
            options=ProcessOptions(error=NetworkError, fix="plug it in"),
        )
    assert caught.value.why.splitlines() == [str(number) for number in range(71, 101)]
    assert caught.value.fix == "plug it in"
    assert caught.value.log == tmp_path / "log"


def test_run_hands_on_lines_as_they_come(tmp_path):
    """The program waits for a file that is made when its first line arrives."""
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        (tmp_path / "seen").touch()

    run(
        sh(
            'printf fir; sleep 0.05; echo st; until [ -e "$1" ]; do sleep 0.01; done; printf "50%%\\rlast"',
            str(tmp_path / "seen"),
        ),
        what="try",
        on_line=on_line,
        options=ProcessOptions(timeout_seconds=300),
    )
    assert lines == ["first", "50%", "last"]


def test_run_log_holds_command_and_output_and_is_appended_to(tmp_path):
    log = tmp_path / "logs" / "log"
    run(sh('echo "$1"', "two words"), what="try", log=log)
    run(sh("echo no; exit 1"), what="try", log=log, check=False)
    assert log.read_text() == "$ sh -c 'echo \"$1\"' sh 'two words'\ntwo words\n$ sh -c 'echo no; exit 1' sh\nno\n"


def test_run_masks_credentials_in_the_log_and_the_error(tmp_path):
    with pytest.raises(BuildError) as caught:
        run(sh("exit 1", "https://me:secret@host/simple"), what="try", log=tmp_path / "log")
    for text in (caught.value.why, (tmp_path / "log").read_text()):
        assert "secret" not in text
        assert "https://***@host/simple" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--index=https://user:pass@host/x", "--index=https://***@host/x"),
        ("https://token@host", "https://***@host"),
        ("https://host/path@1.0 and me@host", "https://host/path@1.0 and me@host"),
        ("pkg @ git+ssh://git@host/a b://c:d@e/", "pkg @ git+ssh://***@host/a b://***@e/"),
    ],
)
def test_mask(text, expected):
    assert mask(text) == expected


@pytest.mark.parametrize("code", ["true", "echo output"])
def test_run_names_the_full_disk_under_the_log(code):
    with pytest.raises(MachineError, match="is full"):
        run(sh(code), what="try", log=Path("/dev/full"))


def test_log_keeps_arguments_that_are_not_utf8(tmp_path):
    log = tmp_path / "log"
    run(["echo", os.fsdecode(b"a\xffb")], what="echo", log=log)
    assert b"a\xffb" in log.read_bytes().splitlines()[0]


def test_run_names_the_full_disk_when_a_program_failed_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(exit_status, "space_is_low", lambda path: path == tmp_path)
    with pytest.raises(MachineError, match="is full"):
        run(sh("exit 1"), what="try", options=ProcessOptions(working_on=tmp_path))
    assert run(sh("exit 0"), what="try", options=ProcessOptions(working_on=tmp_path)).status == 0


@pytest.mark.parametrize("word", ["no-such-program-anywhere", "/no/such/program", "/etc/passwd", "/"])
def test_run_program_that_does_not_start_is_an_error_of_the_machine(word):
    with pytest.raises(MachineError, match="does not start") as caught:
        run([word], what="try")
    assert word in caught.value.what


def test_run_feeds_stdin_and_else_gives_none():
    assert run(["cat"], what="try", options=ProcessOptions(stdin=b"fed")).output == "fed"
    assert run(["cat"], what="try", options=ProcessOptions(stdin=b"")).output == ""
    assert run(["cat"], what="try").output == ""


def test_run_large_input_and_output_do_not_deadlock(tmp_path):
    data = b"0123456789abcde\n" * (10 * 1024 * 1024 // 16)
    finished = run(["cat"], what="try", log=tmp_path / "log", options=ProcessOptions(stdin=data, timeout_seconds=300))
    assert finished.output.encode() == data
    assert (tmp_path / "log").read_bytes() == b"$ cat\n" + data


def test_run_timeout_kills_a_grandchild_that_ignores_sigterm(tmp_path, end_time):
    stubborn = FAMILY.replace("name =", "child or signal.signal(signal.SIGTERM, signal.SIG_IGN)\nname =")
    pids: list[int] = []

    def watch(_line: str) -> None:
        pids.extend(family(tmp_path))
        end_time()

    with pytest.raises(BuildError):
        run(
            python(f"import signal\nprint(flush=True)\n{stubborn}", tmp_path),
            what="try",
            on_line=watch,
            options=LIMITED,
        )
    wait_until(lambda: not any(map(alive, pids)))


def test_run_timeout_holds_for_a_program_that_closes_its_output():
    with pytest.raises(BuildError, match="ran longer"):
        run(sh("exec >&- 2>&-; sleep 3600"), what="try", options=ProcessOptions(timeout_seconds=0.3))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_kills_the_group_when_interrupted(tmp_path, number):
    def work() -> None:
        signal.signal(number, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            run(python(FAMILY, tmp_path), what="try")

    with forked(work) as parent:
        pids = family(tmp_path)
        assert all(map(alive, pids))
        os.kill(parent, number)
        assert os.waitpid(parent, 0)[1] == 0
        wait_until(lambda: not any(map(alive, pids)))


def test_run_interrupted_twice_still_kills(tmp_path):
    """The second Ctrl-C comes while the program is given time to end."""
    code = 'trap \'touch "$1/asked"\' TERM; echo $$ > "$1/pid.part"; mv "$1/pid.part" "$1/pid"; '
    code += "while :; do sleep 0.05; done"

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            run(sh(code, str(tmp_path)), what="try")

    with forked(work) as parent:
        wait_until((tmp_path / "pid").exists)
        os.kill(parent, signal.SIGINT)
        wait_until((tmp_path / "asked").exists)
        os.kill(parent, signal.SIGINT)
        assert os.waitpid(parent, 0)[1] == 0
        assert not alive(int((tmp_path / "pid").read_text()))


def test_run_interrupted_while_the_program_starts_ends_it(tmp_path, monkeypatch):
    """It runs already, and nobody knows of it yet."""
    start, pids = spawn._start, []

    def interrupted(*arguments):
        started = start(*arguments)
        pids.append(started.pid)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return started

    monkeypatch.setattr(spawn, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["sleep", "3600"], what="try")
    assert not alive(*pids)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_run_program_dies_with_a_killed_parent(tmp_path):
    with forked(lambda: run(python(FAMILY, tmp_path), what="try")) as parent:
        child, _ = pids = family(tmp_path)
        try:
            os.kill(parent, signal.SIGKILL)
            wait_until(lambda: not alive(child))
            assert not alive(child)
        finally:
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)


# Leaves a program that holds the output; as uv does with a build, a waiter reads the pipe of another to its end.
LEAVE = """\
import os, pathlib, subprocess, sys, time
folder, how = sys.argv[1:]
code = "import os, pathlib, signal, sys, time; how = sys.argv[2]; "
code += "how == 'stubborn' and signal.signal(signal.SIGTERM, signal.SIG_IGN); "
code += "pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid())); "
code += "[(how == 'prints' and print('.', flush=True), time.sleep(0.1)) for _ in range(600)]"
subprocess.Popen([sys.executable, "-S", "-c", code, folder, how], start_new_session=how != "silent")
while not os.path.exists(os.path.join(folder, "pid")):
    time.sleep(0.01)
print("done", flush=True)
"""
WAITER = "import subprocess, sys; print(subprocess.run(sys.argv[1:], stdout=subprocess.PIPE).stdout)"


@pytest.fixture
def quick_looks(monkeypatch):
    """Looks for orphans 10 times as often."""
    for module in (process, orphans):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.05)


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize(
    ("how", "inside"), [("silent", False), ("session", True), ("prints", True), ("stubborn", False)]
)
def test_run_whole_ends_and_reports_what_holds_its_output(tmp_path, inside, how):
    command = python(LEAVE, tmp_path, how)
    log = tmp_path / "log"
    done = run(
        python(WAITER, *command) if inside else command,
        what="try",
        log=log,
        options=ProcessOptions(whole=True, timeout_seconds=300),
    )
    left = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(left))
    assert "done" in done.output
    assert f"(process {left})" in log.read_text()


@pytest.mark.usefixtures("quick_looks")
def test_run_whole_leaves_alone_what_runs_while_its_parent_works(tmp_path):
    """A compiler server, say, that the rest of the build still uses."""
    pid, seen = tmp_path / "pid", tmp_path / "seen"
    code = f"sleep 3600 & echo $! > {pid}; sleep 0.4; kill -0 $! && touch {seen}"
    done = run(
        python(WAITER, *sh(f"sh -c '{code}'; true")),
        what="try",
        options=ProcessOptions(whole=True, timeout_seconds=300),
    )
    assert seen.exists()
    assert "sleep 3600" in done.output
    # What is killed closes its files first, and is gone a moment later.
    wait_until(lambda: not alive(int(pid.read_text())))


def test_run_error_in_on_line_kills_the_program():
    pids: list[int] = []

    def on_line(line: str) -> None:
        pids.append(int(line))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(sh("echo $$; exec sleep 3600"), what="try", on_line=on_line)
    assert not alive(pids[0])


def test_run_leaves_no_open_files():
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def work() -> None:
        before = count()
        for _ in range(3):
            run(["cat"], what="try", options=ProcessOptions(stdin=b"x"))
            run(sh("exit 1"), what="try", check=False)
        assert count() == before

    assert in_child(work) == 0


def test_find_tool_looks_in_sbin_too_and_names_the_package_of_a_missing_program(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_tool("ldconfig", "libc-bin") in (Path("/usr/sbin/ldconfig"), Path("/sbin/ldconfig"))
    with pytest.raises(MachineError, match="no-such-tool is not installed") as caught:
        find_tool("no-such-tool", "some-package")
    assert "apt-get install some-package" in caught.value.fix


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (2, "exited with status 2"),
        (-15, "was ended by SIGTERM"),
        (-9, "was ended by SIGKILL (often: the machine ran out of memory)"),
        (-200, "was ended by signal 200"),
    ],
)
def test_describe_status(status, words):
    assert describe_status(status) == words


def test_background_thread_does_not_delay_exit():
    code = (
        "import time; from envbuild.core.background import run_in_background; run_in_background(lambda: time.sleep(30))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_stopping_background_work_ends_its_program_and_the_next_ones(tmp_path):
    def work():
        with pytest.raises(BuildError):
            run(["sleep", "3600"], what="sleep")
        run(["sleep", "3600"], what="sleep again")

    begun = run_in_background(work)
    wait_until(lambda: spawn.running)
    begun.stop()
    with pytest.raises(BuildError, match="cannot sleep again"):
        begun.result(timeout=300)


WARNS = "echo 'warning: setlocale: LC_ALL: cannot change locale (de_DE.UTF-8)' >&2; echo 'tool 1.2'; echo \"$LC_ALL\""


def test_answer_is_standard_output_alone_and_in_english(monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert answer(["/bin/sh", "-c", WARNS], what="ask") == "tool 1.2\nC"


def test_stream_has_all_of_the_output_and_then_the_failure():
    script = "head -c 3000000 /dev/zero; echo why >&2; exit 3"
    pieces = stream(["/bin/sh", "-c", script], what="read it", fix="Look.")
    count = 0
    while count < 3_000_000:
        count += len(next(pieces))
    with pytest.raises(BuildError, match="cannot read it") as caught:
        next(pieces)
    assert (count, caught.value.why, caught.value.fix) == (3_000_000, "why", "Look.")


def test_stream_that_is_closed_ends_its_program():
    pieces = stream(["/bin/sh", "-c", "echo $$; exec sleep 3600"], what="read it")
    pid = int(next(pieces))
    assert alive(pid)
    pieces.close()
    assert not alive(pid)


def test_stream_has_limits_for_what_reads_other_peoples_files():
    hungry = [sys.executable, "-c", "x = bytearray(300 << 20); print(len(x))"]
    with pytest.raises(BuildError, match="cannot read it") as caught:
        list(stream(hungry, what="read it", limits=StreamLimits(memory_bytes=256 << 20)))
    assert "MemoryError" in caught.value.why
    assert b"".join(stream(hungry, what="read it")) == b"314572800\n"


def test_stream_ends_what_prints_nothing_for_too_long(monkeypatch):
    waits = []

    def first_comes_whenever(read, write, other, seconds):
        waits.append(seconds)
        return select.select(read, write, other, 300 if len(waits) == 1 else 0.1)

    monkeypatch.setattr(process, "select", SimpleNamespace(select=first_comes_whenever))
    pieces = stream(["/bin/sh", "-c", "echo $$; exec sleep 999"], what="read it", limits=StreamLimits(idle_seconds=2))
    pid = int(next(pieces))
    with pytest.raises(BuildError, match="sh does not come to an end"):
        next(pieces)
    assert waits == [2, 2]
    assert not alive(pid)


def test_full_disk_is_the_one_that_a_program_could_not_write_to(tmp_path, monkeypatch):
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    cache.mkdir()
    full = {cache}
    monkeypatch.setattr(exit_status, "space_is_low", lambda path: path in full)
    # uv 0.13.8's words.
    line = f"cause: failed to write to file `{cache}/simple-v27/.tmpW`: No space left on device (os error 28)"
    assert exit_status.full_disk(f"error: x\n{line}\n", work) == cache
    assert exit_status.full_disk("No space left on device", work) == work
    full.clear()
    assert exit_status.full_disk(line, work) == work, "what is named inside a sandbox is not there"
    full.add(work)
    assert exit_status.full_disk(line, work) == work
