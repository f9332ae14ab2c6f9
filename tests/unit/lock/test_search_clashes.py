"""Declared ranges that exclude each other: texts of uv 0.13.8."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.core.errors import ResolutionError
from envbuild.lock.search.blame import blame_of
from envbuild.lock.search.candidates import Candidates
from envbuild.lock.search.clashes import Clash, Declaration, clashes

# Megatron-LM 7f7439f and lightning, which NeMo's main of 2025-08-08 pins below 2.4.1.
PACKAGING = """\
error: No solution found when resolving dependencies for split (markers: sys_platform == 'linux')
  cause: Because only megatron-core==0.14.0rc4 is available and megatron-core==0.14.0rc4 depends on packaging>=25.0, we
         can conclude that all versions of megatron-core depend on packaging>=25.0. (1)

         Because all of:
             lightning>=2.2.2,<=2.2.5
             lightning>=2.3.0.dev20240324,<=2.4.0
         depend on packaging>=20.0,<25.0 and lightning==2.3.0.dev20240318 depends on packaging>=20.0,<=23.1, we can
         conclude that lightning>=2.2.2,<=2.4.0 depends on packaging>=20.0,<25.0.
         And because nemo-toolkit[llm]==2.5.0rc1 depends on lightning>2.2.1,<=2.4.0, we can conclude that
         nemo-toolkit[llm]==2.5.0rc1 depends on packaging>=20.0,<25.0.
         And because we know from (1) that all versions of megatron-core depend on packaging>=25.0, we can conclude that
         all versions of megatron-core and nemo-toolkit[llm]==2.5.0rc1 are incompatible.
"""


def test_both_declarations_are_found_and_no_conclusion() -> None:
    actual = clashes(PACKAGING)
    assert {(entry.relaxed.by, entry.kept.by) for entry in actual} == {
        ("lightning", "megatron-core"),
        ("megatron-core", "lightning"),
    }
    kept = Declaration(by="megatron-core", package="packaging", range=">=25.0")
    assert actual[0] == Clash(kept=kept, relaxed=Declaration(by="lightning", package="packaging", range=">=20.0,<25.0"))


@pytest.mark.parametrize(
    ("text", "relaxed"),
    [
        ("Because a==1 depends on x<2 and b==1 depends on x>=2, we can conclude that", ["a", "b"]),
        ("Because a==1 depends on x<2 and b depends on x>=1.5, we can conclude that", []),
        ("Because a==1 depends on x==2.* and b[c]>=1 depends on x[y]<2, we can conclude that", ["a", "b"]),
        ("Because a==1 depends on x>2 and b==1 depends on x<=2, we can conclude that", ["b", "a"]),
        ("Because a==1 depends on x>2 and b==1 depends on x<3, we can conclude that", []),
        # One premise says two things of a package; another one follows it.
        ("Because a==1 depends on x<2 and b==1 depends on y[z] and x>=2, we can conclude that", ["a", "b"]),
        ("Because a==1 depends on x<2 and x==3 depends on y, we can conclude that b depends on x>=2", []),
        # What a dev release declares comes after what others do.
        (
            "Because a==1.dev3 depends on x<1 and a==1 depends on x<2 and b==1 depends on x>=2, we can",
            ["a", "a", "b", "b"],
        ),
        # One package, of which no version fits: its own versions do not contradict each other.
        ("Because a==1 depends on x<2 and a==2 depends on x>=2, we can conclude that", []),
        ("Because a==1 depends on b==1, we can conclude that c depends on b==2.", []),
        ("And because we know from (1) that c depends on x<1 and b==1 depends on x>=2, we can conclude that d", []),
    ],
)
def test_ranges_that_exclude_each_other(text: str, relaxed: list[str]) -> None:
    assert [entry.relaxed.by for entry in clashes(text)] == relaxed


def test_one_range_holds_in_the_place_of_the_other() -> None:
    blame = blame_of(ResolutionError("cannot resolve", why=PACKAGING), ("megatron-core", "nemo-toolkit"))
    assert (blame.clashes, "packaging" in blame.signature) == (clashes(PACKAGING), True)
    unused: Any = None
    decided: Any = SimpleNamespace(chosen={"megatron-core": None})
    ((move,),) = Candidates(unused, decided, "w", unused).relaxed(blame.clashes[0])
    assert (move.package, move.specifier, move.declared_by) == ("packaging", ">=25.0", "lightning")
    assert move.text() == (
        "packaging >=25.0 instead of >=20.0,<25.0, which lightning declares: megatron-core needs it, and no release is "
        "in both ranges"
    )
    # Which release of a component is taken is decided by its own candidates.
    decided.chosen = {"packaging": SimpleNamespace()}
    assert [*Candidates(unused, decided, "w", unused).relaxed(blame.clashes[0])] == []


def test_bounds_that_let_pre_releases_in_are_those_of_uv_and_not_of_the_packages() -> None:
    text = "Because a==1 depends on x>=2.7.dev0,<2.8.dev0 and b==1 depends on x>=3.dev0,<5.dev0, we can conclude that"
    assert [entry.relaxed.range for entry in clashes(text)] == ["==2.7.*", ">=3,<5"]
    declared = "Because a==1 depends on x>=2.dev3,<2.8 and b==1 depends on x>=3.0.dev0, we can conclude that"
    assert {entry.relaxed.range for entry in clashes(declared)} == {">=2.dev3,<2.8", ">=3.0.dev0"}
    dev = "Because a==1.dev3 depends on x<1 and a==1 depends on x<2 and b==1 depends on x>=2, we can conclude that"
    assert clashes(dev)[0].relaxed.range == "<2"
