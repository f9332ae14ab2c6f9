"""Stubs of extension modules, in a venv of this very Python."""

import sysconfig
import venv
from pathlib import Path

import pytest
from helpers.import_probe import probe_of

from envbuild.core.progress import SilentReporter
from envbuild.sync.extension_stubs import write_stubs
from envbuild.sync.failure_packages import InstalledPackages
from envbuild.sync.imports import try_imports

# As Transformer Engine 2.2 (the glob) and 2.17 (the checks) load theirs.
LOADER = """
import importlib.metadata, importlib.util, pathlib, sys
assert importlib.metadata.version("kernels_torch") == "1.2"
(file,) = pathlib.Path(__file__).parent.glob("kernels_ext.*.so")
spec = importlib.util.spec_from_file_location("kernels_ext", file)
sys.modules["kernels_ext"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["kernels_ext"])
from kernels_ext import DType, forward
"""
RAISED_FROM = """
import kernels_ext
try:
    kernels_ext.init()
except RuntimeError as error:
    raise ImportError("no kernels") from error
"""
IMPORTED = {
    "loader": LOADER,
    "members": "import kernels_ext as ext\n"
    "names = {ext.DType.kByte: 'byte', ext.DType.kHalf: 'half'}\n"
    "assert names[ext.DType.kHalf] == 'half' and int(ext.DType.kHalf) == 1 and ext.DType.kHalf.name == 'kHalf'\n"
    "assert set(ext.DType.__members__) == {'kByte', 'kHalf'} and isinstance(ext.DType.kByte, ext.DType)\n",
    "classes": "import kernels_ext as ext\n"
    "class Overlap(ext.CommOverlap): pass\n"
    "def reduce(overlap: ext.CommOverlap | None = None, kind=ext.Kind.RING): pass\n",
    # As transformer_engine.pytorch.cpp_extensions does, and its users.
    "every": "from kernels_ext import *\n",
    "from_every": "import every as tex\nfrom every import FP8TensorMeta\ndef cast(kind=tex.DType.kByte): pass\n",
    "guarded": "import kernels_ext as ext\ntry:\n    ext.cudnn_version()\nexcept RuntimeError:\n    pass\n",
    "others": "import _ctypes\nassert _ctypes.__file__.endswith('.so')\nassert callable(_ctypes.dlopen)\n",
}
NEEDS_CODE = {
    "called": ("import kernels_ext as ext\next.cudnn_version()\n", "kernels_ext.cudnn_version is called"),
    "compared": ("import kernels_ext as ext\nassert ext.LIMIT > 3\n", "kernels_ext.LIMIT is used as a number"),
    "attribute": ("import kernels_ext as ext\next.DType.kByte.bits\n", "has no attribute 'bits'"),
    "raised_from": (RAISED_FROM, "kernels_ext.init is called"),
}
FAILED = {
    "missing": ("import kernels_ext\nimport undeclared\n", "No module named 'undeclared'"),
    "moved": ("import kernels_ext\nfrom json import no_such_name\n", "cannot import name 'no_such_name'"),
}


@pytest.fixture
def site_packages(tmp_path) -> Path:
    """Of a venv with a stub of `kernels_ext`."""
    venv.create(tmp_path / "venv", symlinks=True)
    folder = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv")}))
    write_stubs({"kernels-torch": "kernels_ext"}, {"kernels-torch": "1.2", "torch": "2.9"}, folder)
    return folder


def test_the_code_around_a_stub_is_imported_for_real(tmp_path, site_packages):
    sources = IMPORTED | {name: text for name, (text, _) in (NEEDS_CODE | FAILED).items()}
    for name, text in sources.items():
        (site_packages / f"{name}.py").write_text(text)
    probe = probe_of(tmp_path, str(tmp_path / "venv/bin/python"))
    found = try_imports({"a": (*sources, "kernels_ext")}, probe, SilentReporter())
    assert {item.module: item.cause for item in found.failed if item.module not in FAILED} == {}
    assert found.imported == (*IMPORTED,)
    reasons = {item.module: item.reason for item in found.not_checked}
    assert reasons.pop("kernels_ext") == "a placeholder: a stub of a compiled module"
    assert reasons.keys() == NEEDS_CODE.keys()
    for name, (_, text) in NEEDS_CODE.items():
        assert reasons[name].startswith("it needs compiled code that is not built: ")
        assert text in reasons[name]
    assert [item.module for item in found.failed] == [*FAILED]
    for item in found.failed:
        assert FAILED[item.module][1] in item.cause


def test_a_stub_belongs_to_its_package(site_packages):
    installed = InstalledPackages(site_packages)
    assert (installed.names, installed.of_module("kernels_ext")) == ({"kernels-torch"}, "kernels-torch")


def test_the_python_code_around_a_module_comes_from_its_sources(tmp_path):
    """As mamba-ssm's, which has both in one package."""
    (tmp_path / "sources/lib/ops").mkdir(parents=True)
    (tmp_path / "sources/lib/__init__.py").write_text("from lib.ops import scan\n")
    (tmp_path / "sources/lib/ops/__init__.py").write_text("import lib_cuda\nscan = lib_cuda.scan\n")
    venv.create(tmp_path / "venv", symlinks=True)
    folder = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv")}))
    write_stubs({"lib-ssm": "lib_cuda"}, {"lib-ssm": "1.2"}, folder, {"lib-ssm": [tmp_path / "sources/lib"]})
    found = try_imports({"lib-ssm": ("lib",)}, probe_of(tmp_path, str(tmp_path / "venv/bin/python")), SilentReporter())
    assert (found.imported, found.failed) == (("lib",), ())
    assert InstalledPackages(folder).of_module("lib") == "lib-ssm"
