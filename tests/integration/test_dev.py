"""./dev in a fresh clone: two at once share one set-up, and a set-up that fails says why and what to do."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from envbuild.catalog.data import data_root

MARK = "the bench ran in"
RUN, DEVELOPMENT = REQUIREMENTS = ("requirements.txt", "requirements-dev.txt")


@pytest.fixture
def clone(tmp_path) -> Path:
    """The files of this checkout, with uv alone to install and one thing to run."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=data_root(), capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (data_root() / name).is_file() and not name.startswith(("benchmarks/", "tests/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(data_root() / name, tmp_path / name)
    for name in REQUIREMENTS:
        requirements = tmp_path / "build" / name
        uv = re.search(r"(?ms)^uv==.*?(?=^\w|\Z)", requirements.read_text())
        assert uv is not None
        requirements.write_text(uv[0])
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_nothing.py").write_text(f"import sys\nprint({MARK!r}, sys.prefix)\n")
    return tmp_path


def start(clone: Path, word: str = "bench", **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["./dev", word],
        cwd=clone,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_at_once_share_one_set_up(clone):
    processes = [start(clone) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [out for out, _ in outputs] == [f"{MARK} {clone / '.venv'}\n"] * 2
    noise = "".join(err for _, err in outputs)
    assert noise.count("setting up .venv") == 1
    assert noise.count("another ./dev is setting up here: waiting for it") == 1
    assert start(clone).communicate() == (f"{MARK} {clone / '.venv'}\n", "")


@pytest.mark.slow
def test_the_demo_needs_nothing_of_what_the_tests_need(clone):
    with (clone / "build" / DEVELOPMENT).open("a") as file:
        file.write(f"packaging==25.0 --hash=sha256:{'0' * 64}\n")
    for word, missing in (("demo", "No module named 'click'"), ("bench", f"cannot install build/{DEVELOPMENT}")):
        _, err = start(clone, word).communicate()
        assert missing in err


def python_without_ensurepip(folder: Path) -> str:
    """As Debian's python3 is where python3-venv is not installed."""
    program = folder / "python3-bare"
    program.write_text(
        '#!/bin/sh\n[ "$1" = -m ] && { echo "ensurepip is not available" >&2; exit 1; }\nexec python3 "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("ensurepip", ["ensurepip is not available", "cannot make a virtual environment", "python3-venv"]),
        ("hash", ["cannot install build/requirements-dev.txt", "network", "./dev bench again"]),
        ("python", ["Python 3.10 or newer is needed", "PYTHON="]),
    ],
)
def test_set_up_that_fails_says_what_and_what_to_do(clone, fault, expected):
    env = {}
    if fault == "ensurepip":
        env["PYTHON"] = python_without_ensurepip(clone)
    elif fault == "python":
        env["PYTHON"] = "/bin/false"
    else:
        with (clone / "build" / DEVELOPMENT).open("a") as file:
            file.write(f"packaging==25.0 --hash=sha256:{'0' * 64}\n")
    process = start(clone, **env)
    out, err = process.communicate()
    assert (process.returncode, out) == (11, "")
    for part in expected:
        assert part in err
    assert err.splitlines()[-1].startswith("dev: ")
    assert not (clone / ".venv" / ".state").exists()
