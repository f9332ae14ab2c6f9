"""The files that a .sqsh has besides the layers: read by shells and by enroot, so tried with a shell."""

import subprocess

import pytest

from envbuild.core.errors import CheckRefusedError
from envbuild.image.squashfs import enroot
from envbuild.oci.models import RunConfig


def rc(**config) -> str:
    return enroot.rc(RunConfig(**config), "oci:sha256:0")


def test_rc_in_full():
    text = rc(
        command=("/bin/bash",),
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
        '    exec  "$@"\n'
        "else\n"
        "    exec  '/bin/bash'\n"
        "fi\n"
    )


def run_rc(text: str, *arguments: str) -> list[str]:
    # The image's rc.local is not the one of this machine.
    text = text.replace("/etc/rc.local", "/nonexistent")
    done = subprocess.run(["sh", "-c", text, "rc", *arguments], capture_output=True, check=True, text=True)
    return done.stdout.splitlines()


def test_rc_runs_the_command_or_the_arguments(tmp_path):
    text = rc(command=("printf", "plain"), workdir=str(tmp_path / "made"))
    assert run_rc(text) == ["plain"]
    assert run_rc(text, "printf", "%s|", "x", "y z") == ["x|y z|"]
    assert (tmp_path / "made").is_dir()


def test_fstab_has_a_line_a_volume():
    files = enroot.files(RunConfig(volumes=("/data", "/a")), "p")
    assert files["etc/fstab"] == (
        b"${ENROOT_ROOTFS}/a /a none x-create=dir,bind,rw,nosuid,nodev\n"
        b"${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev\n"
    )
    assert enroot.files(RunConfig(), "p")["etc/fstab"] == b""


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


@pytest.mark.parametrize(
    "workdir", ["/a$(id)", "/a`id`", '/a"; id; "', "/a\\", "/a\nid", "/$HOME", "relative", "/a/../..", "/tab\t"]
)
def test_working_directories_that_would_run_are_refused(workdir):
    with pytest.raises(CheckRefusedError, match="working directory"):
        enroot.files(RunConfig(workdir=workdir), "p")


@pytest.mark.parametrize(
    "volume", ["/a b", "/a\n/etc /etc none bind", "/${HOME}", "/a/../../etc", "data", "/a#", "/a'", "/a\\040"]
)
def test_volumes_that_would_mount_something_else_are_refused(volume):
    with pytest.raises(CheckRefusedError, match="volume"):
        enroot.files(RunConfig(volumes=("/fine", volume)), "p")


def test_ordinary_places_pass():
    enroot.check(RunConfig(workdir="/srv/ünï code/it's (1)", volumes=("/data", "/var/lib/x-1.2_3")))
    enroot.check(RunConfig())


def test_line_ends_in_the_names_of_labels_do_not_end_the_comment():
    lines = enroot.rc(RunConfig(labels=(("a\ntouch x", "b\ntouch y"),)), "p").splitlines()
    assert lines[1] == "# a touch x b touch y"
