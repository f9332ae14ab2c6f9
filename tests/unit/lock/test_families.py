"""One version of packages that are released together."""

import io
import tarfile
from types import SimpleNamespace

import pytest
from helpers.fake_index import fake_index
from helpers.locks import lock_context, resolved_package

from envbuild.catalog.stack import Component
from envbuild.core.errors import UsageError
from envbuild.lock.checks.releases import check_releases
from envbuild.lock.components.families import with_one_version
from envbuild.lock.components.models import Chosen, DecidedBy, Preference

CORE, TORCH = "transformer-engine", "transformer-engine-torch"
RELEASES = {
    CORE: ["0.0.0", "2.5.0", "2.6.0", "2.6.0.post1", "2.7.0", "2.8.0"],
    TORCH: ["0.0.1", "2.5.0", "2.6.0", "2.7.0"],
}
BASE = SimpleNamespace(provides={})


def component(name, specifier="", origin=DecidedBy.UPSTREAM):
    return Chosen(
        name=name, spec=Component(), asked=specifier or "any release", origin=origin, because="b", specifier=specifier
    )


def versions(tmp_path, core, torch, base=BASE, **preferences):
    chosen = {"lib": component("lib"), CORE: core, TORCH: torch}
    index = fake_index(base, lock_context(tmp_path), **RELEASES)
    preferred = {name.replace("_", "-"): Preference(version=text, because="p") for name, text in preferences.items()}
    actual = with_one_version(chosen, index, preferred)
    assert actual["lib"] == chosen["lib"]
    return actual[CORE], actual[TORCH]


@pytest.mark.parametrize(
    ("core", "torch", "version"),
    [
        # A release that one of them does not have is passed over.
        ("", "", "2.7.0"),
        ("==2.6.*", "==2.6.*", "2.6.0"),
        (">=2.5", "<2.7", "2.6.0"),
        ("==2.5.0", "", "2.5.0"),
        ("", "==2.5.0", "2.5.0"),
    ],
)
def test_newest_that_all_have(tmp_path, core, torch, version):
    actual = versions(tmp_path, component(CORE, core), component(TORCH, torch))
    assert [(part.wanted, part.because) for part in actual] == [(f"=={version}", "b")] * 2
    assert [part.specifier for part in actual] == [core, torch]


def test_pin_wins_over_upstream_from_either_side(tmp_path):
    pin, upstream = component(TORCH, "==2.6.0", DecidedBy.PIN), component(CORE, "==2.7.*")
    core, torch = versions(tmp_path, upstream, pin)
    assert (core.wanted, torch.wanted) == ("==2.6.0", "==2.6.0")
    assert core.because == f"one version with {TORCH} ==2.6.0 (b), instead of ==2.7.*"
    assert core.held_by == (TORCH,)


def test_pins_that_exclude_each_other_are_refused(tmp_path):
    with pytest.raises(UsageError, match=rf"{CORE}===2.5.0, {TORCH}===2.6.0 are pinned, and are released together"):
        versions(tmp_path, component(CORE, "==2.5.0", DecidedBy.PIN), component(TORCH, "==2.6.0", DecidedBy.PIN))


def test_upstreams_lock_decides_where_the_ranges_are_open(tmp_path):
    actual = versions(tmp_path, component(CORE), component(TORCH), transformer_engine="2.5.0")
    assert [part.version for part in actual] == ["2.5.0", "2.5.0"]


def test_what_is_not_there_is_left_to_the_resolution(tmp_path):
    core, torch = versions(tmp_path, component(CORE, "==2.9.*"), component(TORCH, "", DecidedBy.STACK))
    assert (core.wanted, torch.wanted) == ("==2.9.*", "==2.9.*")
    assert (core.version, torch.version) == ("", "")


def test_what_the_base_brings_is_no_member(tmp_path):
    base = SimpleNamespace(provides={CORE: "2.9"})
    core, torch = versions(tmp_path, component(CORE), component(TORCH), base)
    assert (core.version, torch.version) == ("", "")


def table(name, version, size=100_000):
    return resolved_package({"name": name, "version": version, "sdist": {"size": size}})


@pytest.mark.parametrize(
    ("backend", "wheels", "stub"),
    [
        ("wheel_stub.buildapi", [], True),
        ("setuptools.build_meta", [], False),
        ("", [], False),
        ("wheel_stub.buildapi", [{"url": "lib-1.0-py3-none-any.whl"}], False),
    ],
)
def test_sdist_that_downloads_its_wheel_from_another_index_is_refused(tmp_path, backend, wheels, stub):
    text = f'[build-system]\nrequires = []\nbuild-backend = "{backend}"\n' if backend else ""
    with tarfile.open(tmp_path / "lib.tar.gz", "w:gz") as tar:
        entry = tarfile.TarInfo("lib-1.0/pyproject.toml")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text.encode()))
    package = {"name": "lib", "version": "1.0", "wheels": wheels, "sdist": {"path": "lib.tar.gz", "size": 2179}}
    plan = SimpleNamespace(project=SimpleNamespace(chosen={}), keep={})
    resolution = SimpleNamespace(packages={"lib": resolved_package(package)}, yanked={})
    actual = check_releases(plan, resolution, SimpleNamespace(folder=tmp_path, store=None))
    assert [(finding.code, finding.packages) for finding in actual] == ([("placeholder", ("lib",))] if stub else [])


@pytest.mark.parametrize(
    ("tables", "yanked", "keep", "codes"),
    [
        ([table(CORE, "2.7.0"), table(f"{CORE}-cu12", "2.7.0"), table("lib", "0.0.3")], {}, {}, []),
        ([table(CORE, "2.7.0"), table(f"{CORE}-cu12", "2.6.0")], {}, {}, ["one-version"]),
        ([table(CORE, "0.0.0", 1097)], {}, {}, ["placeholder"]),
        ([table("lib", "1.0"), table("other", "1.0")], {"lib": "broken", "other": ""}, {}, ["yanked"]),
        ([table("lib", "1.0")], {"lib": "broken"}, {"lib": "1.0"}, []),
    ],
)
def test_releases_that_are_refused(tables, yanked, keep, codes):
    plan = SimpleNamespace(project=SimpleNamespace(chosen={"lib": None, CORE: None}), keep=keep)
    resolution = SimpleNamespace(packages={part.name: part for part in tables}, yanked=yanked)
    assert [finding.code for finding in check_releases(plan, resolution, None)] == codes
