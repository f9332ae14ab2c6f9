"""The check of a wheel: its name, its tags, what its files need; all without a compiler."""

import zipfile

import pytest
from helpers.wheels import make_wheel
from unit.wheels.plans import plan

from envbuild.core.errors import CheckRefusedError
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.audit import _wrong_content, _wrong_members, check_wheel
from envbuild.wheels.audit.binary import Binary
from envbuild.wheels.audit.load import is_elsewhere, is_foreign


def binary(**changes) -> Binary:
    fields = {
        "name": "k.so",
        "architectures": Architectures.named(["90"]),
        "libraries": ("libc.so.6", "libstdc++.so.6", "ld-linux-x86-64.so.2", "libcuda.so.1", "libtorch.so"),
        "versions": {"libc.so.6": ("GLIBC_2.34",), "libstdc++.so.6": ("GLIBCXX_3.4.30", "CXXABI_1.3.13")},
    }
    return Binary(**{**fields, **changes})


OF_BASE = ", and a base with glibc 2.35 has"
OF_POLICY = " (PEP 600, manylinux_2_35)."
PROVIDED = frozenset({"libtorch.so"})


def test_wheel_as_planned_has_no_problems():
    assert list(_wrong_content([binary()], plan(), PROVIDED)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": Architectures.named(["80", "90"])}, "It contains sm_80, sm_90; asked for was sm_90."),
        ({"architectures": Architectures.named(["90a"])}, "It contains sm_90a; asked for was sm_90."),
        ({"architectures": Architectures.named(["90"], ["90"])}, "It contains sm_90, PTX 90; asked for was sm_90."),
        ({"architectures": Architectures()}, "It contains no GPU code; asked for was sm_90."),
        (
            {"versions": {"libc.so.6": ("GLIBC_2.4", "GLIBC_2.36")}},
            "k.so needs GLIBC_2.36 of libc.so.6, and the base has glibc 2.35.",
        ),
        (
            {"versions": {"libstdc++.so.6": ("GLIBCXX_3.4.31",)}},
            f"k.so needs GLIBCXX_3.4.31 of libstdc++.so.6{OF_BASE} GLIBCXX up to 3.4.30{OF_POLICY}",
        ),
        (
            {"versions": {"libgcc_s.so.1": ("GCC_13.0.0",)}},
            f"k.so needs GCC_13.0.0 of libgcc_s.so.1{OF_BASE} GCC up to 12.0.0{OF_POLICY}",
        ),
        (
            {"versions": {"libc.so.6": ("GLIBC_PRIVATE",)}},
            f"k.so needs GLIBC_PRIVATE of libc.so.6{OF_BASE} GLIBC up to 2.35{OF_POLICY}",
        ),
        ({"machine": "aarch64"}, "k.so is for aarch64, not x86_64."),
        (
            {"libraries": ("libc.so.6", "libcudart.so.13", "libc10.so")},
            "k.so needs libcudart.so.13, libc10.so, which the locked environment does not have.",
        ),
    ],
)
def test_each_deviation_has_its_message(changes, message):
    assert list(_wrong_content([binary(**changes)], plan(), PROVIDED)) == [message]


def test_a_wheel_may_bring_its_own_libraries():
    files = [binary(libraries=("libown.so",)), binary(name="k.libs/libown.so", libraries=())]
    assert list(_wrong_content(files, plan(), PROVIDED)) == []


@pytest.mark.parametrize(
    ("name", "version", "tags", "message"),
    [
        ("other", "1.7.0", "cp310-cp310-linux_x86_64", "It is other 1.7.0, not causal-conv1d 1.7.0."),
        ("causal_conv1d", "1.7.1", "cp310-cp310-linux_x86_64", "It is causal-conv1d 1.7.1"),
        ("causal_conv1d", "1.7.0+cu130", "cp310-cp310-linux_x86_64", "1.7.0+cu130, not causal-conv1d 1.7.0"),
        ("causal_conv1d", "1.7.0", "cp312-cp312-linux_x86_64", "is not for cp310"),
        ("causal_conv1d", "1.7.0", "cp311-abi3-linux_x86_64", "is not for cp310"),
        ("causal_conv1d", "1.7.0", "cp310-cp310-linux_aarch64", "is not for linux/amd64"),
        ("causal_conv1d", "1.7.0", "cp310-cp310-manylinux_2_39_x86_64", "newer glibc than the base's 2.35"),
    ],
)
def test_a_wheel_with_another_name_or_tag_is_refused(tmp_path, name, version, tags, message):
    wheel = make_wheel(tmp_path, name, version, tags)
    with pytest.raises(CheckRefusedError, match="refused") as refused:
        check_wheel(wheel, plan({"gpu_code": False}), tmp_path / "venv", tmp_path / "scratch", tmp_path / "log")
    assert message in refused.value.why
    assert "envs/wheels/causal-conv1d.toml" in refused.value.fix


@pytest.mark.parametrize(
    ("why", "beginnings", "foreign"),
    [
        ("/x/te.so: undefined symbol: nvte_cublas_gemm", ("nvte_",), True),
        ("/x/te.so: undefined symbol: _Z14nvte_unpermutePvS_", ("nvte_",), True),
        ("/x/te.so: undefined symbol: _ZTIN18transformer_engine4BaseE", ("_ZTIN18transformer_engine",), True),
        ("/x/te.so: undefined symbol: nvte_cublas_gemm", (), False),
        ("/x/te.so: undefined symbol: _ZN3c105ErrorC2E", ("nvte_",), False),
        ("libnvte_x.so: cannot open shared object file", ("nvte_",), False),
    ],
)
def test_only_declared_symbols_are_foreign(why, beginnings, foreign):
    assert is_foreign(why, beginnings) is foreign


@pytest.mark.parametrize(
    ("files", "module", "elsewhere"),
    [
        ((), "other", True),
        (("own/__init__.py",), "own.gone", False),
        (("own.py",), "own.gone", False),
        (("shared/lib/x.so",), "shared.pytorch", True),
    ],
)
def test_missing_module_is_of_the_wheel_or_of_another_package(tmp_path, files, module, elsewhere):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert is_elsewhere(module, tmp_path) is elsewhere


@pytest.mark.parametrize("name", ["../slip", "own/../../slip", "/etc/slip"])
def test_a_wheel_that_would_write_outside_of_the_environment_is_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("own/..still/inside", "")
        archive.writestr(name, "")
    message = f"{name} would be written outside of the environment."
    assert list(_wrong_members(tmp_path / "a.whl")) == [message]
    wheel = make_wheel(tmp_path, "causal_conv1d", "1.7.0", "cp310-cp310-linux_x86_64", sources={name: ""})
    with pytest.raises(CheckRefusedError) as refused:
        check_wheel(wheel, plan({"gpu_code": False}), tmp_path / "venv", tmp_path / "scratch", tmp_path / "log")
    assert refused.value.why == message
