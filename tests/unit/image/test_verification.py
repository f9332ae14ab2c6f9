"""The places where a lock is verified, and their order."""

import pytest
from helpers.sites import context_of
from helpers.stack_files import write_base, write_vendor_base

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.image import verification
from envbuild.image.verification import verification_places
from envbuild.sync import local as this_machine


@pytest.fixture
def project(tmp_path):
    """Bases of several distributions with one Python, and some that nothing can be verified in."""
    write_base(tmp_path, "old", glibc="2.31", cuda="13.0")
    write_base(tmp_path, "own", glibc="2.36", cuda="13.0")
    write_base(tmp_path, "newest", glibc="2.41", cuda="13.0")
    write_base(tmp_path, "newer", glibc="2.39", cuda="12.6")
    write_base(tmp_path, "cpu", glibc="2.39")
    write_vendor_base(tmp_path, "vendor", provides={"torch": "2.9"}, digest="sha256:" + "a" * 64)
    write_vendor_base(tmp_path, "unresolved", provides={})
    for name, changes in {"other-python": {"3.11": "3.12"}, "other-platform": {"linux/amd64": "linux/arm64"}}.items():
        text = (tmp_path / "envs/bases/newest.toml").read_text()
        for before, after in changes.items():
            text = text.replace(before, after)
        (tmp_path / f"envs/bases/{name}.toml").write_text(text)
    return tmp_path


@pytest.fixture
def places(project):
    context = context_of(project)
    catalog = Catalog((project / "envs",))

    def make(base):
        return verification_places(Selection(catalog, "s", base, "t"), context)

    return make


def names(places):
    return [place.where.partition(" (")[0] for place in places]


def test_the_base_itself_comes_first_then_the_nearest_glibc_then_the_machine(places):
    assert names(places("own")) == ["base own", "base newer", "base newest", "this machine"]
    assert names(places("newest")) == ["base newest", "this machine"]
    assert names(places("cpu")) == ["base cpu", "this machine"]


def test_a_base_that_is_in_the_store_comes_before_others(places, monkeypatch):
    monkeypatch.setattr(verification, "find_base", lambda base, _store: base if base.glibc == "2.41" else None)
    assert names(places("own")) == ["base own", "base newest", "base newer", "this machine"]


def test_what_a_base_brings_is_in_no_other_place(places):
    assert names(places("vendor")) == ["base vendor"]


def test_a_base_whose_digest_was_not_resolved_is_no_place(places):
    problem = places("unresolved")[0].problem()
    assert problem.startswith("the digest of base unresolved was not resolved: ")


@pytest.mark.parametrize(
    ("machine", "glibc", "problem"),
    [
        ("x86_64", "2.36", ""),
        ("x86_64", "2.100", ""),
        ("x86_64", "2.35", "this machine has 2.35"),
        ("x86_64", "", "this machine has none"),
        ("aarch64", "2.39", "this machine is aarch64"),
    ],
)
def test_the_machine_needs_the_bases_platform_and_its_glibc_or_a_newer_one(
    places, monkeypatch, machine, glibc, problem
):
    monkeypatch.setattr(this_machine.platform, "machine", lambda: machine)
    monkeypatch.setattr(this_machine.platform, "libc_ver", lambda: ("glibc", glibc))
    found = places("own")[-1].problem()
    assert problem in found
    assert bool(found) == bool(problem)
