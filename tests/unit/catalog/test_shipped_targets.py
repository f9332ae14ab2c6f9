"""The targets that come with envbuild, and the stacks that name them."""

import pytest

from envbuild.catalog.catalog import Catalog, HostDistribution, select
from envbuild.catalog.data import data_root
from envbuild.core.errors import ConfigurationError
from envbuild.image.node_requirements import target_key
from envbuild.wheels.architectures import Architectures

CATALOG = Catalog.open(data_root())
# Read from the files of wheels: torch 2.11.0 and 2.13.0 for CUDA 13.0, torch 2.7.0 for CUDA 12.6, and Transformer
# Engine's core 2.9 to 2.17.
TORCH_CU130 = Architectures.named(["75", "80", "86", "89", "90", "90a", "100", "100a", "103a", "120", "120a", "121a"])
TORCH_CU126 = Architectures.named(["50", "60", "70", "75", "80", "86", "89", "90", "90a"])
ENGINE_CU13 = Architectures.named(["75", "80", "89", "90", "90a", "100", "100a", "103a", "120", "120f"])


def test_no_shipped_target_has_a_driver_floor():
    assert {name for name in CATALOG.names("targets") if CATALOG.target(name).driver} == set()


@pytest.mark.parametrize(
    ("one", "other", "same"), [("h100", "h200", True), ("l4", "l40s", True), ("b200", "gb200", False)]
)
def test_targets_of_the_same_hardware_share_images(one, other, same):
    assert (target_key(CATALOG.target(one)) == target_key(CATALOG.target(other))) is same


@pytest.mark.parametrize("stack", ["mcore", "nemo", "nemo-2.7", "bridge-0.6", "nemo-2.3"])
def test_stacks_name_only_targets_that_their_torch_runs_on(stack):
    for builds in CATALOG.stack(stack).builds:
        for base in builds.bases:
            chosen = select(CATALOG, stack, builds.target, base, HostDistribution("debian", "12"))
            with_cuda13 = chosen.base.cuda_major == "13"
            for sm in chosen.target.sm:
                assert (TORCH_CU130 if with_cuda13 else TORCH_CU126).runs_on(sm), (stack, builds.target)
                assert not with_cuda13 or ENGINE_CU13.runs_on(sm), (stack, builds.target)


def test_the_moving_stack_is_for_every_target_with_gpus():
    targets = {name for name in CATALOG.names("targets") if CATALOG.target(name).sm}
    assert {builds.target for builds in CATALOG.stack("nemo").builds} == targets


def test_base_of_another_platform_than_the_targets_is_refused(tmp_path):
    folder = tmp_path / "envs" / "stacks"
    folder.mkdir(parents=True)
    text = CATALOG.path("stacks", "mcore").read_text()
    (folder / "mixed.toml").write_text(
        text.replace('["ubuntu2404-cu130-arm64"]', '["ubuntu2404-cu130"]').replace(
            '"ubuntu2404-cu130-arm64"', '"ubuntu2404-cu130"'
        )
    )
    with pytest.raises(ConfigurationError, match="not for the platform") as caught:
        select(Catalog.open(tmp_path), "mixed", "gb200", None, HostDistribution("debian", "12"))
    assert "linux/amd64" in caught.value.why
    assert "linux/arm64" in caught.value.why


def test_target_without_gpus_is_refused_on_a_base_with_cuda(tmp_path):
    """Its certificate would have cases of the CPU alone, and the image is one for GPUs."""
    for kind in ("stacks", "targets"):
        (tmp_path / "envs" / kind).mkdir(parents=True)
    text = CATALOG.path("stacks", "mcore").read_text().replace('target = "h200"', 'target = "lab"')
    (tmp_path / "envs/stacks/mcore.toml").write_text(text)
    (tmp_path / "envs/targets/lab.toml").write_text('summary = "x"\ndevice = "cpu"\nplatform = "linux/amd64"\n')
    with pytest.raises(ConfigurationError, match="base debian12-cu130 is for GPUs, and target lab has none"):
        select(Catalog.open(tmp_path), "mcore", "lab", None, HostDistribution("debian", "12"))
