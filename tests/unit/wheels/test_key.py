"""The build key: what changes it, what does not, and what differs between two."""

import pytest

from envbuild.wheels.key import OF_THE_MACHINE, KeyParts, TorchPart, difference

TORCH = TorchPart(version="2.11.0", build="index", files="sha256:aa")
PARTS = KeyParts(
    package="causal-conv1d",
    version="1.7.0",
    sdist="sha256:01",
    platform="linux/amd64",
    python="cp310",
    torch=TORCH,
    cuda_toolkit="13.0.88",
    host_compiler="g++ 12.2.0",
    header_packages={"nvidia-cudnn-cu13": "9.19.0.56"},
    headers=(),
    sm=("90",),
    ptx=(),
    glibc="2.35",
    build_requirements={"ninja": "1.13.0", "setuptools": "80.10.2"},
    variables={"FORCE": "TRUE"},
    nvcc_front="sha256:02",
)
CHANGES = {
    "sdist": "sha256:03",
    "commit": "0" * 40,
    "subdirectory": "python",
    "platform": "linux/arm64",
    "python": "cp312",
    "torch": TORCH.model_copy(update={"files": "sha256:bb"}),
    "toolkit": "index",
    "toolkit_packages": {"nvidia-nvvm": "13.0.88"},
    "cuda_toolkit": "13.0.90",
    "host_compiler": "g++ 13.1.0",
    "header_packages": {"nvidia-cudnn-cu13": "9.20.0"},
    "headers": ("nvidia/cudnn/include",),
    "sm": ("90a",),
    "ptx": ("90",),
    "glibc": "2.39",
    "build_requirements": {"ninja": "1.13.0", "setuptools": "81"},
    "variables": {"FORCE": "FALSE"},
    "nvcc_front": "sha256:04",
    "gpu_code": False,
    "patches": ("sha256:05",),
    "package": "mamba-ssm",
    "version": "1.7.1",
}


def test_changes_cover_every_part_of_the_key():
    assert set(CHANGES) == set(KeyParts.model_fields)


@pytest.mark.parametrize("name", list(CHANGES))
def test_each_part_changes_the_key_and_is_named(name):
    other = PARTS.model_copy(update={name: CHANGES[name]})
    assert other.key != PARTS.key
    assert {part.partition(".")[0] for part in difference(PARTS, other)} == {name}
    assert PARTS.fits(other) is (name in OF_THE_MACHINE)


def test_differences_show_both_sides():
    other = PARTS.model_copy(update={"sm": ("100a",), "build_requirements": {"ninja": "1.13.0"}})
    assert difference(PARTS, other) == {"sm": ("90", "100a"), "build_requirements.setuptools": ("80.10.2", "")}
