"""The files that a .sqsh has besides the layers: read by shells and by enroot, so tried with a shell."""

import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envbuild.image.squashfs import enroot
from envbuild.oci.models import RunConfig

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


def bash_quoted(texts: list[str]) -> list[str]:
    script = 'for word in "$@"; do printf "%s\\0" "${word@Q}"; done'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *texts], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    return done.stdout.decode().split("\0")[:-1]


def unquoted_by_bash(quoted: list[str]) -> list[str]:
    script = 'printf "%s\\0" ' + " ".join(quoted)
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    return done.stdout.decode().split("\0")[:-1]


def test_quote_writes_what_bash_writes():
    texts = ["", "plain", "two words", "it's", '"', "$HOME", "a\\b", "!", "*", "~", "-n", "=", "ü", "日本"]
    texts += ["tab\there", "\x1b[0m", "bell\a", "\x01\x02", "quote' and\ttab", "back\\slash\r", "\x7f", "\v\f\b"]
    texts += [chr(code) for code in range(1, 128)]
    assert [enroot.quote(text) for text in texts] == bash_quoted(texts)


@settings(max_examples=20)
@given(st.lists(words, min_size=1, max_size=20))
def test_quote_is_read_back_by_bash(texts):
    assert unquoted_by_bash([enroot.quote(text) for text in texts]) == texts


def rc(**config) -> str:
    return enroot.rc(RunConfig(**config), "oci:sha256:0")


def test_rc_in_full():
    text = rc(
        entrypoint=("/entry", "it's"),
        command=("train", "--x y"),
        workdir="/work",
        labels=(("b", "two\nlines"), ("a", "1")),
    )
    assert text == (
        "# enroot-provenance: oci:sha256:0\n"
        "# a 1\n"
        "# b two lines\n"
        "\n"
        'mkdir -p "/work" 2> /dev/null\n'
        'cd "/work" && unset OLDPWD || exit 1\n'
        "\n"
        "if [ -s /etc/rc.local ]; then\n"
        "    . /etc/rc.local\n"
        "fi\n"
        "\n"
        "if [ $# -gt 0 ]; then\n"
        "    exec '/entry' 'it'\\''s' \"$@\"\n"
        "else\n"
        "    exec '/entry' 'it'\\''s' 'train' '--x y'\n"
        "fi\n"
    )


@pytest.mark.parametrize(
    ("config", "with_arguments", "without"),
    [
        ({}, 'exec  "$@"', "exec  '/bin/sh'"),
        ({"command": ("bash",)}, 'exec  "$@"', "exec  'bash'"),
        ({"entrypoint": ("/e",)}, "exec '/e' \"$@\"", "exec '/e' "),
        ({"entrypoint": ("/e",), "command": ("c",)}, "exec '/e' \"$@\"", "exec '/e' 'c'"),
        ({"command": ("a\nb",)}, 'exec  "$@"', "exec  'a' 'b'"),
    ],
)
def test_rc_with_and_without_entrypoint_and_command(config, with_arguments, without):
    execs = [line.removeprefix("    ") for line in rc(**config).splitlines() if line.startswith("    exec")]
    assert execs == [with_arguments, without]


def run_rc(text: str, *arguments: str) -> list[str]:
    # The image's rc.local is not the one of this machine.
    text = text.replace("/etc/rc.local", "/nonexistent")
    done = subprocess.run(["sh", "-c", text, "rc", *arguments], capture_output=True, check=True, text=True)
    return done.stdout.splitlines()


def test_rc_runs_entrypoint_with_command_or_arguments(tmp_path):
    text = rc(entrypoint=("printf", "%s|"), command=("a b", "c'd"), workdir=str(tmp_path / "made"))
    assert run_rc(text) == ["a b|c'd|"]
    assert run_rc(text, "x", "y z") == ["x|y z|"]
    assert (tmp_path / "made").is_dir()


def test_rc_without_workdir_starts_in_the_root():
    assert run_rc(rc(command=("pwd",))) == ["/"]


def test_environment_is_the_images_variables_unquoted():
    files = enroot.files(RunConfig(environment=("PATH=/a:/b", "X=two words", "E=")), "p")
    assert files["etc/environment"] == b"PATH=/a:/b\nX=two words\nE=\n"


def test_fstab_has_a_line_a_volume():
    files = enroot.files(RunConfig(volumes=("/data", "/a")), "p")
    assert files["etc/fstab"] == (
        b"${ENROOT_ROOTFS}/a /a none x-create=dir,bind,rw,nosuid,nodev\n"
        b"${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev\n"
    )
    assert enroot.files(RunConfig(), "p")["etc/fstab"] == b""


def test_rc_local_is_two_comment_lines():
    text = enroot.files(RunConfig(), "p")["etc/rc.local"].decode()
    assert re.fullmatch(r"(# .+\n){2}", text)


@pytest.mark.parametrize(
    ("before", "directory", "after"),
    [
        (0o000, False, 0o400),
        (0o644, False, 0o644),
        (0o2755, False, 0o2755),
        (0o011, False, 0o511),
        (0o4111, False, 0o4511),
        (0o000, True, 0o700),
        (0o555, True, 0o755),
        (0o1777, True, 0o1777),
    ],
)
def test_mode_lets_the_owner_read_and_enter(before, directory, after):
    assert enroot.mode(before, directory=directory) == after
