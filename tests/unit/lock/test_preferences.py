"""Versions that upstream's files name, and how uv is told of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.fake_git import FakeRepositories, FakeRepository, fake_tree
from helpers.fake_index import fake_index

from envbuild.catalog.catalog import Catalog
from envbuild.core import tomlread
from envbuild.core.progress import SilentReporter
from envbuild.git.refs import GitRef
from envbuild.lock.components.models import Companion, Forced, Lead, Preference
from envbuild.lock.components.preferences import (
    NgcImage,
    locked_versions,
    script_companions,
    torch_preference,
    upstream_image,
    upstream_preferences,
    without_overruled,
)
from envbuild.lock.uv.preferences import prefer
from envbuild.lock.uv_lock import UvLock

CATALOG = Catalog.open(Path("/nonexistent"))
BASE = CATALOG.base("debian12")
NEVER = "sys_platform == 'never'"


def package(name, version="1.0", **more):
    return {"name": name, "version": version, "source": {"registry": "https://x/simple"}, **more}


def lead_of(repository):
    commit = repository.resolve(GitRef("main"))
    chosen = SimpleNamespace(name="lib", git=repository.url, commit=commit, title=repository.url)
    return Lead(chosen=chosen, companions={})


def context_of(*repositories):
    return SimpleNamespace(repositories=FakeRepositories(*repositories), reporter=SilentReporter())


def test_uv_lock_of_another_project():
    packages = [
        package("Plain_Name"),
        package("forked", "1.0", **{"resolution-markers": ["python_full_version < '3.11'"]}),
        package("forked", "2.0", **{"resolution-markers": ["python_full_version >= '3.11'"]}),
        package("from-git", "2.11.0+c188b533", source={"git": "https://x/te?rev=main#c188"}),
        package("own", source={"editable": "."}),
        package("part", source={"directory": "3rdparty/part"}),
        package("stub-elsewhere", source={"registry": "https://pypi.nvidia.com/"}),
        {"name": "dynamic", "source": {"registry": "https://x/simple"}},
        package("strange", "from-yesterday"),
        package("torch", "2.12.1"),
        package("elsewhere"),
        package("kept"),
    ]
    overrides = [
        {"name": "Torch", "marker": NEVER},
        {"name": "elsewhere", "marker": "sys_platform == 'win32'"},
        {"name": "kept", "marker": NEVER},
        {"name": "kept", "specifier": ">=1"},
    ]
    actual = locked_versions(UvLock.model_validate({"manifest": {"overrides": overrides}, "package": packages}), BASE)
    assert actual == {"plain-name": "1.0", "forked": "2.0", "from-git": "2.11.0", "kept": "1.0"}


def test_first_tree_and_first_file_win():
    lock = '[[package]]\nname = "lib"\nversion = "{}"\nsource = {{ registry = "https://x" }}\n'
    first = FakeRepository("https://x/a", {"uv.lock": lock.format("1"), "reinstall.sh": '"lib==2"\n"mid==2"\n'})
    second = FakeRepository(
        "https://x/b", {"uv.lock": lock.format("3"), "Dockerfile.ci": "RUN pip install mid==3 last==3"}
    )
    actual = upstream_preferences([lead_of(first), lead_of(second)], BASE, context_of(first, second))
    assert {name: (entry.version, entry.because) for name, entry in actual.items()} == {
        "lib": ("1", "uv.lock of https://x/a"),
        "mid": ("2", "reinstall.sh of https://x/a"),
        "last": ("3", "Dockerfile.ci of https://x/b"),
    }


@pytest.mark.parametrize(
    ("ref", "companion"),
    [
        ("v2.2.0", {"specifier": "==2.2.0"}),
        ("2e16fc3", {"git": "https://github.com/state-spaces/mamba", "ref": "2e16fc3"}),
    ],
)
def test_what_scripts_build_from_git_is_a_companion(ref, companion):
    repository = FakeRepository("https://x/a", {"reinstall.sh": f"export MAMBA_TAG={ref}\n"})
    expected = Companion(package="mamba-ssm", where="reinstall.sh", **companion)
    assert script_companions(fake_tree(repository), BASE) == [expected]


@pytest.mark.parametrize(
    ("files", "release"),
    [
        (
            {
                "requirements/manifest.json": '{"ngc-pytorch": "nvcr.io/nvidia/pytorch:25.06-py3"}',
                "docker/Dockerfile.ci": "FROM nvcr.io/nvidia/pytorch:24.07-py3",
            },
            "25.06",
        ),
        ({"requirements/manifest.json": "{}", "Dockerfile.ci": "FROM nvcr.io/nvidia/pytorch:24.07-py3"}, "24.07"),
        ({"requirements/manifest.json": '{"ngc-pytorch": "x"}'}, None),
        ({}, None),
    ],
)
def test_image_of_upstreams_tests(files, release):
    repository = FakeRepository("https://x/a", files)
    image = upstream_image([lead_of(repository)], BASE, FakeRepositories(repository))
    assert (image.release if image else None) == release


@pytest.mark.parametrize(
    ("specifier", "released", "version"),
    [
        ("<2.11", ["2.7.1", "2.8.0", "2.8.1", "2.9.0"], "2.8.1"),
        # As of a day before the release of the line, and on a base whose CUDA has later ones alone.
        ("<2.11", ["2.6.0", "2.7.1"], "2.7.1"),
        (">=2.11", ["2.8.0", "2.11.0", "2.11.1", "2.12.0"], "2.11.1"),
        (">=2.11", ["2.8.0"], None),
    ],
)
def test_torch_of_an_image(specifier, released, version):
    image = NgcImage(release="25.06", because="manifest of nemo")
    index = fake_index(BASE, None, torch=released)
    actual = torch_preference(SimpleNamespace(specifier=specifier), image, CATALOG, index)
    assert (actual.version if actual else None) == version
    if actual:
        assert actual.because == "torch 2.8 of the image 25.06 (manifest of nemo)"


def test_image_that_the_table_does_not_have_says_nothing():
    image = NgcImage(release="19.01", because="")
    assert torch_preference(None, image, CATALOG, fake_index(BASE, None)) is None


def test_preferences_are_a_uv_lock_of_the_projects_moments(tmp_path):
    project = '[project]\nrequires-python = "==3.11.*"\n[tool.uv]\nexclude-newer = "2025-01-02T00:00:00Z"\n'
    (tmp_path / "pyproject.toml").write_text(f"{project}exclude-newer-package = {{ torch = false }}\n")
    prefer(tmp_path, {})
    assert not (tmp_path / "uv.lock").exists()
    prefer(tmp_path, {"lib": "1.0"})
    written = tomlread.loads((tmp_path / "uv.lock").read_text())
    assert written["requires-python"] == "==3.11.*"
    assert written["options"] == {
        "exclude-newer": "2025-01-02T00:00:00Z",
        "exclude-newer-package": {"torch": False},
    }
    assert [(entry["name"], entry["version"]) for entry in written["package"]] == [("lib", "1.0")]


@pytest.mark.parametrize(
    ("by", "texts", "version", "stays"),
    [
        ("nemo", (">=0.27.1",), "0.25.0", False),
        ("nemo", (">=0.27.1",), "0.28.0", True),
        ("nemo", (">=0.27.1 ; sys_platform == 'win32'",), "0.25.0", True),
        ("nemo", (">=0.27.1",), None, True),
        ("bridge", (">=0.27.1",), "0.25.0", True),
    ],
)
def test_lead_wins_over_what_another_tree_forces(by, texts, version, stays):
    forced = {"wandb": Forced(by=by, where="w", texts=texts)}
    preferences = {"wandb": Preference(version=version, because="b", by="bridge")} if version else {}
    assert bool(without_overruled(forced, preferences, "bridge", BASE)) is stays
