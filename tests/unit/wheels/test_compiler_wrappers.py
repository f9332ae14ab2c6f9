"""The compilers that a build sees: real processes that wait for tokens."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envbuild.wheels.architectures import Architectures
from envbuild.wheels.build import jobserver
from envbuild.wheels.build.compiler_wrappers import Tokens, write_wrappers
from envbuild.wheels.build.fixed_paths import BuildPaths
from envbuild.wheels.build.jobserver import HOLDS_TOKENS, acquire_tokens, needs_tokens
from envbuild.wheels.build.limits import Limits
from envbuild.wheels.toolchain.toolchain import Toolchain

SAY = '#!/bin/sh\nfor word; do echo "$word"; done\n'
# Writes down when it begins and ends. The first {most} wait for each other; the pause lets one begin that must not.
WORK = """\
#!{python} -IS
import os, time
log = os.path.join(os.path.dirname(os.path.abspath(__file__)), "log")
def write(word):
    with open(log, "a") as stream:
        stream.write(f"{{word}}\\n")
write("begin")
while open(log).read().count("begin") < {most}:
    time.sleep(0.01)
time.sleep(0.1)
write("end")
"""


def toolchain(folder: Path, program: str = SAY) -> Toolchain:
    for name in ("bin/nvcc", "bin/ptxas", "include/cuda.h", "host/gcc", "host/g++"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    host = folder / "host"
    return Toolchain(home=folder, cuda="13.0.88", cc=host / "gcc", cxx=host / "g++", host="g++ 12")


def tokens(folder: Path, jobs: int = 2, memory: int = 8, takes: int = 4) -> Tokens:
    folder.mkdir(exist_ok=True)
    return Tokens(folder=folder, limits=Limits(jobs=jobs, memory_gib=memory), job_memory_gib=takes)


def wrappers(tmp_path: Path, program: str = SAY, **limits: int):
    wanted = Architectures.named(["90a"], ["90a"])
    home = toolchain(tmp_path / "cuda 13", program)
    paths = BuildPaths(build=tmp_path / "s", environment=tmp_path / "e", cuda=home.home, stage=None)
    return write_wrappers(home, wanted, tokens(tmp_path / "t", **limits), tmp_path / "f", paths)


@pytest.mark.parametrize(
    ("limits", "most"), [({"jobs": 2}, 2), ({"jobs": 8, "memory": 8, "takes": 4}, 2), ({"jobs": 1}, 1)]
)
def test_no_more_compile_at_once_than_cores_and_memory_allow(tmp_path, limits, most):
    made = wrappers(tmp_path, WORK.format(python=sys.executable, most=most), **limits)
    running = [subprocess.Popen([made.cxx, "-c", "a.cpp"], env={}) for _ in range(4)]
    assert [process.wait(timeout=300) for process in running] == [0] * 4
    at_once = highest = 0
    words = (tmp_path / "cuda 13/host/log").read_text().split()
    for word in words:
        at_once += 1 if word == "begin" else -1
        highest = max(highest, at_once)
    assert (len(words), highest) == (8, most)


def test_tokens_come_back_with_the_compiler_however_it_ends(tmp_path):
    made = wrappers(tmp_path, "#!/bin/sh\nexec sleep 3600\n", jobs=1)
    held = subprocess.Popen([made.cxx, "-c", "a.cpp"], env={"PATH": os.environ["PATH"]})
    core = tmp_path / "t/core-0"
    while not core.exists():
        time.sleep(0.01)
    held.kill()
    held.wait()
    descriptors = acquire_tokens(str(tmp_path / "t"), 1, 8, 8)
    assert len(descriptors) == 1 + 8
    for descriptor in descriptors:
        os.close(descriptor)


def test_waiting_compilers_queue(tmp_path, monkeypatch):
    """Who waits holds the queue, so that one that needs much memory is not passed by others."""
    with (tmp_path / "queue").open("w") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        monkeypatch.setattr(jobserver.fcntl, "LOCK_EX", fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            acquire_tokens(str(tmp_path), 1, 8, 1)
    assert not (tmp_path / "core-0").exists()


def test_tokens_last_as_long_as_nvcc_itself(tmp_path):
    made = wrappers(tmp_path, "#!/bin/sh\necho $$ > $TMPDIR/pid; exec sleep 3600\n", jobs=1)
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    held = subprocess.Popen([made.cuda_home / "bin/nvcc", "-c", "a.cu"], env=environment)
    written = tmp_path / "pid"
    while not (written.exists() and written.read_text().strip()):
        time.sleep(0.01)
    held.kill()
    held.wait()
    with (tmp_path / "t/core-0").open() as core, pytest.raises(BlockingIOError):
        fcntl.flock(core, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(int(written.read_text()), signal.SIGKILL)
    for descriptor in acquire_tokens(str(tmp_path / "t"), 1, 8, 8):
        os.close(descriptor)


def test_nested_compilers_and_questions_take_no_tokens(tmp_path):
    made = wrappers(tmp_path, jobs=1)
    held = acquire_tokens(str(tmp_path / "t"), 1, 8, 4)
    done = subprocess.run(
        [made.cxx, "-c", "a.cpp"], env={HOLDS_TOKENS: "1"}, timeout=300, capture_output=True, check=True
    )
    assert b"a.cpp" in done.stdout
    asked = subprocess.run([made.cxx, "--version"], env={}, timeout=300, capture_output=True, check=True)
    assert b"--version" in asked.stdout
    for descriptor in held:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        ("-c a.cpp -o a.o", True),
        ("-shared a.o -o a.so", True),
        ("-dlink a.o", True),
        ("--version", False),
        ("-v", False),
        ("-E -", False),
        ("--dryrun a.cu", False),
        ("-I/x.cpp", False),
    ],
)
def test_commands_that_compile_take_tokens(arguments, needs):
    assert needs_tokens(arguments.split()) is needs
