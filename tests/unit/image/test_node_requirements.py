"""What an image asks of a node: read as libnvidia-container reads it, and the same for targets that are the same."""

import re

import pytest

from envbuild.catalog.fields import Device
from envbuild.catalog.models import Target
from envbuild.image.node_requirements import hardware_of, target_key, variables


def target(*sm, **fields):
    device = Device.CUDA if sm else Device.CPU
    return Target(summary="x", device=device, sm=sm, platform="linux/amd64", **fields)


def version(text):
    return [int(part) for part in text.split(".")]


def holds(required, **node):
    """Whether a node meets a requirement, after libnvidia-container's src/cli/dsl.c: words by "or", commas by "and"."""

    def rule(text):
        name, compared, value = re.fullmatch(r"(\w+)(>=|<)(.+)", text).groups()
        return version(node[name]) >= version(value) if compared == ">=" else version(node[name]) < version(value)

    return any(all(rule(part) for part in word.split(",")) for word in required.split(" "))


def starts(required, **node):
    return all(holds(value, **node) for name, value in required.items() if name.startswith("NVIDIA_REQUIRE_"))


@pytest.mark.parametrize(
    ("cuda", "driver_has", "runs"),
    [
        ("13.0", "13.0", True),
        ("13.0", "12.9", False),
        ("13.2", "13.0", True),  # minor version compatibility
        ("12.6", "12.0", True),
        ("12.6", "11.8", False),
        ("13.0", "14.1", True),
    ],
)
def test_driver_must_have_the_cudas_major_version(cuda, driver_has, runs):
    assert starts(variables(target("90"), cuda), cuda=driver_has, arch="9.0") is runs


def test_ptx_needs_a_driver_of_the_same_minor_version():
    required = variables(target("90", ptx=True), "13.2")
    assert not starts(required, cuda="13.0", arch="9.0")
    assert starts(required, cuda="13.2", arch="9.0")
    assert starts(required, cuda="13.2", arch="10.0")


@pytest.mark.parametrize(
    ("sm", "arch", "runs"),
    [
        (["90"], "9.0", True),
        (["90"], "8.0", False),
        (["90"], "10.0", False),
        (["80"], "8.9", True),
        (["100"], "10.3", True),
        (["100a"], "10.3", False),
        (["100a"], "10.0", True),
        (["100f"], "10.3", True),
        (["103"], "10.0", False),
        (["90", "120"], "12.0", True),
        (["90", "120"], "10.0", False),
        (["87"], "8.9", False),
    ],
)
def test_gpu_must_run_what_was_compiled(sm, arch, runs):
    assert starts(variables(target(*sm), "13.0"), cuda="13.0", arch=arch) is runs


def test_driver_of_the_target_is_required():
    required = variables(target("90", driver="580.95.05"), "13.0")
    assert starts(required, cuda="13.0", arch="9.0", driver="580.95.05")
    assert not starts(required, cuda="13.0", arch="9.0", driver="580.65.06")


def test_visible_devices_of_the_base_are_kept():
    assert variables(target("90"), "13.0")["NVIDIA_VISIBLE_DEVICES"] == "all"
    own = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility,video"}
    assert variables(target("90"), "13.0", own)["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility,video"


@pytest.mark.parametrize(
    ("base", "kept"),
    [
        ("cuda>=13.0 brand=tesla,driver>=535,driver<536", True),
        ("cuda>=13.2", True),
        ("cuda>=9.0", False),  # then its entrypoint checks, which is not run here
        ("brand=tesla", False),
        ("cuda>=130000x", False),
    ],
)
def test_a_base_that_knows_older_drivers_is_heard(base, kept):
    found = variables(target("90"), "13.0", {"NVIDIA_REQUIRE_CUDA": base})["NVIDIA_REQUIRE_CUDA"]
    assert found == (base if kept else "cuda>=13.0")


def test_names_and_summaries_decide_nothing_and_all_else_does():
    one = target("90")
    assert target_key(one) == target_key(one.model_copy(update={"summary": "another"}))
    others = [
        target("90", "100"),
        target("90", ptx=True),
        target("90", driver="580"),
        one.model_copy(update={"platform": "linux/arm64"}),
        target(),
    ]
    assert len({str(target_key(item)) for item in [one, *others]}) == 6


def test_hardware_of_target():
    assert hardware_of(target()) == "CPUs"
    assert hardware_of(target("100", "90", ptx=True)) == "sm_90, sm_100, PTX 100"
    assert hardware_of(target("100").model_copy(update={"platform": "linux/arm64"})) == "sm_100, linux/arm64"
