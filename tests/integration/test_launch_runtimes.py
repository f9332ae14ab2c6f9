"""Every runtime for real: what a command inside sees, what it does not, and what is left when it is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.inside import run_in_sqsh, run_inside
from helpers.processes import forked, in_child, unprivileged, wait_until

from envbuild.core import sandbox
from envbuild.core.errors import BuildError, MachineError
from envbuild.core.sandbox import Bind
from envbuild.launch.open_image import OpenImage, open_image
from envbuild.launch.runtimes import RUNTIMES, probe
from envbuild.store.local import temporary_store

PYTHON = "/opt/envbuild/venv/bin/python"
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="module")
def sqsh(mini_image: dict[str, Any]) -> Iterator[Path]:
    """The image's .sqsh, where every user can read it."""
    folder = Path(tempfile.mkdtemp(prefix="envbuild-test-"))
    folder.chmod(0o755)
    shutil.copy(Path(mini_image["path"]) / "image.sqsh", folder)
    yield folder / "image.sqsh"
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=list(RUNTIMES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def image(name: str, sqsh: Path) -> Iterator[OpenImage]:
    """The image, opened once with each runtime."""
    with open_image(probe(name), sqsh) as opened:
        yield opened


def output_of(image: OpenImage, *argv: str, **options: Any) -> str:
    finished = run_inside(image, argv, **options)
    assert finished.status == 0, finished.output
    return finished.output


def test_command_runs_with_the_images_python(image: OpenImage) -> None:
    script = "import sys, psutil; print(sys.prefix, psutil.__version__, psutil.__file__)"
    printed = output_of(image, "python", "-c", script)
    assert printed == "/opt/envbuild/venv 7.0.0 " + printed.split()[2] + "\n"
    assert printed.split()[2].startswith("/opt/envbuild/venv/")


def test_environment_is_the_images_own_and_what_is_given(image: OpenImage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "of this machine")
    monkeypatch.setenv("PYTHONPATH", "/of/this/machine")
    printed = output_of(image, "/usr/bin/env", variables={"GIVEN": "a value", "LD_LIBRARY_PATH": "/x"})
    seen = dict(line.split("=", 1) for line in printed.splitlines())
    assert seen.pop("PWD", "/") == "/"
    assert seen == {
        "PATH": "/opt/envbuild/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "VIRTUAL_ENV": "/opt/envbuild/venv",
        "LANG": "C.UTF-8",
        "GIVEN": "a value",
        "LD_LIBRARY_PATH": "/x",
    }


LOOPBACK = """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(("localhost", server.getsockname()[1]), timeout=300)
server.accept()[0].sendall(b"hello")
print(client.recv(9).decode(), [name for _, name in socket.if_nameindex()])
"""


def test_network_is_loopback_alone_and_it_works(image: OpenImage) -> None:
    assert output_of(image, PYTHON, "-c", LOOPBACK) == "hello ['lo']\n"


WRITING = """
import os, shutil
for place in ("/", "/opt/envbuild/venv/x", "/etc/passwd", "/usr/bin/x", "/envbuild/plan/x"):
    try:
        open(place if place != "/" else "/x", "a")
        print("wrote", place)
    except OSError as error:
        pass
for place in ("/tmp", "/run", "/dev/shm", "/envbuild/results"):
    with open(place + "/file", "w") as stream:
        stream.write("x" * 100000)
print("shm", shutil.disk_usage("/dev/shm").total > 64 << 20, os.listdir("/tmp"), os.getuid())
"""


def test_only_private_places_and_what_is_bound_can_be_written(image: OpenImage, tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "plan/plan.json").write_text("{}")
    printed = output_of(
        image,
        PYTHON,
        "-c",
        WRITING,
        binds=[
            Bind(source=tmp_path / "plan", target="/envbuild/plan"),
            Bind(source=tmp_path / "results", target="/envbuild/results", writable=True),
        ],
    )
    assert printed == "shm True ['file'] 0\n"
    assert (tmp_path / "results/file").stat().st_size == 100_000
    assert not (tmp_path / "plan/x").exists()


def test_this_machines_files_are_not_seen(image: OpenImage, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    script = f"ls {tmp_path} /root/* /home/* /sys/* 2> /dev/null; ls /proc | grep -c '^[0-9]'"
    # Processes: bubblewrap's own, the shell, ls and grep.
    assert int(run_inside(image, ["sh", "-c", script]).output) < 8


def test_image_starts_through_its_own_rc(image: OpenImage) -> None:
    """As enroot starts it: a login shell runs /etc/rc; PATH must survive /etc/profile."""
    printed = output_of(image, "sh", "-l", "/etc/rc", "sh", "-c", "command -v python; pwd; echo $VIRTUAL_ENV")
    assert printed.split() == ["/opt/envbuild/venv/bin/python", "/", "/opt/envbuild/venv"]


@pytest.mark.slow
def test_time_limit_ends_everything(image: OpenImage, sqsh: Path) -> None:
    marker = f"3{os.getpid()}.25"
    with pytest.raises(BuildError, match="ran longer than 1 s"):
        run_inside(image, ["sh", "-c", f"sleep {marker} & sleep {marker}"], timeout_seconds=1)
    wait_until(lambda: not processes_with(marker) and not processes_with(str(sqsh)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_envbuild_is_ended(name: str, sqsh: Path, number: int, tmp_path: Path) -> None:
    runtime = probe(name)
    marker = f"4{os.getpid()}.5"
    script = f"touch /envbuild/results/started; sleep {marker} & setsid sleep {marker} & wait"
    binds = [Bind(source=tmp_path, target="/envbuild/results", writable=True)]

    def long_run() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            run_in_sqsh(runtime, sqsh, ["sh", "-c", script], tmp_path / "s", binds)

    with forked(long_run) as pid:
        wait_until((tmp_path / "started").exists)
        assert processes_with(marker)
        os.kill(pid, number)
        wait_until(lambda: not processes_with(marker) and not processes_with(str(sqsh)))
    assert str(sqsh) not in subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    # What a killed process unpacked goes when the next one comes.
    with temporary_store(tmp_path / "s").staging("next") as folder:
        assert {path.stem for path in (tmp_path / "s/staging").iterdir()} == {folder.name}


def processes_with(word: str) -> list[str]:
    """Living processes with ``word`` in their command line, this one left out."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if word in words and int(process.name) != os.getpid() and "pytest" not in words:
                commands.append(words)
    return commands


def test_file_that_is_no_sqsh_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "broken.sqsh").write_bytes(b"hsqs" + os.urandom(100_000))
    with pytest.raises(MachineError) as caught:
        run_in_sqsh(probe(name), tmp_path / "broken.sqsh", ["true"])
    assert "broken.sqsh" in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize("way", ["squashfuse", pytest.param("unpack", marks=pytest.mark.slow)])
def test_ordinary_user_runs_commands(way: str, sqsh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, psutil; print(os.getuid(), psutil.__version__)"

    def action() -> None:
        assert os.getuid() != 0
        assert run_in_sqsh(probe(way), sqsh, [PYTHON, "-c", script]).output == "0 7.0.0\n"

    # Its own: that account's usual folder is everybody's who runs this test. pytest's are below one of root alone.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        assert in_child(lambda: os._exit(with_open_fuse(action))) == 0


def with_open_fuse(action: Callable[[], object]) -> int:
    """Run ``action`` as an ordinary user where /dev/fuse is open to all, as udev has it; not every machine has udev."""
    if stat.S_IMODE(os.stat("/dev/fuse").st_mode) & 0o006 != 0o006:
        must(libc.unshare(CLONE_NEWNS))
        must(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        with tempfile.TemporaryDirectory() as folder:
            node = f"{folder}/fuse"
            os.mknod(node, stat.S_IFCHR | 0o666, os.stat("/dev/fuse").st_rdev)
            os.chmod(node, 0o666)
            must(libc.mount(node.encode(), b"/dev/fuse", None, MS_BIND, None))
    return unprivileged(action)


def must(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def test_ordinary_user_does_not_get_loop_devices(sqsh: Path) -> None:
    def action() -> None:
        with pytest.raises(MachineError, match="runtime loop does not work") as caught:
            probe("loop")
        assert "only root" in caught.value.why

    assert unprivileged(action) == 0


def test_forbidden_namespaces_are_named_by_their_setting() -> None:
    """In a user namespace that allows no further ones, as a machine with user.max_user_namespaces=0 does."""

    def action() -> None:
        user = os.getuid()
        must(libc.unshare(CLONE_NEWUSER))
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        Path("/proc/self/setgroups").write_text("deny")
        # Not root inside either, so that programs start without capabilities.
        Path("/proc/self/uid_map").write_text(f"1000 {user} 1")
        with pytest.raises(MachineError) as caught:
            sandbox.probe()
        assert caught.value.exit_code == 11
        assert "user.max_user_namespaces is 0" in caught.value.why
        assert "sysctl -w user.max_user_namespaces" in caught.value.fix

    assert in_child(action) == 0
