"""What enroot would write into a script or a fstab, where it would be run or mounted."""

import pytest

from envbuild.core.errors import CheckRefusedError
from envbuild.image.squashfs import enroot
from envbuild.oci.models import RunConfig


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
