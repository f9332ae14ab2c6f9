"""uv's failures get the class of their cause; the words are those of the real uv."""

import contextlib
import os
import socket
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.locks import lock_context

from envbuild.core.errors import (
    CheckRefusedError,
    ConfigurationError,
    EnvbuildError,
    MachineError,
    NetworkError,
    ResolutionError,
)
from envbuild.core.process import Finished
from envbuild.lock.uv import program
from envbuild.lock.uv.interpreter import behind_a_shim, pyenv_python, with_requires_python
from envbuild.lock.uv.program import NoInterpreterError, failure, refuse_ignored_settings, run_uv, uv_version
from envbuild.lock.uv.resolution import resolve_without_interpreter
from envbuild.lock.uv.torch_builds import TorchSource


@pytest.fixture
def uv(tmp_path, monkeypatch):
    """Runs the real uv on a project, without network and with a cache of its own."""

    def lock(dependencies: str = "", *, python: str = "==3.*", extra: str = "", arguments: tuple[str, ...] = ()):
        project = f"""\
            [project]
            name = "p"
            version = "0"
            requires-python = "{python}"
            dependencies = [{dependencies}]
            [tool.uv]
            package = false
            {extra}
            """
        (tmp_path / "pyproject.toml").write_text(textwrap.dedent(project))
        return run_uv(["lock", *arguments], what="resolve it", log=tmp_path / "log", cwd=tmp_path)

    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")

    return lock


@contextlib.contextmanager
def closed_port():
    """A port of this machine on which no program listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_lock_without_dependencies_succeeds(uv, tmp_path):
    uv()
    assert (tmp_path / "uv.lock").exists()
    assert all(part.isdigit() for part in uv_version().split("."))


def test_contradiction_is_a_resolution_error_with_uvs_explanation(uv, tmp_path):
    with pytest.raises(ResolutionError, match="cannot resolve it") as caught:
        uv('"some-package==1", "some-package==2"', arguments=("--no-index",))
    assert "some-package==1" in caught.value.why
    assert "unsatisfiable" in caught.value.why
    assert caught.value.log == tmp_path / "log"
    assert "some-package==1" in (tmp_path / "log").read_text()
    assert "Relax" in caught.value.fix


def test_uv_that_was_ended_found_out_nothing_about_the_versions(uv, tmp_path, monkeypatch):
    (tmp_path / "uv").write_text("#!/bin/sh\nkill -s KILL $$\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setattr(program, "uv_program", lambda: tmp_path / "uv")
    with pytest.raises(MachineError, match="cannot resolve it: uv was ended by SIGKILL"):
        uv()


def test_unreachable_index_is_a_network_error(uv):
    with closed_port() as port, pytest.raises(NetworkError, match="cannot be reached") as caught:
        uv('"some-package"', arguments=("--default-index", f"http://127.0.0.1:{port}/simple"))
    assert f"127.0.0.1:{port}" in caught.value.why
    assert "UV_DEFAULT_INDEX" in caught.value.fix


def test_repository_that_cannot_be_fetched_is_a_network_error_about_git(uv, tmp_path):
    with pytest.raises(NetworkError, match="uv cannot fetch from a git repository") as caught:
        uv(f'"q @ git+file://{tmp_path}/nowhere@{"a" * 40}"')
    assert f"{tmp_path}/nowhere" in caught.value.why
    assert "insteadOf" in caught.value.fix
    assert "UV_DEFAULT_INDEX" not in caught.value.fix


@pytest.mark.parametrize(
    ("said", "of_upstream"),
    [
        ("remote: Repository not found.", True),
        ("fatal: could not read Username for 'https://host': terminal prompts disabled", True),
        ("fatal: couldn't find remote ref refs/heads/gone", True),
        ("fatal: unable to access 'https://host/': Could not resolve host: host", False),
        ("error: RPC failed; HTTP 503", False),
        ("error: unable to read sha1 file of a.gif", False),
    ],
)
def test_an_outage_of_a_repository_is_not_upstreams(said, of_upstream, tmp_path):
    output = f"error: Failed to download and build `q`\n  cause: Git operation failed\n  cause: {said}"
    error = failure(Finished(status=2, output=output, seconds=0.1), "resolve", tmp_path / "log")
    assert (type(error), error.of_upstream) == (NetworkError, of_upstream)


@pytest.mark.parametrize("downloads", ["never", "automatic"])
def test_missing_interpreter_is_named_with_a_command(uv, tmp_path, monkeypatch, downloads):
    """Also where uv may download one and cannot: that is no package index."""
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", downloads)
    monkeypatch.setenv("UV_PYTHON_PREFERENCE", "only-managed")
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "pythons"))
    monkeypatch.setattr(program, "pyenv_python", lambda version: None)
    with closed_port() as port:
        monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", f"http://127.0.0.1:{port}")
        with pytest.raises(NoInterpreterError, match=r"Python 3\.12 is missing") as caught:
            uv(python="==3.12.*")
    assert "uv python install 3.12" in caught.value.fix


def test_broken_interpreter_is_an_error_of_the_machine(uv, tmp_path, monkeypatch):
    """Version managers put programs on PATH that only say that they are not installed."""
    shim = tmp_path / "shims" / "python3.99"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'python3.99: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:/usr/bin:/bin")
    with pytest.raises(MachineError, match=r"Python 3\.99 is missing") as caught:
        uv(python="==3.99.*")
    assert str(shim) in caught.value.why


def test_a_python_behind_a_shim_that_fails_is_taken(uv, tmp_path, monkeypatch):
    """pyenv's shims fail for versions that it does not select, and it has them all the same."""
    version = f"3.{sys.version_info[1]}"
    shim, broken, kept = (
        tmp_path / path / f"python{version}"
        for path in ("shims", f"pyenv/versions/{version}.99/bin", f"pyenv/versions/{version}.7/bin")
    )
    base = Path(sys.base_prefix, "bin", "python3").resolve()
    for path, words in ((shim, "exit 127"), (broken, "exit 1"), (kept, f'exec {base} "$@"')):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{words}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(shim.parent))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "nowhere"))
    pyenv_python.cache_clear()
    with pytest.raises(NoInterpreterError, match="is missing"):
        uv(python=f"=={version}.*")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    pyenv_python.cache_clear()
    uv(python=f"=={version}.*")
    assert f'requires-python = "=={version}.*"' in (tmp_path / "uv.lock").read_text()
    pyenv_python.cache_clear()


def test_without_that_python_another_one_writes_the_same(uv, tmp_path):
    uv(python="==3.*")
    project = (tmp_path / "pyproject.toml").read_text().replace("==3.*", "==3.99.*")
    (tmp_path / "pyproject.toml").write_text(project)
    resolve_without_interpreter(
        project, tmp_path, TorchSource("package-index", None), "resolve it", lock_context(tmp_path)
    )
    assert 'requires-python = "==3.99.*"' in (tmp_path / "uv.lock").read_text()
    assert "python_full_version == '3.99.*'" in (tmp_path / "uv.lock").read_text()
    assert (tmp_path / "pyproject.toml").read_text() == project


@pytest.mark.parametrize(
    ("tags", "kept"),
    [
        ("py3-none-any", True),
        ("py2.py3-none-any", True),
        ("py311-none-any", True),
        ("py313-none-any", False),
        ("cp312-cp312-manylinux_2_28_x86_64", True),
        ("cp311-cp311-manylinux_2_28_x86_64", False),
        ("cp311.cp312-none-any", True),
        ("cp313-none-any", False),
        ("cp37-abi3-manylinux2014_x86_64", True),
        ("pp311-pypy311_pp73-manylinux_2_28_x86_64", False),
        ("graalpy311-graalpy242_311_native-manylinux_2_17_x86_64", False),
    ],
)
def test_wheels_for_other_pythons_are_left_out(tags, kept):
    project = '[project]\nrequires-python = "==3.12.*"\n'
    wheel = f'    {{ url = "https://index/x/lib-1.0%2Bcpu-{tags}.whl", hash = "sha256:aa", size = 1 }},\n'
    text = f'requires-python = ">=3.11"\n[[package]]\nname = "lib"\nwheels = [\n{wheel}]\n'
    lines = [wheel] if kept else []
    wheels = f"wheels = [\n{''.join(lines)}]\n" if kept else ""
    assert with_requires_python(text, project) == (f'requires-python = "==3.12.*"\n[[package]]\nname = "lib"\n{wheels}')


def test_dropped_settings_are_refused(uv, tmp_path):
    """uv only warns about a key it does not know, and then drops others too."""
    finished = uv(extra="no-such-key = 1")
    with pytest.raises(CheckRefusedError, match="uv ignored settings"):
        refuse_ignored_settings(finished, "resolve it", tmp_path / "log")


def test_a_configuration_of_uv_that_it_cannot_read_is_the_users_to_correct(uv, tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text("offline = 1\n")
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "own.toml"))
    with pytest.raises(ConfigurationError, match="uv's own configuration") as caught:
        uv()
    assert "offline = 1" in caught.value.why


def test_uv_fetches_with_plain_git_and_without_large_files(tmp_path, monkeypatch):
    """What uv gives to the git that it starts, in which a user's own settings hold: seen by a git on its PATH."""
    git = tmp_path / "bin/git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\nexit 1\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}:{os.environ['PATH']}")
    for name, value in (
        ("UV_CACHE_DIR", str(tmp_path / "cache")),
        ("UV_NO_GITHUB_FAST_PATH", ""),
        ("GIT_LFS_SKIP_SMUDGE", "0"),
    ):
        monkeypatch.setenv(name, value)
    arguments = ["pip", "install", "--offline", "--dry-run", "--target", tmp_path / "x", f"p @ git+file://{tmp_path}/p"]
    with pytest.raises(EnvbuildError):
        run_uv(arguments, what="try", log=tmp_path / "log", cwd=tmp_path)
    seen = (tmp_path / "seen").read_text().splitlines()
    for line in ("UV_NO_GITHUB_FAST_PATH=1", "GIT_LFS_SKIP_SMUDGE=1", "GIT_TERMINAL_PROMPT=0"):
        assert line in seen


def test_credentials_do_not_reach_the_log(uv, tmp_path):
    with closed_port() as port, pytest.raises(NetworkError) as caught:
        uv('"some-package"', arguments=("--default-index", f"http://me:secret@127.0.0.1:{port}/simple"))
    assert "secret" not in (tmp_path / "log").read_text()
    assert "secret" not in str(caught.value.as_json())


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("error: Failed to fetch: `https://host/simple/torch/`\n  cause: HTTP status server error (503)", NetworkError),
        # uv downloads a Python before it looks at the index.
        (
            "cause: Failed to download `https://h/cpython-3.12.16-install_only.tar`\n  cause: error sending request",
            NoInterpreterError,
        ),
        ("error: Failed to extract archive: cpython-3.12.16-x86_64-install_only_stripped.tar.gz", NoInterpreterError),
        (
            "error: Error while fetching remote python downloads json from `http://h/x`\n  cause: Failed to fetch",
            NoInterpreterError,
        ),
        ("  Caused by: invalid peer certificate: UnknownIssuer", NetworkError),
        ("hint: Packages were unavailable because the network was disabled.", NetworkError),
        ("error: No interpreter found for Python 3.10 in managed installations or search path", NoInterpreterError),
        ("error: Failed to inspect Python interpreter from search path at `/x/python3.10`", NoInterpreterError),
        ("  x No solution found when resolving dependencies:", ResolutionError),
        ("", ResolutionError),
    ],
)
def test_failure_by_uvs_words(output, error):
    actual = failure(Finished(status=2, output=output, seconds=0), "try", Path("log"))
    assert type(actual) is error
    assert actual.fix


def test_a_build_that_fails_ends_with_its_own_error_and_phase_compile():
    output = (
        "error: Failed to build `saver @ git+https://x/saver@4ab`\n  Caused by: Build backend failed\n[stderr]\n"
        "Traceback (most recent call last):\n  File \"setup.py\"\nModuleNotFoundError: No module named 'torch'\n"
        "hint: `saver` was included because `top` depends on `saver`\n"
    )
    error = failure(Finished(status=1, output=output, seconds=0.0), "resolve", Path("log"))
    assert error.why.startswith("The build's last error: ModuleNotFoundError: No module named 'torch'\n")
    assert '[components.saver] of the stack with phase = "compile"' in error.fix


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ("m.cc:1:10: fatal error: Python.h: No such file", "m.cc:1:10: fatal error: Python.h: No such file"),
        ("CMake Error at CMakeLists.txt:5 (find_package):", "CMake Error at CMakeLists.txt:5 (find_package):"),
        ("", "error: command '/usr/bin/g++' failed with exit code 1"),
    ],
)
def test_the_last_error_of_a_build_is_not_that_a_command_of_it_failed(line, last):
    end = "subprocess.CalledProcessError: Command '['ninja']' returned non-zero exit status 1.\n"
    end = end if line else "error: command '/usr/bin/g++' failed with exit code 1\n"
    output = f"error: Failed to build `saver==1`\n  Caused by: Build backend failed\n[stdout]\n{line}\n{end}"
    error = failure(Finished(status=1, output=output, seconds=0.0), "resolve", Path("log"))
    assert error.why.startswith(f"The build's last error: {last}\n")


@pytest.mark.parametrize(
    "line",
    [
        "  Caused by: Call to `backend.build_wheel` failed (signal: 9 (SIGKILL))",
        "      c++: fatal error: Killed signal terminated program cc1plus",
        "MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
        "subprocess.TimeoutExpired: Command 'nvcc' timed out after 5 seconds",
    ],
)
def test_a_build_that_lacked_memory_or_time_says_nothing_about_its_package(line):
    output = f"error: Failed to build `saver==1`\n{line}\n" + "more\n" * 80
    error = failure(Finished(status=1, output=output, seconds=0.0), "resolve", Path("log"))
    assert type(error) is MachineError
    assert error.why.startswith(f"{line.strip()}\n")
    fails = output.replace(line, "    raise MemoryError('Cannot allocate memory here')\nValueError: timeout: 3")
    assert type(failure(Finished(status=1, output=fails, seconds=0.0), "resolve", Path("log"))) is ResolutionError


def test_a_python_behind_a_shim_of_pyenv_is_taken_without_asking_the_shim(tmp_path, monkeypatch):
    for path, text in (("shims", "exit 127"), ("versions/3.11.7/bin", "echo 3.11")):
        (tmp_path / path).mkdir(parents=True)
        program = tmp_path / path / "python3.11"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    pyenv_python.cache_clear()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/usr/bin:/bin")
    assert behind_a_shim("3.11") == tmp_path / "versions/3.11.7/bin/python3.11"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert behind_a_shim("3.11") is None
    pyenv_python.cache_clear()
