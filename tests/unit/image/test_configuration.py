"""The variables of an image in every place that a container reads: its configuration, enroot's files, login shells."""

import subprocess
import tarfile

import pytest
from helpers.image_inputs import SELECTION, changed, inputs_of, parts_of, small_lock

from envbuild.catalog.catalog import Selection
from envbuild.image.configuration import run_config, write_configuration
from envbuild.image.layers.sandbox import VENV
from envbuild.image.squashfs import enroot
from envbuild.oci.models import BaseConfig


@pytest.fixture
def lock(tmp_path):
    return small_lock(tmp_path / "lock")


def profile(parts, tmp_path) -> str:
    file = tmp_path / "configuration.tar.gz"
    write_configuration(file, parts)
    with tarfile.open(file) as archive:
        member = archive.extractfile("etc/profile.d/envbuild.sh")
        assert member is not None
        return member.read().decode()


def test_the_stacks_variables_are_in_every_place_that_a_container_reads(lock, tmp_path):
    parts = parts_of(inputs_of(changed(lock, environment={"CUDA_HOME": "{site_packages}/nvidia/cu13"})))
    value = "/opt/envbuild/venv/lib/python3.11/site-packages/nvidia/cu13"
    config = run_config(parts)
    assert config.environment[-1] == f"CUDA_HOME={value}"
    assert config.as_json()["Env"] == config.environment
    files = enroot.files(config, "oci:x")
    assert f"\nCUDA_HOME={value}\n".encode() in files["etc/environment"]
    script = f"PATH=/bin; {profile(parts, tmp_path)}\nprintenv CUDA_HOME"
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env={})
    assert shown.stdout == f"{value}\n"


def test_files_that_the_stack_adds_are_in_the_environments_site_packages(lock, tmp_path):
    file = tmp_path / "configuration.tar.gz"
    write_configuration(file, parts_of(inputs_of(changed(lock, files={"megatron/core/Makefile": "all: ;\n"}))))
    with tarfile.open(file) as archive:
        member = archive.extractfile("opt/envbuild/venv/lib/python3.11/site-packages/megatron/core/Makefile")
        assert member is not None
        assert member.read() == b"all: ;\n"


def test_variables_of_a_base_run_nothing_at_a_login(lock, tmp_path):
    words = ["$(touch ran)", "`touch ran`", '";touch ran;"', "';touch ran;'", "/own/bin", "a b"]
    config = BaseConfig(environment={"PATH": ":".join(words), "LD_LIBRARY_PATH": "$(touch ran)"})
    parts = parts_of(inputs_of(changed(lock, environment={"LD_LIBRARY_PATH": "/x"})), config)
    (tmp_path / "profile.sh").write_text(profile(parts, tmp_path))
    for shell in ("sh", "bash"):
        script = 'PATH=/bin; . ./profile.sh; /bin/echo "$PATH"; /bin/echo "$LD_LIBRARY_PATH"'
        shown = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
        path, libraries = shown.stdout.splitlines()
        assert path == f"{VENV}/bin:{':'.join(words)}:/bin"
        assert libraries == "/x:$(touch ran)"
    assert not (tmp_path / "ran").exists()


def test_image_for_gpus_has_its_requirements_where_runtimes_and_enroot_look(lock):
    on_gpus = Selection(SELECTION.catalog, "mcore", "debian12-cu130", "h200")
    config = run_config(parts_of(inputs_of(lock, selection=on_gpus)))
    assert "NVIDIA_REQUIRE_CUDA=cuda>=13.0" in config.environment
    assert b"\nNVIDIA_REQUIRE_ARCH=arch>=9.0,arch<10.0\n" in enroot.files(config, "oci:x")["etc/environment"]
    labels = dict(config.labels)
    assert labels["envbuild.require.cuda"] == "cuda>=13.0"
    assert not any("h200" in value for value in labels.values())
