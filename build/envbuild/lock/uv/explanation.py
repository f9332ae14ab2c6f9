"""What uv's explanation says of packages: which it names, and of which the index has nothing that is asked for."""

from __future__ import annotations

import re

from packaging.utils import canonicalize_name

# uv's word for a contradiction; other failures are failures.
NO_SOLUTION = "No solution found"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NAME = r"([A-Za-z0-9][A-Za-z0-9._-]*?)"
# uv 0.13's words for a package of which the index has nothing that is asked for.
_NOTHING_THERE = (
    re.compile(rf"there are no versions of {NAME}(?:\[[^]]*\])?(?=[<>=!~ ,]|$)"),
    re.compile(rf"there is no version of {NAME}(?:\[[^]]*\])?(?=[<>=!~ ,]|$)"),
    re.compile(rf"only {NAME}(?:\[[^]]*\])?(?:[<>=!~][^ ]*)? is available"),
    re.compile(rf"only the following versions of {NAME} are available"),
    re.compile(rf"{NAME} was not found in the (?:package registry|provided package locations)"),
)

# `lib==2.0 requires Python >=3.12`, `lib==2.0 depends on Python>=3.12`
_PYTHON = re.compile(r"(?:depends? on|requires?) Python ?((?:[<>=!~]=?[0-9.*]*[0-9*],?)+)")
# with the following Python ABI tags: `cp311`, `cp312`
_TAGS = re.compile(r"with the following Python (?:ABI|implementation) tags?:((?:,? `\w+`)+)")


def needed_pythons(explanation: str) -> tuple[str, ...]:
    """The Pythons that packages need, one of these specifiers, where the base's is none; empty: that is not the cause.

    A package needs one that it states, or one that it has wheels for.
    """
    # uv breaks its explanation into lines.
    text = " ".join(explanation.split())
    if stated := dict.fromkeys(wanted.rstrip(",") for wanted in _PYTHON.findall(text)):
        return (",".join(stated),)
    tags = (tag for listed in _TAGS.findall(text) for tag in re.findall(r"`cp3(\d+)", listed))
    return tuple(f"==3.{minor}.*" for minor in dict.fromkeys(tags))


def names_in(explanation: str) -> list[str]:
    """Its words in the form of package names, as often as they are there."""
    return [canonicalize_name(word.rstrip(".-")) for word in _WORD.findall(explanation)]


def not_there(explanation: str) -> tuple[str, ...]:
    """The packages of which there is no version, or none that is asked for."""
    # uv breaks its explanation into lines.
    text = " ".join(explanation.split())
    names = (canonicalize_name(name) for pattern in _NOTHING_THERE for name in pattern.findall(text))
    return tuple(dict.fromkeys(names))
