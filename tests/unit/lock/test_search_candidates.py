"""What is tried in the place of a release that is not there."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.locks import resolved_package

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.stack import Component
from envbuild.lock.components.declarations import Declared
from envbuild.lock.components.models import Chosen, DecidedBy
from envbuild.lock.inputs.deviation import texts
from envbuild.lock.models import Deviation
from envbuild.lock.search import candidates as module
from envbuild.lock.search.candidates import Candidates
from envbuild.lock.search.state import moved
from envbuild.lock.uv_lock import ResolvedPackage

RELEASES = ("0.0.0", "1.9.0", "1.10.0", "1.11.0", "2.0.0")
TE = "transformer-engine"


class Index(Candidates):
    """Candidates of an index that has these releases."""

    def _release(
        self, package: str, specifier: str, *, lowest: bool = False, dated: bool = True
    ) -> ResolvedPackage | None:
        from packaging.specifiers import SpecifierSet

        actual = [*SpecifierSet(f"{specifier},>=0.1".lstrip(",")).filter(RELEASES)]
        return resolved_package({"name": package, "version": actual[0 if lowest else -1]}) if actual else None

    def _asks_for_it(self, release: ResolvedPackage) -> bool:
        return bool(self.without) and release.version != "2.0.0"


def candidates(specifier: str, locked: str | None, *, without: str = "") -> Index:
    component = Chosen(
        name=TE, spec=Component(), asked=specifier, origin=DecidedBy.UPSTREAM, because="", specifier=specifier
    )
    failure: Any = SimpleNamespace(
        decided=SimpleNamespace(chosen={TE: component}, git_sources=SimpleNamespace(missing=(), in_force={})),
        resolved=SimpleNamespace(resolution=SimpleNamespace(pins={TE: locked} if locked else {}, packages={}))
        if locked
        else None,
    )
    context: Any = None
    failure.decided.effective = SimpleNamespace(leads=())
    return Index(failure, failure.decided, "it fails", context, without=without)


@pytest.mark.parametrize(
    ("specifier", "locked", "tried"),
    [
        # What upstream pins was never released, and only a placeholder is below it.
        ("<1.9", "0.0.0", ["==1.9.*", "==1.10.*", "==1.11.*"]),
        ("<1.9", None, ["==1.9.*", "==1.10.*", "==1.11.*"]),
        ("==1.10.*", None, ["==1.11.*", "==2.0.*", "==1.9.*"]),
        ("==1.12.*", None, ["==2.0.*", "==1.11.*", "==1.10.*", "==1.9.*"]),
        # It is there, and fails.
        ("==2.0.*", "2.0.0", ["==1.11.*", "==1.10.*", "==1.9.*"]),
        ("==1.10.0", "1.10.0", ["==1.11.*", "==2.0.*", "==1.9.*"]),
        (">=1.9", "2.0.0", []),
    ],
)
def test_the_nearest_releases(specifier: str, locked: str | None, tried: list[str]) -> None:
    moves = [*candidates(specifier, locked).likely(TE)]
    assert [[part.specifier for part in move] for move in moves] == [[text] for text in tried]


@pytest.mark.parametrize(
    ("version", "tried"),
    [
        ("0.5.0", ["==0.5.*", ""]),
        # Its build takes the version from a tag, and the tree has none.
        ("0.0.0", [""]),
        # It failed before uv knew its version.
        (None, [""]),
    ],
)
def test_a_commit_that_does_not_build_is_replaced_by_a_release(version: str | None, tried: list[str]) -> None:
    actual = candidates("", "2.0.0")
    failure: Any = actual.failure
    failure.decided.git_sources.in_force["resiliency"] = SimpleNamespace(
        chosen=SimpleNamespace(asked="v0.5.0", git="https://x/resiliency")
    )
    if version is not None:
        failure.resolved.resolution.pins["resiliency"] = version
    moves = [part for move in actual.likely("resiliency") for part in move]
    assert [part.specifier for part in moves] == tried
    assert {part.instead_of for part in moves} == {"v0.5.0 of https://x/resiliency"}


@pytest.mark.parametrize(
    ("base_cuda", "extras", "wanted"),
    [
        ("12", ["cu13"], [("numba-cuda", "nemo", ">=0.20")]),
        ("12", ["cuda-13x"], [("numba-cuda", "nemo", ">=0.20")]),
        ("13", ["cu13"], []),
        ("12", ["dev"], []),
        (None, ["cu13"], []),
    ],
)
def test_an_extra_for_another_cuda_is_left_out(
    monkeypatch: pytest.MonkeyPatch, base_cuda: str | None, extras: list[str], wanted: list[tuple[str, str, str]]
) -> None:
    """As NeMo 2.6.0 declares it."""
    actual = candidates("==2.0.*", "2.0.0")
    failure: Any = actual.failure
    failure.inputs = SimpleNamespace(selection=SimpleNamespace(base=SimpleNamespace(cuda_major=base_cuda)))
    edges = [{"name": "numba-cuda", "extra": extras}, {"name": "other"}]
    nemo = resolved_package({"name": "nemo", "version": "2.6.0", "dependencies": edges})
    failure.resolved.resolution.packages["nemo"] = nemo
    monkeypatch.setattr(Index, "_declared", lambda *_: ">=0.20")
    moves = [part for move in actual.without_extra("numba-cuda") for part in move]
    assert [(part.package, part.declared_by, part.specifier) for part in moves] == wanted
    if moves:
        assert moves[0].text().startswith(f"numba-cuda >=0.20 instead of numba-cuda[{extras[0]}]>=0.20, which nemo")
    assert not [*actual.without_extra("other")]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (("numba-cuda[cu13]<1,>=0.20", "other>=9"), "<1,>=0.20"),
        (("numba-cuda[cu13]==0.15.1; extra == 'cu13'", "other"), "==0.15.1"),
        (("other>=9",), ""),
        (None, ""),
    ],
)
def test_the_range_that_a_release_declares_stays_where_its_extra_is_left_out(
    monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...] | None, wanted: str
) -> None:
    actual = candidates("==2.0.*", "2.0.0")
    failure: Any = actual.failure
    failure.inputs = SimpleNamespace(selection=SimpleNamespace(base=Catalog.open(data_root()).base("debian12-cu130")))
    declared = Declared(by="nemo 2.6.0", lines=lines, extras=("cu13",)) if lines is not None else None
    monkeypatch.setattr(module, "declared_by_release", lambda *_: declared)
    assert actual._declared({"name": "nemo"}, "numba-cuda") == wanted


@pytest.mark.parametrize("package", [TE, f"{TE}-torch", f"{TE}-cu12"])
def test_a_family_moves_together(package: str) -> None:
    actual = candidates("==2.0.*", "2.0.0")
    chosen = actual.failure.decided.chosen  # type: ignore[union-attr]
    chosen[f"{TE}-torch"] = replace(chosen[TE], name=f"{TE}-torch")  # type: ignore[index]
    # A core is no component: an extra of another one asks for it.
    actual.failure.resolved.resolution.pins[f"{TE}-cu12"] = "2.0.0"  # type: ignore[union-attr, index]
    moves = [*actual.likely(package), *actual.earlier(package)]
    assert [part.specifier for part in moves[0]] == ["==1.11.*", "==1.11.*"]
    assert {tuple(sorted(part.package for part in move)) for move in moves} == {(TE, f"{TE}-torch")}
    until = actual._until(TE, "the newest release", datetime(2025, 3, 2, tzinfo=timezone.utc), "why")
    assert [part.package for part in until] == [TE, f"{TE}-cu12", f"{TE}-torch"]


def test_what_a_release_is_taken_in_the_place_of() -> None:
    actual = candidates("==2.0.*", "2.0.0")
    actual.failure.resolved.resolution.pins["nvrx"] = "2.0.0"  # type: ignore[union-attr, index]
    ((first,), *_) = actual.earlier("nvrx")
    assert first.text().startswith("nvrx ==1.11.* instead of the newest release: it fails with 2.0.0")
    # As Megatron-Bridge takes nvidia-resiliency-ext, whose build needs a CUDA toolkit.
    source: Any = SimpleNamespace(chosen=SimpleNamespace(asked="c0ffee", git="https://x/nvrx.git"))
    actual.failure.decided.git_sources.in_force["nvrx"] = source  # type: ignore[union-attr]
    ((first,), *_) = actual.earlier("nvrx")
    assert first.text().startswith("nvrx ==1.11.* instead of c0ffee of https://x/nvrx.git: it fails with 2.0.0")


def test_releases_that_ask_for_what_cannot_be_built_are_passed_over() -> None:
    moves = [*candidates("<1.9", None, without="flash-attn").likely(TE)]
    assert [(part.specifier, part.reason) for move in moves for part in move] == [
        ("==2.0.*", "the index has no release <1.9; the nearest later one")
    ]


def test_what_is_taken_the_second_time_is_in_the_place_of_what_upstream_says() -> None:
    def deviation(name: str, instead_of: str, by: str = "") -> Deviation:
        return Deviation(package=name, instead_of=instead_of, specifier=f"!={instead_of}", declared_by=by, reason="w")

    taken = moved((), (deviation(TE, "c0ffee"), deviation("te-torch", "c0ffee"), deviation("x", "<2", "one")))
    taken = moved(moved(taken, (deviation("x", "<3", "other"),)), (deviation(TE, "==1.9.*"),))
    assert texts(taken) == (
        f"{TE} !===1.9.* instead of c0ffee: w",
        "te-torch !=c0ffee instead of c0ffee: w",
        "x !=<2 instead of <2: w",
        "x !=<3 instead of <3: w",
    )
    family = (deviation(TE, "c0ffee"), deviation("te-torch", "c0ffee"))
    assert texts(moved((), family)) == (f"{TE}, te-torch !=c0ffee instead of c0ffee: w",)
