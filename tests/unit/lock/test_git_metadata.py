"""What a component from git declares, as far as its tree states it."""

import pytest
from helpers.fake_git import FakeRepository, fake_tree

from envbuild.core.errors import CheckRefusedError
from envbuild.lock.components.git_metadata import metadata_of_tree, stated_metadata

URL = "https://x/kernels"
SETUP = 'import torch\nfrom setuptools import setup\nsetup(name="kernels", version="1.2", {words})\n'
PROJECT = '[project]\nname = "kernels"\nversion = "1.2"\n'


def read(files, cuda="13", **spec):
    return metadata_of_tree(
        fake_tree(FakeRepository(URL, files), **{"phase": "compile", "modules": ["kernels"], **spec}), cuda
    )


def setup(words):
    return {"setup.py": SETUP.format(words=words)}


@pytest.mark.parametrize(
    ("files", "requires", "extras"),
    [
        ({"pyproject.toml": f"{PROJECT}dependencies = ['torch', 'einops>=1']\n"}, ("torch", "einops>=1"), ()),
        (
            {"pyproject.toml": f"{PROJECT}[project.optional-dependencies]\nmore = ['x']\n"},
            ("x ; extra == 'more'",),
            ("more",),
        ),
        ({"setup.cfg": "[metadata]\nversion = 1.2\n[options]\ninstall_requires =\n  torch\n  einops # b\n"},
         ("torch", "einops"), ()),
        (setup("install_requires=['torch', 'einops']"), ("torch", "einops"), ()),
        (setup("ext_modules=[]"), (), ()),
        (setup("install_requires=['a'], extras_require={'dev': ['b'], ':os_name == \"nt\"': ('c',)}"),
         ("a", "b ; extra == 'dev'", 'c ; os_name == "nt"'), ("dev",)),
        ({"setup.py": "NEEDS = ['a']\nsetup(version='1.2', install_requires=NEEDS)\n"}, ("a",), ()),
        # setup.py may be there for its extension modules alone.
        ({"pyproject.toml": f"{PROJECT}dependencies = ['a']\n", "setup.py": "setup(**words())\n"}, ("a",), ()),
        (
            {"setup.cfg": "[metadata]\nversion = 1.2\n[options]\ninstall_requires = a\n", "setup.py": "setup()\n"},
            ("a",),
            (),
        ),
    ],
)  # fmt: skip
def test_what_a_tree_states(files, requires, extras):
    declared = read(files)
    assert (declared.requires_dist, declared.provides_extra) == (requires, extras)
    assert (declared.name, declared.version, declared.sdist_digest) == ("kernels", "1.2", "")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"pyproject.toml": "[build-system]\nrequires = []\n"},
        {"pyproject.toml": f"{PROJECT}dynamic = ['dependencies']\n"},
        setup("install_requires=needed()"),
        setup("install_requires=['a'] + more"),
        setup("extras_require=extras"),
        {"setup.py": "needs = ['a']\nneeds.append('b')\nsetup(version='1.2', install_requires=needs)\n"},
        {"setup.py": "needs = ['a']\nneeds = ['b']\nsetup(version='1.2', install_requires=needs)\n"},
        {"setup.py": "setup(version='1.2', **words)\n"},
        {"setup.py": "setup(version='1.2')\nsetup(version='1.2', install_requires=['a'])\n"},
        {"setup.py": "setup(version='1.2', install_requires=['a'])\n)"},
        {"setup.cfg": "[metadata]\nversion = 1.2\n[options]\ninstall_requires = file: needs.txt\n"},
        {"setup.cfg": "[metadata]\nversion = 1.2\n[options]\ninstall_requires = a\n", "setup.py": "setup(**more)\n"},
        {"setup.cfg": "no section\n"},
        {"pyproject.toml": f"{PROJECT}dependencies = ['???']\n"},
        {"pyproject.toml": f"{PROJECT}requires-python = 'x'\ndependencies = []\n"},
        {"pyproject.toml": "project = 1\ntool = 1\n"},
        {"pyproject.toml": "[project]\nname = 'kernels'\n[tool.setuptools]\ndynamic = 'attr'\n"},
        {"pyproject.toml": "["},
    ],
)
def test_a_tree_that_leaves_it_to_code_is_refused(files):
    with pytest.raises(
        CheckRefusedError, match="what kernels aaaaaaaaaaaa requires is not known before a build"
    ) as error:
        read(files)
    assert URL in error.value.why
    assert "--pin kernels=VERSION" in error.value.fix


DYNAMIC = '[project]\nname = "kernels"\ndynamic = ["version"]\ndependencies = []\n'


@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": f'{DYNAMIC}[tool.setuptools.dynamic]\nversion = {{ attr = "kernels.info.VERSION" }}\n',
         "kernels/info.py": 'VERSION = "1.2"\n'},
        {"pyproject.toml": f'{DYNAMIC}[tool.setuptools.dynamic]\nversion = {{ file = "VERSION" }}\n',
         "VERSION": "1.2\n"},
        {"pyproject.toml": DYNAMIC, "kernels/__init__.py": '__version__ = "1.2"\n'},
        {"pyproject.toml": DYNAMIC, "src/kernels/__init__.py": '__version__ = "1.2"\n'},
        {"pyproject.toml": DYNAMIC, "setup.cfg": "[metadata]\nversion = attr: kernels.__version__\n",
         "kernels/__init__.py": '__version__ = "1.2"\n'},
        {"setup.py": "setup(version=version())", "kernels/__init__.py": '__version__ = "1.2"\n'},
    ],
)  # fmt: skip
def test_where_a_version_is_written_out(files):
    assert read(files).version == "1.2"


PARTS = 'VERSION = (MAJOR, 4, 2, "rc0")\n'
JOINED = '__version__ = ".".join(map(str, VERSION[:3])) + "".join(VERSION[3:])\n'
COMMIT = 'if git():\n    __version__ += f"+{git()}"\n'


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (f"MAJOR = 1\n{PARTS}{JOINED}", "1.4.2rc0"),
        # Sources without a history have no commit in their version.
        (f"MAJOR = 1\n{PARTS}{JOINED}{COMMIT}", "1.4.2rc0"),
        (f"MAJOR = 1\n{PARTS}try:\n    __version__ = of()\nexcept E:\n    __version__ = other()\n", "1.4.2rc0"),
        ('MAJOR, MINOR = 1, 2\n__version__ = "3"\n', "3"),
        ('MAJOR = 1\n__version__ = f"{MAJOR}.2"\n', "1.2"),
        # What only running it would tell.
        ('__version__ = "1"\nif new():\n    __version__ = "2"\n', None),
        ('__version__ = "1"\n__version__ += suffix()\n', None),
        ('__version__ = "1"\nfor __version__ in versions():\n    pass\n', None),
        (f'MAJOR = int("1")\n{PARTS}{JOINED}', None),
        (f"MAJOR = 1\n{PARTS}__version__ = '.'.join(map(repr, VERSION))\nVERSION = 2\n", None),
        ('PARTS = ("1", "2")\n__version__ = ".".join(PARTS[: len(PARTS)])\n', None),
        ('__version__ = f"{now():%Y}.1"\n', None),
    ],
)
def test_a_version_that_a_module_puts_together(text, version):
    repository = FakeRepository(URL, {"pyproject.toml": DYNAMIC, "kernels/__init__.py": text})
    stated = stated_metadata(fake_tree(repository, modules=["kernels"]))
    assert (stated.version if stated else None) == version


MORE = "[project.optional-dependencies]\nm = ['b']\n"


@pytest.mark.parametrize(
    ("text", "requires"),
    [
        (f"{PROJECT}requires-python = '>=3.12'\ndependencies = ['a-cu12']\n{MORE}", ("a-cu12", "b ; extra == 'm'")),
        (f"{PROJECT}dynamic = ['dependencies']\n", None),
        ("[build-system]\nrequires = ['torch']\n", None),
        (f"{PROJECT}dependencies = ['???']\n", None),
        (f"{PROJECT}requires-python = 'x'\n", None),
        (f"{PROJECT}[build-system]\nrequires = 1\n", None),
        ("[", None),
    ],
)
def test_what_no_build_has_to_tell(text, requires):
    files = {"pyproject.toml": text, "setup.py": "setup(version='1', install_requires=['c'])"}
    stated = stated_metadata(fake_tree(FakeRepository(URL, files)))
    assert (stated.requires_dist if stated else None) == requires
    if stated:
        assert (stated.version, stated.requires_python, stated.build_requires) == ("1.2", ">=3.12", ())


def test_release_file_holds_the_version_too():
    assert (
        read({"pyproject.toml": DYNAMIC, "VERSION.txt": "1.2.0.dev0\n"}, release_file="VERSION.txt").version
        == "1.2.0.dev0"
    )


@pytest.mark.parametrize(
    "text", ["", "__version__ = compute()\n", '__version__ = "1"\n__version__ = "2"\n', '__version__ = "x y"\n']
)
def test_a_version_that_is_not_written_out_is_refused(text):
    with pytest.raises(CheckRefusedError, match="not known before a build") as caught:
        read({"pyproject.toml": DYNAMIC, "kernels/__init__.py": text})
    assert "release_file" in caught.value.why


def test_the_bases_cuda_and_what_builds_it():
    text = f'{PROJECT}dependencies = ["core-cu12==1"]\n[build-system]\nrequires = ["ninja", "torch"]\n'
    declared = read({"pyproject.toml": text})
    assert declared.requires_dist == ("core-cu13==1",)
    assert declared.rewritten == ("core-cu12==1 -> core-cu13==1",)
    assert declared.build_requires == ("ninja", "torch")
