"""The Dockerfile of a lock: whole for one CPU and one CUDA base, and the values in it."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from envbuild.core.errors import CheckRefusedError
from envbuild.image.docker.dockerfile import Compile, DockerfileSpec, SourceArchive, quoted, render
from envbuild.oci.models import RunConfig

GOLDEN = Path(__file__).parent / "golden"
CPU = DockerfileSpec(
    title="mini on debian12 for CPUs",
    tag="mini:debian12-cpu",
    config=RunConfig(
        environment=("PATH=/opt/envbuild/venv/bin:/bin", "LANG=C.UTF-8"),
        labels=(("envbuild.stack", "mini"), ("a", 'b"c')),
        command=("/bin/bash",),
    ),
    python="/usr/bin/python3.11",
    torch_build="cpu",
)
CUDA = DockerfileSpec(
    title="nemo on ngc for sm_90",
    tag="nemo:ngc-h200",
    config=RunConfig(
        environment=("PATH=/opt/envbuild/venv/bin:/usr/local/cuda/bin:/bin", "NVIDIA_REQUIRE_CUDA=cuda>=13.0"),
        labels=(("envbuild.stack", "nemo"),),
        command=("/bin/bash",),
        workdir="/workspace",
        user="1000",
        volumes=("/data",),
        ports=("8888/tcp",),
        stop_signal="SIGINT",
    ),
    base="registry.example/pytorch@sha256:0123",
    python="/usr/bin/python3.12",
    sees_base=True,
    phases=("main", "compile", "git"),
    again=("nvidia-cutlass-dsl-libs-cu13",),
    wheels=("flash-attn",),
    compiled=Compile(
        toolchain=["RUN apt-get -q install gcc", "ENV CC=gcc"],
        sources=[
            SourceArchive(name="te", folder="te/pytorch", variables={"TORCH_CUDA_ARCH_LIST": "9.0", "FLAGS": "a 'b'"})
        ],
    ),
    trees=[
        SourceArchive(name="megatron-core", folder="megatron-core", variables={"SETUPTOOLS_SCM_PRETEND_VERSION": "1.0"})
    ],
    unset=("PYTHONPATH",),
)


def test_packages_of_an_index_of_their_own_come_from_no_other():
    own = {"main": {"my-site": "main.my-site.txt"}, "compile": {"my-site": "compile.my-site.txt"}}
    text = render(DockerfileSpec(**{**vars(CPU), "own": own}))
    assert "#   --build-arg INDEX_MY_SITE_URL=https://...   index my-site\n" in text
    steps = [step.partition("\n\n")[0] for step in text.split("RUN ") if ".my-site.txt" in step.partition("\nCOPY")[0]]
    assert [word for step in steps for word in shlex.split(step) if word.endswith("my-site.txt")] == [
        "/build/lock/main.my-site.txt", "/build/lock/compile.my-site.txt",
    ]  # fmt: skip
    assert not any("${INDEX_URL" in step or "TORCH_INDEX_URL" in step for step in steps)
    # Each stage that installs them has the argument, and ends without it.
    assert text.count("\nARG INDEX_MY_SITE_URL\n") == 2
    words = f"printf %s {re.findall('--default-index (.*) --req', text)[0]}"
    for value, status in (("https://x/simple", 0), ("", 2)):
        done = subprocess.run(["sh", "-c", words], env={"INDEX_MY_SITE_URL": value}, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (status, value)
    assert "the address of index my-site" in done.stderr


@pytest.mark.parametrize(("name", "spec"), [("cpu", CPU), ("cuda", CUDA)])
def test_dockerfile(name, spec):
    assert render(spec) == (GOLDEN / f"{name}.Dockerfile").read_text()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", '"plain"'),
        ("two words", '"two words"'),
        ("$HOME ${x}", '"\\$HOME \\${x}"'),
        ('a"b\\c', '"a\\"b\\\\c"'),
        ("`id` $(id) 'x' # ; &", "\"`id` \\$(id) 'x' # ; &\""),
    ],
)
def test_value_is_quoted_for_env_and_label(value, expected):
    assert quoted(value) == expected


def test_value_with_several_lines_is_refused():
    with pytest.raises(CheckRefusedError, match="Dockerfile"):
        quoted("a\nb")


def test_isolated_builds_are_held_to_the_locks_releases():
    source = SourceArchive(name="x", folder="x")
    text = render(DockerfileSpec(**{**vars(CPU), "trees": [source], "builds": "git-build.txt"}))
    assert "COPY lock/git-build.txt /build/lock/\n" in text
    (line,) = [part for part in text.replace("\\\n", "").split("RUN ") if "uv build" in part]
    words = shlex.split(line.partition("uv build")[2].partition("\nRUN")[0])
    assert words[:3] == ["--wheel", "--build-constraints", "/build/lock/git-build.txt"]
    assert not {"--no-build-isolation", "--offline"} & set(words)
    assert any("INDEX_URL" in word for word in words)


@pytest.mark.parametrize("value", ["plain", "it's", "$(echo no)", "`echo no`", 'a "b" \\c', "a;b&c"])
def test_variable_of_a_build_reaches_it_unchanged(value):
    """The shell of a RUN instruction reads it."""
    source = SourceArchive(name="x", folder="x", variables={"VALUE": value})
    (line,) = [
        part
        for part in render(DockerfileSpec(**{**vars(CPU), "trees": [source]})).split("RUN ")
        if part.startswith("VALUE=")
    ]
    command = line.partition("uv build")[0] + "printenv VALUE"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == f"{value}\n"
