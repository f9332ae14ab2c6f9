"""What Dockerfiles and shell scripts shaped like NeMo's install."""

from pathlib import Path

import pytest

from envbuild.catalog.catalog import Catalog
from envbuild.lock.components.install_scripts import read_installs, release_of

BASE = Catalog.open(Path("/nonexistent")).base("debian12")
COMMIT = "2e16fc3062cdcd4ebef27a9aa4442676e1c7edf4"


@pytest.mark.parametrize(
    ("text", "releases"),
    [
        (
            'DEPS=(\n  "nemo_run"\n  "Nvidia-ModelOpt==0.35.0"   # a specific version\n)\n',
            {"nvidia-modelopt": "0.35.0"},
        ),
        ("  \"lib[torch]==1.0 ; platform_system != 'Darwin'\"\n", {"lib": "1.0"}),
        ("  'lib==1.0 ; sys_platform == \"win32\"'\n", {}),
        (
            "pip install --no-deps \"a==1; (sys_platform != 'x')\" b==2 c>=3 -r x.txt && rm d==4",
            {"a": "1", "b": "2", "d": "4"},
        ),
        ("RUN true && \\\n  pip install lib==1.0 && \\\n  true", {"lib": "1.0"}),
        # Not installed, or not one release.
        ("perl -ni -e 'print unless /triton==3.1.0/' requirements.txt", {}),
        ('if [[ "$mode" == "build" ]]; then', {}),
        ("# pip install lib==1.0", {}),
        ("pip install lib==1.* other==1,!=2 git+https://x/y@v1 'x @ https://x/x.whl'", {}),
        ("pip install lib==1.0\npip install lib==2.0", {}),
        ("pip install lib==$(cat version) lib2==`cat version` lib3==$UNKNOWN", {}),
        (
            "ARG V=1.5\nRUN pip install lib==${V} lib2==$V lib3==${OTHER:-2.0}",
            {"lib": "1.5", "lib2": "1.5", "lib3": "2.0"},
        ),
    ],
)
def test_releases(text, releases):
    assert read_installs(text, BASE).releases == releases


@pytest.mark.parametrize(
    ("text", "refs"),
    [
        ("  export MAMBA_TAG=v2.2.0\n", {"mamba-ssm": "v2.2.0"}),
        (
            f"export MAMBA_TAG={COMMIT}\nexport CAUSAL_CONV_TAG=v1.2.2.post1\n",
            {"mamba-ssm": COMMIT, "causal-conv1d": "v1.2.2.post1"},
        ),
        ("ARG MAMBA_TAG=v2.2.0", {"mamba-ssm": "v2.2.0"}),
        # As NeMo had it until 2025-03-20, and packages that no variable is for.
        (f'  "nemo_run@git+https://github.com/NVIDIA/NeMo-Run.git@{COMMIT}"', {"nemo-run": COMMIT}),
        (f"T={COMMIT}\npip install 'nemo_run @ git+https://x/y/Run.git@${{T}}'", {"nemo-run": COMMIT}),
        (f"NEMO_RUN_TAG=v0.3.0\npip install nemo_run@git+https://x/y/Run.git@{COMMIT}", {}),
        ("pip install nemo_run@git+https://x/y/Run.git", {}),
        (
            f"ARG R={COMMIT}\nRUN pip install --no-deps git+https://github.com/state-spaces/mamba.git@$R",
            {"mamba-ssm": COMMIT},
        ),
        ("pip install 'git+https://github.com/NVIDIA/TransformerEngine@v2.6#x'", {"transformer-engine": "v2.6"}),
        ("pip install git+https://github.com/state-spaces/mamba.git git+https://x/y/entropy@v1", {}),
        ("ARG MAMBA_TAG=v2.2.0 TE_TAG=v2.6", {"mamba-ssm": "v2.2.0", "transformer-engine": "v2.6"}),
        ("ENV MAMBA_TAG v2.2.0", {"mamba-ssm": "v2.2.0"}),
        ("export MAMBA_TAG=v2.2.0 && TE_TAG=v2.6 make", {"mamba-ssm": "v2.2.0"}),
        ("MAMBA_TAG=v2.2.0 make", {}),
        (f"pip install entropy@git+https://x/y/entropy.git@{COMMIT}", {}),
        (f"ARG TE_COMMIT={COMMIT}\nRUN git checkout ${{TE_COMMIT}}", {"transformer-engine": COMMIT}),
        ('ENV MAMBA_COMMIT="abc1234" # why', {"mamba-ssm": "abc1234"}),
        ("MAMBA_TAG=${MAMBA_TAG:-v2.2.0}", {"mamba-ssm": "v2.2.0"}),
        ("T=v2.2.0\nexport MAMBA_TAG=${T}", {"mamba-ssm": "v2.2.0"}),
        ("MAMBA_TAG=${MAMBA_TAG:-$(jq -r .ref manifest.json)}", {}),
        ("ARG MAMBA_TAG\nexport MAMBA_TAG=$1", {}),
        ("MAMBA_TAG=v2.2.0\nMAMBA_TAG=v2.3.0", {}),
        ("echo MAMBA_TAG=v2.2.0", {}),
    ],
)
def test_tags_and_commits(text, refs):
    assert read_installs(text, BASE).refs == refs


@pytest.mark.parametrize(
    ("text", "image"),
    [
        (
            "ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:25.06-py3\nFROM ${BASE_IMAGE} AS a\nFROM a",
            "nvcr.io/nvidia/pytorch:25.06-py3",
        ),
        ("FROM --platform=linux/amd64 nvcr.io/nvidia/pytorch:25.11-py3", "nvcr.io/nvidia/pytorch:25.11-py3"),
        ("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}", ""),
        ("FROM nvcr.io/nvidia/cuda:12", ""),
    ],
)
def test_image(text, image):
    assert read_installs(text, BASE).image == image


@pytest.mark.parametrize(
    ("ref", "release"),
    [("v2.2.0", "2.2.0"), ("v1.2.2.post1", "1.2.2.post1"), ("2.3.0rc1", "2.3.0rc1"), (COMMIT, ""), ("main", "")],
)
def test_release_of_a_tag(ref, release):
    assert release_of(ref) == release
