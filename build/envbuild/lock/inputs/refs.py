"""What a user means by the text after ``--pin COMPONENT=``: a specifier, a version or a git ref.

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
from envbuild.git.refs import GitRef

GIT_PREFIX = "git:"
VERSION_PREFIX = "version:"
_LIKE_A_NAME = re.compile(r"^[vV]|[-_]")
# The rules of git-check-ref-format(1).
_NO_REF_NAME = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^[/-]|[/.]$|(^|/)\.|\.lock(/|$)|^@$")
_EXPRESSION = re.compile(r"[~^:]|\.\.|@\{")
_FORMS = (
    "Write a specifier ('>=2.7,<3', '==2.7.*'), a version ('2.7.3'), or a branch, tag or commit ('main', 'v2.3.0', at "
    "least 7 digits of a commit). 'version:' or 'git:' before it decides."
)


@dataclass(frozen=True)
class SpecifierRef:
    """Any release that a PEP 440 specifier allows."""

    specifier: str


@dataclass(frozen=True)
class VersionRef:
    """One release."""

    version: str

    @property
    def specifier(self) -> str:
        """The version as a specifier: ``==2.7.3``."""
        return f"=={self.version}"


Ref: TypeAlias = SpecifierRef | VersionRef | GitRef


def parse_ref(text: str) -> Ref:
    """Classify ``text`` by the table above.

    Raises:
        ConfigurationError: it has none of the forms.
    """
    text = text.strip()
    if text.startswith(GIT_PREFIX):
        return _git(text.removeprefix(GIT_PREFIX), text)
    if text.startswith(VERSION_PREFIX):
        version = text.removeprefix(VERSION_PREFIX)
        if not _is_version(version):
            raise _refused(text, f"{version!r} is not a PEP 440 version.")
        return VersionRef(version)
    found = _classify(text)
    # A ref without a prefix is checked like one with it: what git does not allow as a name is refused before git runs.
    return _git(found.name, text) if isinstance(found, GitRef) else found


def _classify(text: str) -> Ref:
    if text[:1] and text[0] in "<>=!~":
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise _refused(text, f"It begins like a version specifier, but is not valid: {error}") from error
        return SpecifierRef(text)
    if not GitRef(text).may_be_commit and _LIKE_A_NAME.search(text) is None and _is_version(text):
        return VersionRef(text)
    return GitRef(text)


def ref_text(ref: Ref) -> str:
    """The shortest text that :func:`parse_ref` turns into ``ref``."""
    match ref:
        case SpecifierRef(specifier=text):
            return text
        case VersionRef(version=text):
            prefix = VERSION_PREFIX
        case GitRef(name=text):
            prefix = GIT_PREFIX
    # A ref may begin like a specifier (`=x` is a valid branch name): then only the prefix keeps its meaning.
    try:
        return text if _classify(text) == ref else prefix + text
    except ConfigurationError:
        return prefix + text


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    # packaging's Version allows white space around a version; uv and git do not.
    return text == text.strip()


def _git(name: str, text: str) -> GitRef:
    if not name:
        raise _refused(text, "It is empty.")
    if found := _NO_REF_NAME.search(name):
        why = f"{found.group()!r} is not allowed in the name of a branch or tag."
        if _EXPRESSION.search(name):
            why += " Expressions that git computes ('main~3', 'a..b') are not supported: name the commit itself."
        elif "*" in name:
            why += f" To allow several versions, write: '=={name}'."
        raise _refused(text, why)
    return GitRef(name)


def _refused(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is not a version, specifier or git ref", why=why, fix=_FORMS)
