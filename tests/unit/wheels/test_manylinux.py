"""Versions of system libraries against auditwheel's policies, and the tag that follows."""

import pytest

from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.binary import Binary, Symbols
from envbuild.wheels.audit.manylinux import too_new, true_tag


def binary(*versions: str, libraries: tuple[str, ...] = ("libc.so.6",), **more) -> Binary:
    needed = {"libstdc++.so.6": versions}
    return Binary(name="a/k.so", architectures=Architectures(), libraries=libraries, versions=needed, **more)


@pytest.mark.parametrize(
    ("glibc", "newest"),
    [("2.17", "3.4.19"), ("2.33", "3.4.28"), ("2.34", "3.4.29"), ("2.36", "3.4.30"), ("2.39", "3.4.33")],
)
def test_a_base_has_what_the_policy_of_its_glibc_allows(glibc, newest):
    """Between two policies the older one counts."""
    assert list(too_new(binary(f"GLIBCXX_{newest}"), glibc, "x86_64")) == []
    number = int(newest.rpartition(".")[2]) + 1
    (message,) = too_new(binary(f"GLIBCXX_3.4.{number}"), glibc, "x86_64")
    assert f"has GLIBCXX up to {newest} " in message


def test_a_base_newer_than_every_policy_has_its_own_glibc():
    assert list(too_new(binary("GLIBC_2.50"), "2.50", "x86_64")) == []
    assert len(list(too_new(binary("GLIBC_2.51"), "2.50", "x86_64"))) == 1


@pytest.mark.parametrize(
    ("made", "policy"),
    [
        (binary("GLIBC_2.34", "GLIBCXX_3.4.29"), "manylinux_2_34"),
        (binary("GLIBC_2.14", "GLIBCXX_3.4.30"), "manylinux_2_35"),
        (binary("GLIBC_2.2.5", libraries=("libcuda.so.1", "libcudart.so.13", "ld-linux-x86-64.so.2")), "manylinux_2_5"),
        (binary("OPENSSL_3.0.0"), "manylinux_2_5"),
        (binary(libraries=("libmvec.so.1",)), "manylinux_2_24"),
    ],
)
def test_true_tag_is_of_the_oldest_fitting_policy(made, policy):
    tag = true_tag([made], "2.36", "x86_64", {"libcudart.so.13"})
    assert (tag.policy, tag.platform, tag.against) == (policy, f"{policy}_x86_64", ())


@pytest.mark.parametrize(
    ("made", "against"),
    [
        (binary("GLIBC_2.37"), "a/k.so needs GLIBC_2.37 of libstdc++.so.6, which manylinux_2_36 does not have"),
        (binary(libraries=("libnope.so",)), "a/k.so needs libnope.so, which manylinux_2_36 does not have"),
        (binary(processor="x86-64-v3"), "a/k.so asks for x86-64-v3 processors"),
        (
            binary(libraries=("libz.so.1",), symbols=Symbols(undefined=frozenset({"inflate_fast", "inflate"}))),
            "a/k.so uses what is private to libz.so.1: inflate_fast",
        ),
    ],
)
def test_wheel_without_a_policy_lists_the_reasons(made, against):
    tag = true_tag([made], "2.36", "x86_64", {"libcudart.so.13"})
    assert (tag.policy, tag.platform, tag.against) == ("", "linux_x86_64", (against,))
