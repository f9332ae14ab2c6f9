"""What Dockerfiles and shell scripts of upstream's CI install: pins of releases, of git tags, and the NGC image.

They are read, not run. Values of ``ARG``, ``ENV``, ``export`` and plain assignments are put in. What a command gives,
what has two values, and every form that is not named here is left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.catalog import knowledge
from envbuild.catalog.base import Base
from envbuild.lock.components.project_metadata import readable
from envbuild.lock.components.upstream import GIT_URL, holds_on

NGC_IMAGE = re.compile(r"^nvcr\.io/nvidia/pytorch:(?P<release>\d\d\.\d\d)-py3$")

_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s"'#;&|]*)"""
_NAME = r"(?P<name>[A-Z_][A-Z0-9_]*)"
_PAIR = re.compile(rf"\s*{_NAME}={_VALUE}(?=[\s;&]|$)")
_KEYWORD = re.compile(r"\s*(?:export|ARG|ENV|local)\s+|\s*")
# What may follow: a command after one that a shell ran first. `NAME=VALUE COMMAND` sets nothing for the rest.
_END = re.compile(r"\s*(?:\\|&&.*|;.*)?$")
_OLD_ENV = re.compile(rf"^ENV\s+{_NAME}\s+{_VALUE}\s*$")
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?::?[-=](?P<default>[^}$`]*))?\}|(?P<bare>\w+))")
_FROM = re.compile(r"^FROM\s+(?:--\S+\s+)*(?P<image>\S+)", re.MULTILINE | re.IGNORECASE)
_COMMENT = re.compile(r"(^|\s)#.*$")
# A line of a shell array, and what follows `pip install`.
_ARRAY_LINE = re.compile(r"""^\s*("[^"]+"|'[^']+')\s*$""")
_INSTALL = re.compile(r"\bpip3?\s+(?:install|wheel)\s(?P<words>.*)$")
_WORD = re.compile(r""""[^"]*"|'[^']*'|\S+""")
_RELEASE_TAG = re.compile(r"^v?(?P<version>\d+(\.\d+)+(\.?(post|rc|a|b|dev)\d+)*)$")


@dataclass(frozen=True, kw_only=True)
class Installs:
    """What a file of upstream's installs.

    Attributes:
        releases: the version of each package, by canonical name.
        refs: the tag or commit of each package that is built from git.
        image: the NGC image that it begins from; empty where it names none.
    """

    releases: dict[str, str] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    image: str = ""


def read_installs(text: str, base: Base) -> Installs:
    """What a Dockerfile or a shell script installs on a base."""
    lines = [_COMMENT.sub("", line) for line in text.replace("\\\n", " ").splitlines()]
    values = _variables(lines)
    requirements = [
        (canonicalize_name(requirement.name), requirement) for requirement in _requirements(lines, values, base)
    ]
    built = knowledge.install_scripts().variables
    tags = [(built[name], value) for name, value in values.items() if name in built and value]
    tags += [
        (name, ref) for name, requirement in requirements if name in built.values() and (ref := _from_git(requirement))
    ]
    images = (_put_in(match["image"], values) for match in map(_FROM.match, lines) if match)
    return Installs(
        releases=_unambiguous(
            (name, version) for name, requirement in requirements if (version := _pinned(requirement))
        ),
        refs=_unambiguous(tags),
        image=next((image for image in images if image and NGC_IMAGE.match(image)), ""),
    )


def release_of(ref: str) -> str:
    """The release that a tag is of: ``2.2.0`` of ``v2.2.0``; empty for a commit or a branch."""
    match = _RELEASE_TAG.match(ref)
    return match["version"] if match else ""


def _unambiguous(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """By name, without names of which there are two different values."""
    values: dict[str, set[str]] = {}
    for name, value in pairs:
        values.setdefault(name, set()).add(value)
    return {name: min(several) for name, several in values.items() if len(several) == 1}


def _variables(lines: Iterable[str]) -> dict[str, str]:
    """The values of variables, as far as the text states them; empty where it does not, or where there are two."""
    values: dict[str, str] = {}
    for match in itertools.chain.from_iterable(map(_assignments, lines)):
        name = match["name"]
        value = _put_in(_unquoted(match["value"]), values, own=name) or ""
        values[name] = value if values.get(name, value) == value else ""
    return values


def _assignments(line: str) -> list[re.Match[str]]:
    """What a line sets: ``NAME=VALUE``, several of them, or Docker's old ``ENV NAME VALUE``."""
    if match := _OLD_ENV.match(line):
        return [match]
    keyword = _KEYWORD.match(line)
    end = keyword.end() if keyword else 0
    listed = []
    while match := _PAIR.match(line, end):
        listed.append(match)
        end = match.end()
    return listed if _END.match(line, end) else []


def _put_in(text: str, values: dict[str, str], *, own: str = "") -> str | None:
    """A text with the values of its variables in it; None: it has one that is not known, or a command."""
    known = True

    def value(match: re.Match[str]) -> str:
        nonlocal known
        name = match["braced"] or match["bare"]
        # NAME=${NAME:-default}: whoever calls may set it, and the default is what upstream's CI takes.
        stated = match["default"] if name == own else values.get(name) or match["default"]
        known = known and bool(stated)
        return stated or ""

    done = _VARIABLE.sub(value, text)
    return done if known and "$" not in done and "`" not in done else None


def _requirements(lines: Iterable[str], values: dict[str, str], base: Base) -> Iterator[Requirement]:
    for line in lines:
        if array := _ARRAY_LINE.match(line):
            words = [array[1]]
        elif install := _INSTALL.search(line):
            words = _WORD.findall(install["words"])
        else:
            continue
        texts = (text for word in words if (text := _put_in(_unquoted(word), values)))
        requirements = readable(map(_named, texts))
        yield from (requirement for requirement in requirements if holds_on(str(requirement.marker or ""), base))


def _named(word: str) -> str:
    """A word of ``pip install``; a bare address with the name of what it is of."""
    match = GIT_URL.match(word)
    end = match["url"].rstrip("/").removesuffix(".git").rpartition("/")[2].lower() if match else ""
    name = knowledge.install_scripts().addresses.get(end)
    return f"{name} @ {word}" if name else word


def _from_git(requirement: Requirement) -> str:
    """The tag or commit of ``nemo_run@git+https://github.com/NVIDIA/NeMo-Run.git@f07f446``; empty: it has none."""
    match = GIT_URL.match(requirement.url or "")
    return match["ref"] if match is not None else ""


def _unquoted(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] in "\"'" and word[-1] == word[0] else word


def _pinned(requirement: Requirement) -> str:
    specifiers = list(requirement.specifier)
    if len(specifiers) != 1 or specifiers[0].operator != "==" or "*" in specifiers[0].version:
        return ""
    return specifiers[0].version
