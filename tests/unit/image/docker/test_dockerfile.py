"""The Dockerfile: what old BuildKits understand, quoted so that nothing is replaced, and without a word of the site."""

import re
import shlex
import subprocess

import pytest

from envbuild.catalog.site import Site
from envbuild.core.errors import InternalError
from envbuild.image.docker.dockerfile import Recipe, mounts, quoted, render
from envbuild.image.docker.places import NETWORK, PLACES, extra_hosts, outside
from envbuild.image.docker.plan import Group, Install
from envbuild.lock.uv.torch_builds import TorchSource
from envbuild.oci.write import RunConfig

CONFIG = RunConfig(
    environment=("PATH=/venv/bin:/bin", 'ODD=a "b" $HOME \\n'),
    command=("/bin/bash", "-l"),
    labels=(("a.label", "it's $1"),),
)


def recipe(**changed):
    group = Group(name="cuda", packages={"torch": "2.9.0+cpu"})
    install = Install(group=group, files={}, commands=("one", "two"), built=False, made=False)
    values = {"title": "t", "python": "/usr/bin/python3.11", "python_version": "3.11", "config": CONFIG}
    return Recipe(**{**values, "installs": [install], "base": ["base/a.tar.gz", "base/b.tar.gz"], **changed})


def instructions(text):
    """The instructions, without comments, with continued lines in one."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [re.sub(r"\s+", " ", line) for line in lines]


def test_every_line_is_an_instruction_that_old_frontends_have():
    text = render(recipe())
    words = [line.split()[0] for line in instructions(text)]
    assert set(words) <= {"FROM", "ADD", "RUN", "ENV", "LABEL", "CMD"}
    assert not re.search(r"@[A-Z_]+@", text)
    assert "syntax=" not in text
    assert "<<" not in text


def test_base_is_its_layers_or_an_image():
    lines = instructions(render(recipe()))
    assert lines[:3] == ["FROM scratch AS base", "ADD base/a.tar.gz /", "ADD base/b.tar.gz /"]
    lines = instructions(render(recipe(base=(), reference="r.example/base@sha256:1")))
    assert lines[:2] == ["FROM r.example/base@sha256:1 AS base", "USER 0"]
    # What images do not carry on.
    assert "ENTRYPOINT []" in lines
    assert "HEALTHCHECK NONE" in lines


def test_start_of_containers_is_said_after_the_last_step():
    config = RunConfig(command=("sh",), workdir="/work", volumes=("/data",), user="1000:5", ports=("80/tcp",),
        stop_signal="SIGINT")  # fmt: skip
    lines = instructions(render(recipe(config=config)))
    assert lines[-6:] == [
        'VOLUME ["/data"]',
        "EXPOSE 80/tcp",
        "STOPSIGNAL SIGINT",
        "WORKDIR /work",
        "USER 1000:5",
        'CMD ["sh"]',
    ]
    assert not any(line.startswith("RUN") for line in lines[-6:])


def test_values_are_read_back_as_they_are():
    lines = instructions(render(recipe()))
    assert 'ENV ODD="a \\"b\\" \\$HOME \\\\n"' in lines
    assert 'LABEL "a.label"="it\'s \\$1"' in lines
    assert lines[-1] == 'CMD ["/bin/bash", "-l"]'
    with pytest.raises(InternalError, match="end of a line"):
        quoted("two\nlines")


def test_each_step_sees_its_own_part_of_the_context_only():
    """Else a change of one group would run the steps of all others again."""
    text = mounts("cuda")
    assert "source=lock/cuda," in text
    assert "source=places/cuda," in text
    assert "built" not in text
    assert "source=built/cuda," in mounts("cuda", built=True)
    assert "from=wheels," in mounts("cuda", made=True)


def test_network_is_in_files_and_not_in_the_dockerfile(tmp_path):
    (tmp_path / "ca.pem").write_text("the CA")
    (tmp_path / "netrc").write_text("machine x")
    (tmp_path / "wheels").mkdir()
    for name in (
        "torch-2.9.0+cpu-cp311-cp311-linux_x86_64.whl",
        "torch-2.8.0+cpu-cp311-cp311-linux_x86_64.whl",
        "x.txt",
    ):
        (tmp_path / "wheels" / name).write_text(name)
    site = Site(cache_dir=tmp_path, ca_bundle=tmp_path / "ca.pem", apt_mirror=None, find_links=(), torch_index="")
    environ = {"HTTPS_PROXY": "http://p:word@proxy", "UV_DEFAULT_INDEX": "https://u:word@index/simple"}
    environ |= {"NETRC": str(tmp_path / "netrc"), "HOME": str(tmp_path), "UV_INDEX": f"file://{tmp_path}/wheels"}
    way = outside(site, TorchSource("find-links", str(tmp_path / "wheels")), environ)
    assert way.files["network/ca.pem"] == b"the CA"
    assert way.files["network/netrc"] == b"machine x"
    script = (
        way.files["network/variables.sh"].decode()
        + 'printf "%s\\n" "$UV_DEFAULT_INDEX" "$UV_INDEX" "$SSL_CERT_FILE" "$@"'
    )
    seen = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert seen[0] == "https://u:word@index/simple"
    assert seen[1].startswith(f"file://{PLACES}/local/")
    assert seen[2] == f"{NETWORK}/ca.pem"
    assert seen[3:] == ["--find-links", f"{PLACES}/wheels"]
    # Of a folder with packages a step gets what it installs.
    step = way.for_step("cuda", {"torch": "2.9.0+cpu"})
    names = {name.rpartition("/")[2] for name, content in step.items() if content != b""}
    assert names == {"torch-2.9.0+cpu-cp311-cp311-linux_x86_64.whl"}
    assert {name.rpartition("/")[2] for name in way.for_step("fast", {})} == {".keep"}


def test_hosts_of_the_machine_are_handed_on_but_its_own():
    text = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n10.0.0.5 mirror mirror.local # it\n\nff02::1 ip6-all\n"
    assert extra_hosts(text) == ["mirror:10.0.0.5", "mirror.local:10.0.0.5"]


def test_commands_are_what_a_shell_reads(tmp_path):
    for line in instructions(render(recipe())):
        if line.startswith("RUN"):
            command = re.sub(r"--mount=\S+ ", "", line.removeprefix("RUN "))
            assert shlex.split(command)
            subprocess.run(["sh", "-n", "-c", command], check=True)
