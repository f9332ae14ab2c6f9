"""Declared ranges that exclude each other, read from uv's explanation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_CLAUSE = r"[<>=!~]=?[A-Za-z0-9.*+!-]*[A-Za-z0-9*]"
_RANGE = rf"{_CLAUSE}(?:,{_CLAUSE})*"
# `lightning>=2.2.2,<=2.4.0 depends on packaging>=20.0,<25.0`
_DECLARED = re.compile(
    rf"(?P<by>{_NAME})(?:\[[^]]*\])?(?P<which>{_RANGE})? "
    rf"depends? on (?P<package>{_NAME})(?:\[[^]]*\])?(?P<range>{_RANGE})"
)
# `bridge==0.7.0 depends on core[mlm] and transformers>=5.8,<=5.12.1, we can conclude`; a second premise goes on with
# what it depends on.
_DECLARED_TOO = re.compile(
    rf"(?P<by>{_NAME})(?:\[[^]]*\])?(?P<which>{_RANGE})? "
    rf"depends? on {_NAME}(?:\[[^]]*\])?(?:{_RANGE})? "
    rf"and (?P<package>{_NAME})(?:\[[^]]*\])?(?P<range>{_RANGE})(?=,? *$|, )"
)
# What uv concludes is declared by none: up to the next premise.
_CONCLUSION = re.compile(
    r"we can conclude that .*?(?=Because |because |$)|we know from \(\d+\) that .*?(?= and |, we can conclude|$)"
)
# uv prints ==2.7.* as >=2.7.dev0,<2.8.dev0, and <3 as <3.dev0.
_LINE = re.compile(r">=(?P<low>\d+(?:\.\d+)*)\.dev0, ?<(?P<high>\d+(?:\.\d+)*)\.dev0")
_BELOW = re.compile(r"(<\d+(?:\.\d+)*)\.dev0(?![0-9.])")
_UPPER_BOUNDS = ("<", "<=", "==", "~=")


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A range that one package declares of another."""

    by: str
    package: str
    range: str

    @property
    def has_upper_bound(self) -> bool:
        return any(clause.operator in _UPPER_BOUNDS for clause in SpecifierSet(self.range))


@dataclass(frozen=True, kw_only=True)
class Clash:
    """Two declarations for one package, of which no version is in both.

    Attributes:
        relaxed: the one that can give way: it says which later versions its authors had not seen.
    """

    kept: Declaration
    relaxed: Declaration


# In NeMo's main of August 2025 lightning wants packaging<25.0 and Megatron-LM >=25.0: upstream installs them in turn.
def clashes(explanation: str) -> tuple[Clash, ...]:
    """The declarations in uv's explanation that exclude each other, those with an upper bound to be relaxed first."""
    listed = []
    for first, second in itertools.combinations(dict.fromkeys(_declarations(explanation)), 2):
        if first.package == second.package and first.by != second.by and not _overlap(first.range, second.range):
            listed += [Clash(kept=second, relaxed=first), Clash(kept=first, relaxed=second)]
    return tuple(sorted(listed, key=lambda clash: (not clash.relaxed.has_upper_bound, clash.kept.has_upper_bound)))


def _declarations(explanation: str) -> Iterator[Declaration]:
    text = in_plain_ranges(_CONCLUSION.sub("", " ".join(explanation.split())))
    listed: list[tuple[Declaration, bool]] = []
    for match in itertools.chain(_DECLARED.finditer(text), _DECLARED_TOO.finditer(text)):
        by, package = canonicalize_name(match["by"]), canonicalize_name(match["package"])
        try:
            SpecifierSet(match["range"])
        except InvalidSpecifier:
            continue
        of_dev_release = re.fullmatch(r"==[^,]*\.dev\d+", match["which"] or "") is not None
        listed.append((Declaration(by=by, package=package, range=match["range"]), of_dev_release))
    # What a single dev release declares tells little of the package: lightning 2.3.0.dev20240318 of lightning<=2.4.0.
    yield from (declaration for declaration, _ in sorted(listed, key=lambda pair: pair[1]))


def in_plain_ranges(explanation: str) -> str:
    """An explanation with ranges as packages declare them, and not with bounds of uv, which let pre-releases in."""
    return _BELOW.sub(r"\1", _LINE.sub(_as_line, explanation))


def _as_line(match: re.Match[str]) -> str:
    *parts, last = match["low"].split(".")
    following = ".".join([*parts, str(int(last) + 1)])
    return f"=={match['low']}.*" if match["high"] == following else f">={match['low']},<{match['high']}"


def _overlap(one: str, other: str) -> bool:
    """Whether a version is in both ranges: tried at each bound and just above it."""
    both = SpecifierSet(f"{one},{other}")
    bounds = ["0", *(clause.version.removesuffix(".*") for clause in both)]
    above = [f"{Version(bound).base_version}.0.0.1" for bound in bounds]
    return any(both.contains(version, prereleases=True) for version in (*bounds, *above))
