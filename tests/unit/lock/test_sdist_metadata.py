"""What sdists declare, read and never typed in."""

import shutil
import zipfile

import pytest
from helpers.locks import lock_context, resolved_package
from helpers.simple_index import make_sdist
from packaging.requirements import Requirement

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, NetworkError, ResolutionError
from envbuild.lock.components.downloads import fetch_sdist
from envbuild.lock.components.project_metadata import DEFAULT_BUILD_REQUIRES, build_requires
from envbuild.lock.components.sdist_metadata import compile_metadata, declaring_files, read_metadata
from envbuild.lock.context import LockContext

EGG = "kernels.egg-info"


def read(tmp_path, cuda="13", version="1.0", **sdist):
    return read_sdist("kernels", version, make_sdist(tmp_path, "kernels", version, **sdist).read_bytes(), cuda)


def read_sdist(name, version, content, cuda):
    return read_metadata(name, version, declaring_files(name, content), cuda, sha256_bytes(content))


def test_requirements_extras_and_build_requirements(tmp_path):
    declared = read(
        tmp_path,
        requires=("torch>=2", "x ; extra == 'more'"),
        extras=("more",),
        pyproject='[build-system]\nrequires = ["ninja", "torch"]\n',
    )
    assert declared.requires_dist == ("torch>=2", "x ; extra == 'more'")
    assert declared.provides_extra == ("more",)
    assert declared.build_requires == ("ninja", "torch")
    assert declared.rewritten == ()


@pytest.mark.parametrize(
    ("line", "cuda", "expected"),
    [
        ("te-cu12==2.9.0", "13", "te-cu13==2.9.0"),
        ("te_cu12[x]>=1 ; python_version > '3'", "13", "te-cu13[x]>=1 ; python_version > '3'"),
        ("te-cu13==2.9.0", "12", "te-cu12==2.9.0"),
        ("te-cu13==2.9.0", "13", None),
        ("te-cu12==2.9.0", None, None),
        ("cupy-cuda12x", "13", None),
        ("accu12", "13", None),
    ],
)
def test_cuda_of_the_base_decides(tmp_path, line, cuda, expected):
    declared = read(tmp_path, cuda, requires=("a", line))
    assert declared.requires_dist == ("a", expected or line)
    assert declared.rewritten == ((f"{line} -> {expected}",) if expected else ())


@pytest.mark.parametrize("stated", [("kernels", "2.0"), ("other", "1.0"), ("", "")])
def test_another_name_or_version_is_refused(tmp_path, stated):
    with pytest.raises(CheckRefusedError, match=r"sdist of kernels 1\.0 cannot be used"):
        read(tmp_path, stated=stated)


@pytest.mark.parametrize("stated", [("Kernels", "1.0"), ("kernels", "1.0.0"), ("KERNELS", "v1.0")])
def test_other_spellings_of_the_same_are_the_same(tmp_path, stated):
    assert read(tmp_path, stated=stated).name == "kernels"


@pytest.mark.parametrize("content", [b"", b"PK no zip", b"\x1f\x8b no gzip", b"text"])
def test_file_that_is_not_an_archive_is_refused(content):
    with pytest.raises(CheckRefusedError, match="cannot be used"):
        read_sdist("kernels", "1.0", content, "13")


def test_zip_sdists_are_read_and_only_the_top_pkg_info_counts(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("kernels-1.0/PKG-INFO", "Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n")
        archive.writestr(f"kernels-1.0/{EGG}/", "")
        archive.writestr(f"kernels-1.0/{EGG}/PKG-INFO", "Name: wrong\nVersion: 9\n")
        archive.writestr(f"kernels-1.0/{EGG}/requires.txt", "a\n")
    actual = read_sdist("kernels", "1.0", (tmp_path / "a.zip").read_bytes(), "13")
    assert (actual.requires_dist, actual.build_requires) == (("a",), DEFAULT_BUILD_REQUIRES)


REQUIRES = """\
torch
packaging>=20 ; python_version > "3"

[:python_version < "3.11"]
tomli
old ; os_name == "posix"

# a comment
[dev]
pytest
url @ https://example.invalid/url.zip
[dev:python_version < "3.12"]
black[jupyter]>=2
[Causal conv]
causal-conv1d
[empty]
"""
STATIC = "[project]\nname = 'kernels'\ndependencies = ['a>=1']\n"
FOR_MORE = "c ; (os_name == \"posix\") and (extra == 'more')"
OPTIONAL = STATIC + "[project.optional-dependencies]\nmore = ['b', \"c ; os_name == 'posix'\"]\n"


@pytest.mark.parametrize("folder", [EGG, f"src/{EGG}", "Kernels.egg-info"])
def test_old_metadata_without_requirements_has_them_in_its_egg_info(tmp_path, folder):
    files = {
        f"{folder}/PKG-INFO": "Name: wrong\n",
        f"{folder}/requires.txt": REQUIRES,
        f"deep/er/{EGG}/requires.txt": "",
    }
    declared = read(tmp_path, metadata="2.1", files=files, extras=("dev", "stated"), pyproject=STATIC)
    assert declared.requires_dist == (
        "torch",
        'packaging>=20 ; python_version > "3"',
        'tomli ; python_version < "3.11"',
        'old ; (os_name == "posix") and (python_version < "3.11")',
        "pytest ; extra == 'dev'",
        "url @ https://example.invalid/url.zip ; extra == 'dev'",
        "black[jupyter]>=2 ; (python_version < \"3.12\") and (extra == 'dev')",
        "causal-conv1d ; extra == 'Causal_conv'",
    )
    assert all(Requirement(line) for line in declared.requires_dist)
    assert declared.provides_extra == ("dev", "stated", "Causal_conv", "empty")


OTHER = {f"{EGG}/requires.txt": "other\n[wrong]\n"}
# Without an egg-info of its own.
NO_EGG = {"setup.py": "", "other.egg-info/requires.txt": "wrong\n"}


@pytest.mark.parametrize(
    ("metadata", "files", "pyproject", "requires", "extras"),
    [
        ("2.1", {f"{EGG}/requires.txt": "[core]\nte-cu12==2\n"}, None, ("te-cu13==2 ; extra == 'core'",), ("core",)),
        # New metadata without requirements has none, but where it leaves them open.
        ("2.2", OTHER, STATIC, (), ()),
        ("2.4", OTHER, STATIC, (), ()),
        ("3.0", OTHER, STATIC, (), ()),
        ("2.2\nDynamic: License", {}, STATIC, (), ()),
        ("2.2\nDynamic: Requires-Dist", OTHER, None, ("other",), ("wrong",)),
        # An egg-info without requirements means none.
        ("2.1", {f"{EGG}/SOURCES.txt": "setup.py\n"}, STATIC, (), ()),
        # Old metadata without an egg-info has them in pyproject.toml.
        ("2.1", NO_EGG, STATIC, ("a>=1",), ()),
        ("2.1", NO_EGG, "[project]\nname = 'kernels'\ndynamic = ['version']\n", (), ()),
        ("2.1", NO_EGG, OPTIONAL, ("a>=1", "b ; extra == 'more'", FOR_MORE), ("more",)),
    ],
)
def test_where_requirements_are_stated(tmp_path, metadata, files, pyproject, requires, extras):
    declared = read(tmp_path, metadata=metadata, files=files, pyproject=pyproject)
    assert (declared.requires_dist, declared.provides_extra) == (requires, extras)


@pytest.mark.parametrize("metadata", ["1.2", "2.1", "2.2", "2.4"])
def test_requirements_that_pkg_info_states_win_whatever_the_metadata(tmp_path, metadata):
    declared = read(tmp_path, metadata=metadata, files=OTHER, requires=("a",), extras=("more",), pyproject=STATIC)
    assert (declared.requires_dist, declared.provides_extra) == (("a",), ("more",))


@pytest.mark.parametrize("metadata", ["1.0", "2.1", "", "new", "2.2\nDynamic: requires-dist"])
@pytest.mark.parametrize(
    "pyproject",
    [
        None,
        '[build-system]\nrequires = ["setuptools"]\n',
        "[project]\nname = 'kernels'\ndynamic = ['dependencies']\n",
        "[project]\nname = 'kernels'\ndependencies = ['a']\ndynamic = ['optional-dependencies']\n",
    ],
)
def test_requirements_that_only_a_build_would_tell_are_refused(tmp_path, metadata, pyproject):
    with pytest.raises(CheckRefusedError, match=r"sdist of kernels 1\.0 cannot be used") as caught:
        read(tmp_path, metadata=metadata, files={"setup.py": "", "egg-info/requires.txt": "a\n"}, pyproject=pyproject)
    assert "What it requires is not known" in caught.value.why
    assert "choose another version" in caught.value.fix


@pytest.mark.parametrize(
    ("files", "pyproject", "why"),
    [
        ({f"{EGG}/requires.txt": "[dev\nblack\n"}, None, "a section without an end: '[dev'"),
        ({f"{EGG}/requires.txt": "[dev:\nblack\n"}, None, "a section without an end"),
        ({}, "project = 1\n", "What it requires is not known"),
        ({}, "[project]\ndependencies = 'a'\n", "another form than lists"),
        ({}, "[project]\ndependencies = [1]\n", "another form than lists"),
        ({}, "[project]\noptional-dependencies = ['a']\n", "another form than lists"),
        ({}, "[project]\ndynamic = 'dependencies'\n", "another form than lists"),
        ({}, "[", "pyproject.toml cannot be read"),
        ({f"{EGG}/requires.txt": "???\n"}, None, "not a requirement: '???'"),
        ({f"{EGG}/requires.txt": "[:banana]\na\n"}, None, "not a requirement: 'a ; banana'"),
        ({f"{EGG}/requires.txt": "[???]\na\n"}, None, "not the name of an extra: '_'"),
        ({}, "[project]\ndependencies = ['a>=x']\n", "not a requirement: 'a>=x'"),
        ({}, "[project]\ndependencies = []\n[build-system]\nrequires = ['a>=x']\n", "not a requirement: 'a>=x'"),
    ],
)
def test_statements_that_cannot_be_read_are_refused(tmp_path, files, pyproject, why):
    with pytest.raises(CheckRefusedError) as caught:
        read(tmp_path, metadata="2.1", files=files, pyproject=pyproject)
    assert why in caught.value.why


@pytest.mark.parametrize("text", [None, "", "[project]\nname = 'x'\n", "[build-system]\nbuild-backend = 'x'\n"])
def test_default_build_requirements(text):
    assert build_requires(text) == DEFAULT_BUILD_REQUIRES
    assert build_requires("[build-system]\nrequires = []\n") == ()


@pytest.mark.parametrize(
    "text", ["[", "build-system = 1\n", "[build-system]\nrequires = 'x'\n", "[build-system]\nrequires = [1]\n"]
)
def test_unreadable_build_requirements(tmp_path, text):
    with pytest.raises(ValueError):
        build_requires(text)
    with pytest.raises(CheckRefusedError, match=r"kernels 1\.0"):
        read(tmp_path, pyproject=text)


@pytest.fixture
def context(tmp_path) -> LockContext:
    return lock_context(tmp_path)


def package(sdist):
    return resolved_package({"name": "kernels", "version": "1.0", "sdist": sdist})


def test_fetch_verifies_and_keeps(tmp_path, context):
    path = make_sdist(tmp_path, "kernels", "1.0")
    content = path.read_bytes()
    entry = package({"url": path.as_uri(), "hash": sha256_bytes(content)})
    assert fetch_sdist(entry, context) == (content, sha256_bytes(content))
    path.unlink()
    assert fetch_sdist(entry, context)[0] == content


@pytest.mark.parametrize(
    ("sdist", "requires"),
    [
        ({"requires": ("torch>=2",)}, ("torch>=2",)),
        ({"metadata": "2.1", "files": {f"{EGG}/requires.txt": "torch>=2\n"}}, ("torch>=2",)),
        ({"metadata": "2.1", "files": {f"{EGG}/SOURCES.txt": ""}}, ()),
        ({"metadata": "2.1", "pyproject": STATIC}, ("a>=1",)),
    ],
)
def test_metadata_is_read_from_an_sdist_once(tmp_path, context, sdist, requires):
    path = make_sdist(tmp_path, "kernels", "1.0", **sdist)
    digest = sha256_bytes(path.read_bytes())
    locked = {"kernels": package({"url": path.as_uri(), "hash": digest})}
    # What an earlier envbuild kept of it has no egg-info, and does not count.
    text = "Metadata-Version: 2.2\nName: kernels\nVersion: 1.0\nRequires-Dist: earlier\n"
    context.store.get_or_build("sdist-metadata", digest, lambda entry: (entry / "PKG-INFO").write_text(text))

    def read_it():
        return compile_metadata(["kernels"], locked, "13", context)

    first = read_it()
    assert first[0].requires_dist == requires
    assert first[0].sdist_digest == digest
    path.unlink()
    shutil.rmtree(context.store.root / "files")
    assert read_it() == first


def test_a_hash_of_another_kind_is_none(tmp_path, context):
    path = make_sdist(tmp_path, "kernels", "1.0", requires=("a",))
    locked = {"kernels": package({"path": path.name, "hash": "md5:0123"})}
    (declared,) = compile_metadata(["kernels"], locked, "13", context)
    assert (declared.requires_dist, declared.sdist_digest) == (("a",), sha256_bytes(path.read_bytes()))


def test_fetch_of_another_file_than_stated_is_refused(tmp_path, context):
    path = make_sdist(tmp_path, "kernels", "1.0")
    with pytest.raises(CheckRefusedError, match="not the file that the index states"):
        fetch_sdist(package({"path": path.name, "hash": sha256_bytes(b"x")}), context)
    assert list((context.store.root / "staging").iterdir()) == []


def test_fetch_without_sdist_or_network(tmp_path, context):
    with pytest.raises(ResolutionError, match=r"kernels 1\.0 has no sdist"):
        fetch_sdist(package(None), context)
    with pytest.raises(NetworkError, match="cannot download"):
        fetch_sdist(package({"url": (tmp_path / "gone").as_uri(), "hash": "sha256:aa"}), context)
    with pytest.raises(NetworkError, match=r"cannot read the sdist of kernels 1\.0") as caught:
        fetch_sdist(package({"path": "gone.tar.gz", "hash": "sha256:aa"}), context)
    assert "gone.tar.gz" in caught.value.why


def test_wheels_of_the_compile_phase_are_left_to_uv(tmp_path, context):
    path = make_sdist(tmp_path, "kernels", "1.0")
    locked = {
        "kernels": package({"path": path.name}),
        "core": resolved_package({"name": "core", "version": "1", "wheels": [{"url": "https://x/core.whl"}]}),
    }
    declared = compile_metadata(["kernels", "core"], locked, "13", context)
    assert [(entry.name, entry.sdist_digest) for entry in declared] == [("kernels", sha256_bytes(path.read_bytes()))]
