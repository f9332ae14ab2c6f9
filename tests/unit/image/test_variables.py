"""The variables and labels of a base and of an environment become those of an image."""

from envbuild.image.variables import base_labels, image_variables, path_front
from envbuild.oci.models import BaseConfig

VENV = "/opt/envbuild/venv"


def test_environment_comes_before_the_base():
    base = {
        "PATH": "/usr/local/cuda/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib",
        "CUDA_HOME": "/usr/local/cuda",
        "LANG": "de_DE.UTF-8",
        "NVIDIA_VISIBLE_DEVICES": "none",
        "VENDOR": "yes",
    }
    own = {"LD_LIBRARY_PATH": "/venv/lib", "CUDA_HOME": "/venv/cuda"}
    found = image_variables(VENV, base, {"NVIDIA_VISIBLE_DEVICES": "all"}, own)
    assert found["PATH"] == f"{VENV}/bin:/usr/local/cuda/bin:/usr/bin:/bin"
    assert found["LD_LIBRARY_PATH"] == "/venv/lib:/usr/local/nvidia/lib"
    assert (found["CUDA_HOME"], found["LANG"], found["VENDOR"]) == ("/venv/cuda", "de_DE.UTF-8", "yes")
    assert found["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_what_would_bring_other_packages_is_not_carried():
    found = image_variables(VENV, {"PYTHONPATH": "/x", "PYTHONHOME": "/y", "PYTHONIOENCODING": "utf-8"}, {}, {})
    assert "PYTHONPATH" not in found
    assert "PYTHONHOME" not in found
    assert found["PYTHONIOENCODING"] == "utf-8"


def test_login_shells_get_back_what_only_the_image_has():
    path = image_variables(VENV, {"PATH": "/usr/local/cuda/bin:/usr/bin::/opt/x"}, {}, {})["PATH"]
    assert path_front(path) == f"{VENV}/bin:/usr/local/cuda/bin:/opt/x"


def test_labels_of_the_base_are_kept_but_for_those_about_the_image_itself():
    config = BaseConfig(labels={"maintainer": "a", "org.opencontainers.image.version": "24.04"})
    assert base_labels(config, "r/x:1", "sha256:1") == {
        "maintainer": "a",
        "org.opencontainers.image.base.name": "r/x:1",
        "org.opencontainers.image.base.digest": "sha256:1",
    }
    assert base_labels(BaseConfig(), "", "") == {}
