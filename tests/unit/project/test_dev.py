"""What `dev` asks of apt: a machine that is set up loses nothing by it."""

import os
import shutil
import subprocess

import pytest

from envbuild.catalog.data import data_root

# Not one package is installed, whoever asks is root, and apt-get writes down what it is asked and then fails.
PROGRAMS = {
    "dpkg-query": "exit 1",
    "id": "echo 0",
    # It makes no environment: that ends at once.
    "python3": "exit 0",
    "apt-get": 'printf "%s\\n" "$*" >>"$ASKED"\n[ "$1" = update ]',
}


@pytest.fixture
def apt_requests(tmp_path):
    """Runs a copy of `dev` with one word; returns what apt-get was asked."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    shutil.copy(data_root() / "dev", tmp_path / "dev")

    def run(word):
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "ASKED": str(tmp_path / "requests")}
        done = subprocess.run(["sh", tmp_path / "dev", word], env=env, capture_output=True, text=True)
        assert done.returncode == 11, done.stderr
        assert "apt could not install them" in done.stderr
        return (tmp_path / "requests").read_text().splitlines()

    return run


@pytest.mark.parametrize("word", ["demo", "test", "lint", "soak", "bench"])
def test_dev_never_removes_a_package_of_the_machine(apt_requests, word):
    update, install = apt_requests(word)
    assert update.split()[0] == "update"
    words = install.split()
    assert words[0] == "install"
    assert "--no-remove" in words
    assert "python3-venv" in words


# Where torch's CPU build cannot be reached: what is asked for is written down, with the folder it was asked in.
ENVBUILD = """\
echo "$(basename "$PWD"): $*" >>"$ASKED"
case "$*" in
image*) [ -e lock-with-index ] || { echo "take --torch-build index"; exit 10; } ;;
*"--torch-build index") touch lock-with-index ;;
esac
"""


@pytest.mark.parametrize("requirements", ["build/requirements.txt", "build/requirements-dev.txt"])
def test_demo_without_torchs_cpu_build_leaves_the_lock_of_the_checkout_alone(tmp_path, requirements):
    """In an environment of its own, or of the tests: neither is set up again."""
    checkout, programs = tmp_path / "checkout", tmp_path / "bin"
    for folder in (checkout / "build", checkout / ".venv/bin", programs):
        folder.mkdir(parents=True)
    for name in ("dev", "pyproject.toml", "build/requirements.txt", "build/requirements-dev.txt"):
        shutil.copy(data_root() / name, checkout / name)
    for program, text in (
        (programs / "dpkg-query", "echo install ok installed"),
        (checkout / ".venv/bin/envbuild", ENVBUILD),
    ):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "ASKED": str(tmp_path / "requests")}
    state = f'printf "%s\\n" "$PWD" python3 {requirements} | cat - {requirements} pyproject.toml | cksum'
    known = subprocess.run(["sh", "-c", state], cwd=checkout, capture_output=True, text=True, check=True).stdout
    (checkout / ".venv/.state").write_text(known.rstrip("\n"))
    done = subprocess.run(["sh", checkout / "dev", "demo"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "10 times the size, in out/torch-index" in done.stderr
    stack = "--stack mcore --target cpu"
    apt_requests = (tmp_path / "requests").read_text().splitlines()
    assert apt_requests[-3:] == [
        f"torch-index: lock {stack} --torch-build index",
        f"torch-index: image {stack} --format oci,sqsh",
        f"torch-index: certify {stack}",
    ]
    assert {line.split(":")[0] for line in apt_requests[:-3]} == {"checkout"}
