"""What a user may write after ``--pin COMPONENT=``: a specifier, a version or a git ref.

The text decides, never a look at a server, so that the same text means the same thing everywhere:

========================================  ==========================================================
text                                      is
========================================  ==========================================================
``git:REF``                               a git ref, whatever REF looks like
``version:V``                             a version, whatever V looks like
begins with ``< > = ! ~``                 a PEP 440 specifier
7 to 40 hex digits without a dot          a commit (``1234567``, ``123c456``), though PEP 440 may know it
a PEP 440 version that begins with ``v``  a git ref: upstream's tags look so (``v2.3.0``), versions on an index do not
a PEP 440 version with ``-`` or ``_``     a git ref: so do branches (``25.04-alpha``; the version is ``25.4a0``)
any other PEP 440 version                 a version (``2.7.3``, ``2.3``, ``2024``)
anything else                             a git ref (``main``, ``core_v0.19.0``, ``refs/heads/2.3``)
========================================  ==========================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from envbuild.core.errors import ConfigurationError

GIT_PREFIX = "git:"
VERSION_PREFIX = "version:"
# git refuses shorter ones on large repositories, and words such as `add` or `face` are hex too.
SHORTEST_COMMIT_DIGITS = 7
COMMIT_DIGITS = 40
_COMMIT = re.compile(rf"[0-9a-f]{{{SHORTEST_COMMIT_DIGITS},{COMMIT_DIGITS}}}", re.IGNORECASE)
_LIKE_A_NAME = re.compile(r"^[vV]|[-_]")
# The rules of git-check-ref-format(1).
_NO_REF_NAME = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^[/-]|[/.]$|(^|/)\.|\.lock(/|$)|^@$")
_EXPRESSION = re.compile(r"[~^:]|\.\.|@\{")
_FORMS = (
    "Write a specifier ('>=2.7,<3', '==2.7.*'), a version ('2.7.3'), or a branch, tag or commit ('main', 'v2.3.0', at "
    "least 7 digits of a commit). 'version:' or 'git:' before it settles what it is."
)


@dataclass(frozen=True)
class SpecifierRef:
    """Any release that a PEP 440 specifier allows."""

    specifier: str

    def __str__(self) -> str:
        return self.specifier


@dataclass(frozen=True)
class VersionRef:
    """One release."""

    version: str

    @property
    def specifier(self) -> str:
        """The version as a specifier: ``==2.7.3``."""
        return f"=={self.version}"

    def __str__(self) -> str:
        return _shortest(self, self.version, VERSION_PREFIX)


@dataclass(frozen=True)
class GitRef:
    """A branch, a tag, or a commit (all 40 hex digits, or at least 7), as the user wrote it.

    ``refs/heads/NAME`` and ``refs/tags/NAME`` say which of the two NAME is.
    """

    name: str

    @property
    def is_full_commit(self) -> bool:
        """Whether the name is all 40 digits of a commit."""
        return self.may_be_commit and len(self.name) == COMMIT_DIGITS

    @property
    def may_be_commit(self) -> bool:
        """Whether the name could be a commit, whole or short."""
        return _COMMIT.fullmatch(self.name) is not None

    def __str__(self) -> str:
        return _shortest(self, self.name, GIT_PREFIX)


Ref: TypeAlias = SpecifierRef | VersionRef | GitRef


def parse_ref(text: str) -> Ref:
    """Tell what ``text`` is, by the table above. ``str()`` of the result is text that gives the same result again.

    Raises:
        ConfigurationError: it is none of the forms.
    """
    text = text.strip()
    if text.startswith(GIT_PREFIX):
        return _git(text.removeprefix(GIT_PREFIX), text)
    if text.startswith(VERSION_PREFIX):
        version = text.removeprefix(VERSION_PREFIX)
        if not _is_version(version):
            raise _refused(text, f"{version!r} is no PEP 440 version.")
        return VersionRef(version)
    found = _classify(text)
    return _git(found.name, text) if isinstance(found, GitRef) else found


def _classify(text: str) -> Ref:
    if text[:1] and text[0] in "<>=!~":
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise _refused(text, f"It begins like a version specifier and is none: {error}") from error
        return SpecifierRef(text)
    if _COMMIT.fullmatch(text) is None and _LIKE_A_NAME.search(text) is None and _is_version(text):
        return VersionRef(text)
    return GitRef(text)


def _shortest(ref: Ref, text: str, prefix: str) -> str:
    """``text`` if it is ``ref`` without the prefix too."""
    try:
        return text if _classify(text) == ref else prefix + text
    except ConfigurationError:
        return prefix + text


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return text == text.strip()


def _git(name: str, text: str) -> GitRef:
    if not name:
        raise _refused(text, "It is empty.")
    if found := _NO_REF_NAME.search(name):
        why = f"{found.group()!r} cannot be there in the name of a branch or tag."
        if _EXPRESSION.search(name):
            why += " Expressions that git computes ('main~3', 'a..b') are not taken: name the commit itself."
        elif "*" in name:
            why += f" If any of several versions was meant: '=={name}'."
        raise _refused(text, why)
    return GitRef(name)


def _refused(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is no version, specifier or git ref", why=why, fix=_FORMS)
