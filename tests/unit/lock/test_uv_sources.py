"""Where [tool.uv.sources] takes packages from."""

import pytest

from envbuild.git.refs import GitRef
from envbuild.lock.components.project_metadata import UvSource, uv_settings


def read(text):
    return uv_settings(f"[tool.uv.sources]\n{text}").sources()


@pytest.mark.parametrize(
    ("keys", "ref", "words"),
    [
        ("", None, "the default branch of https://x/r"),
        (', rev = "nv_dev"', GitRef("nv_dev"), "nv_dev of https://x/r"),
        (', tag = "v1"', GitRef("refs/tags/v1"), "v1 of https://x/r"),
        (', branch = "v1"', GitRef("refs/heads/v1"), "v1 of https://x/r"),
    ],
)
def test_a_repository(keys, ref, words):
    (declared,) = read(f'My_Package = {{ git = "https://x/r"{keys} }}')
    assert (declared.package, declared.git, declared.git_ref, declared.text) == (
        "my-package",
        "https://x/r",
        ref,
        words,
    )


def test_an_address_and_conditions():
    text = """
a = { url = "https://x/a.whl" }
b = [
  { git = "https://x/b", subdirectory = "python", marker = "sys_platform == 'linux'" },
  { git = "https://x/b", extra = "Cu_13" },
  { git = "https://x/b", group = "test" },
]
"""
    assert read(text) == (
        UvSource(package="a", url="https://x/a.whl"),
        UvSource(package="b", git="https://x/b", subdirectory="python", marker='sys_platform == "linux"'),
        UvSource(package="b", git="https://x/b", extra="cu-13"),
        UvSource(package="b", git="https://x/b", group="test"),
    )


def test_indexes_paths_and_members_of_the_workspace():
    text = """
a = { index = "site" }
b = [{ index = "open", extra = "gpu" }, { path = "../b" }]
c = { workspace = true }
d = { index = "nowhere" }
[[tool.uv.index]]
name = "site"
url = "https://x/simple"
explicit = true
[[tool.uv.index]]
name = "open"
url = "https://y/simple"
[[tool.uv.index]]
url = "https://z/simple"
"""
    assert read(text) == (
        UvSource(package="a", index="site", index_url="https://x/simple", explicit=True),
        UvSource(package="b", index="open", index_url="https://y/simple", extra="gpu"),
        UvSource(package="b", path="../b"),
        UvSource(package="c", workspace=True),
        UvSource(package="d", index="nowhere", explicit=True),
    )
    assert uv_settings(None).sources() == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = 5", "a is neither a table nor a list of tables: 5"),
        ("a = { index = 5 }", "a: index must be a string that is not empty: 5"),
        ("a = {}\n[tool.uv]\nindex = 5", "[[tool.uv.index]] is not a list of tables: 5"),
        ("a = [5]", "a is neither a table nor a list of tables: 5"),
        ("a = { git = 5 }", "a: git must be a string that is not empty: 5"),
        ('a = { git = "https://x/r", rev = "" }', "a: rev must be a string that is not empty: ''"),
        ('a = { git = "https://x/r", rev = "b", tag = "c" }', "a has both rev and tag"),
        ('a = { git = "https://x/r", marker = "linux" }', "a: 'linux' is not a marker"),
    ],
)
def test_another_form_is_named(text, why):
    with pytest.raises(ValueError, match=r"\[tool\.uv\.(sources|index)\]") as caught:
        read(text)
    assert why in str(caught.value)


def test_what_upstream_builds_in_the_environment():
    settings = uv_settings('[tool.uv]\nno-build-isolation-package = ["Mamba_SSM"]')
    assert settings.built_without_isolation == {"mamba-ssm"}
    assert uv_settings(None).built_without_isolation == frozenset()
    with pytest.raises(ValueError, match="not a list of strings"):
        _ = uv_settings('[tool.uv]\nno-build-isolation-package = "all"').built_without_isolation
