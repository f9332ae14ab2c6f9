"""The nvcc front: which architectures are left of a command line, and how nvcc is run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.wheels.build import nvcc_wrapper
from envbuild.wheels.build.nvcc_wrapper import rewritten

ASKED = "-gencode=arch=compute_90,code=sm_90"
PACKAGE = [
    *("-gencode", "arch=compute_75,code=sm_75", "-gencode", "arch=compute_90,code=sm_90"),
    *("-gencode", "arch=compute_100,code=sm_100", "-gencode", "arch=compute_120,code=compute_120"),
]


@pytest.mark.parametrize(
    "given",
    [
        PACKAGE,
        ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"],
        ["--generate-code", "arch=compute_90,code=[compute_90,sm_90]"],
        ["--generate-code=arch=compute_90,code=[sm_90,compute_90]"],
        ["-gencode", 'arch=compute_90,\\"code=sm_90,compute_90\\"'],
        ["-arch=sm_90"],
        ["-arch", "native"],
        ["--gpu-architecture=all-major"],
        ["-arch=compute_80", "-code=sm_86"],
        ["-gencode=arch=compute_80,code=sm_80"],
        ["-gencode=arch=compute_90a,code=sm_90a"],
        [],
    ],
)
def test_only_the_architecture_asked_for_is_left(given):
    assert rewritten(["-O3", *given, "-c", "a b.cu", "-o", "a.o"], ["90"]) == [
        *("-O3", "-c", "a b.cu", "-o", "a.o"),
        ASKED,
    ]


def test_a_virtual_architecture_of_the_package_stays():
    given = ["-gencode", "arch=compute_80,code=sm_90", "-c", "a.cu"]
    assert rewritten(given, ["90"]) == ["-c", "a.cu", "-gencode=arch=compute_80,code=sm_90"]


def test_suffixes_are_architectures_of_their_own():
    given = ["-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90a,code=sm_90a", "a.cu"]
    assert rewritten(given, ["90a"]) == ["a.cu", "-gencode=arch=compute_90a,code=sm_90a"]


def test_of_several_asked_for_none_is_missing_where_a_package_names_several():
    eighty = "-gencode=arch=compute_80,code=sm_80"
    assert rewritten([*PACKAGE, "a.cu"], ["80", "90"]) == ["a.cu", ASKED, eighty]
    assert rewritten(["-arch=sm_75", "a.cu"], ["80", "90"]) == ["a.cu", eighty, ASKED]


def test_a_source_of_one_architecture_alone_keeps_it():
    assert rewritten([ASKED, "a.cu"], ["80", "90"]) == ["a.cu", ASKED]


@pytest.mark.parametrize("given", [PACKAGE, [], ["-gencode=arch=compute_90,code=[sm_90,compute_90]"]])
def test_ptx_is_made_where_it_is_asked_for(given):
    assert rewritten([*given, "a.cu"], ["90"], ["90"]) == ["a.cu", "-gencode=arch=compute_90,code=[sm_90,compute_90]"]


def test_ptx_of_the_package_alone_is_no_machine_code():
    given = ["-gencode=arch=compute_90,code=compute_90", "a.cu"]
    assert rewritten(given, ["90"], ["90"]) == ["a.cu", "-gencode=arch=compute_90,code=[sm_90,compute_90]"]


@pytest.mark.parametrize("given", [["--version"], ["-V"], ["--help"], ["-arch=sm_80", "--list-gpu-code"], []])
def test_questions_pass_untouched(given):
    assert rewritten(given, ["90"]) == given


def test_option_files_count(tmp_path: Path):
    options = tmp_path / "options"
    options.write_text("-gencode arch=compute_80,code=sm_80 -DNAME='a b'\n-lineinfo\n")
    for given in (["-optf", str(options)], [f"--options-file={options}"]):
        assert rewritten([*given, "a.cu"], ["90"]) == ["-DNAME=a b", "-lineinfo", "a.cu", ASKED]


def front(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The front before a program of the test's own."""
    nvcc = tmp_path / "a folder" / "nvcc"
    nvcc.parent.mkdir(exist_ok=True)
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    (tmp_path / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, "-I", "-S", nvcc_wrapper.__file__, "--nvcc", nvcc, "--sm", "90,100a", "--ptx", "", "--"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path)


SAY = 'for word; do echo "$word"; done; exit 7'
# Says where intermediate files are to be, and whether that is a folder; leaves one there.
WHERE = 'for folder; do :; done; echo "$folder"; touch "$folder/made"'


def test_the_script_runs_nvcc_and_ends_as_it_does(tmp_path: Path):
    done = front(tmp_path, SAY, "-arch", "sm_80", "a b.cu", '-DX="q"')
    *words, keep, option, folder = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (7, "")
    assert words == ["a b.cu", '-DX="q"', ASKED, "-gencode=arch=compute_100a,code=sm_100a"]
    assert (keep, option) == ("--keep", "--keep-dir")
    assert Path(folder).parent == tmp_path / "tmp"
    assert front(tmp_path, "kill -9 $$", "a.cu").returncode == 128 + 9


def test_intermediate_files_are_in_a_folder_of_the_command_s_own(tmp_path: Path):
    one, again, other = (front(tmp_path, WHERE, "-c", name).stdout for name in ("a.cu", "a.cu", "b.cu"))
    assert one == again != other
    assert [*(tmp_path / "tmp").iterdir()] == [], "nothing of them stays"


def test_a_command_that_runs_twice_at_once_shares_no_folder(tmp_path: Path):
    (tmp_path / "tmp").mkdir()
    folder = front(tmp_path, WHERE, "-c", "a.cu").stdout.strip()
    Path(folder).mkdir()
    done = front(tmp_path, SAY, "-c", "a.cu")
    assert "--keep" not in done.stdout.splitlines()
    assert Path(folder).is_dir(), "it is the other one's"


@pytest.mark.parametrize(
    "given",
    [["x/a.cu", "y/a.cu"], ["a.cu", "a.cpp"], ["--keep", "a.cu"], ["-keep-dir=k", "a.cu"], ["--version"], ["-c"]],
)
def test_colliding_names_are_left_to_nvcc(given, tmp_path: Path):
    done = front(tmp_path, SAY, *given)
    assert str(tmp_path / "tmp") not in done.stdout
    assert done.returncode == 7
