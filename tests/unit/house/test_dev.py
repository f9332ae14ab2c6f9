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
    "apt-get": 'printf "%s\\n" "$*" >>"$ASKED"\n[ "$1" = update ]',
}


@pytest.fixture
def asked(tmp_path):
    """Runs a copy of `dev` with one word; returns what apt-get was asked."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    shutil.copy(data_root() / "dev", tmp_path / "dev")

    def run(word):
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "ASKED": str(tmp_path / "asked")}
        done = subprocess.run(["sh", tmp_path / "dev", word], env=env, capture_output=True, text=True)
        assert done.returncode == 11, done.stderr
        assert "apt could not install them" in done.stderr
        return (tmp_path / "asked").read_text().splitlines()

    return run


@pytest.mark.parametrize("word", ["demo", "test", "lint", "soak", "bench"])
def test_dev_never_removes_a_package_of_the_machine(asked, word):
    update, install = asked(word)
    assert update.split()[0] == "update"
    words = install.split()
    assert words[0] == "install"
    assert "--no-remove" in words
    assert "python3-venv" in words
