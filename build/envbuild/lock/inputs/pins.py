"""Pins: which components they name, the name of a lock that they make, and what the text after ``COMPONENT=`` means.

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
anything else                             a git ref (``main``, ``core_v0.19.0``, ``refs/pull/7/head``)
========================================  ==========================================================
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from envbuild.catalog.fields import NAME_PATTERN, Device
from envbuild.catalog.stack import Component, Stack
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.git.refs import GitRef

GIT_PREFIX = "git:"
VERSION_PREFIX = "version:"
_LIKE_A_NAME = re.compile(r"^[vV]|[-_]")
# The rules of git-check-ref-format(1).
_NO_REF_NAME = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^[/-]|[/.]$|(^|/)\.|\.lock(/|$)|^@$")
_EXPRESSION = re.compile(r"[~^:]|\.\.|@\{")
# https://HOST/OWNER/NAME@REF, git+ssh://git@HOST/NAME, git@HOST:OWNER/NAME
_ADDRESS = re.compile(
    r"(?:git\+)?(?P<url>(?:[a-z][a-z0-9+.-]*://(?:[^/@\s]*@)?|[\w.-]+@[\w.-]+:)[^@\s]+)(?:@(?P<ref>\S+))?",
    re.IGNORECASE,
)
# A user of http, and any password; the user of ssh is part of the address.
_SECRET = re.compile(r"^(https?://)[^/@]*@|^([a-z+]+://)[^/@:]*:[^/@]*@")
# What a browser shows of a repository: /pull/7/files, /tree/main, /commit/1234567.
_PAGE = re.compile(r"/(?:pull/(?P<pull>\d+)\b.*|(?:-/)?(?:tree|commits?)/(?P<ref>[^?#]*[^?#/])/?)$")
# How alike two names are that differ by a slip: nemo-tolkit and nemo-toolkit 0.96, megatron-core and -fsdp 0.69.
SLIP = 0.85
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
    ref = _classify(text)
    # A ref without a prefix is checked like one with it: what git does not allow as a name is refused before git runs.
    return _git(ref.name, text) if isinstance(ref, GitRef) else ref


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
    if match := _NO_REF_NAME.search(name):
        why = f"{match.group()!r} is not allowed in the name of a branch or tag."
        if _EXPRESSION.search(name):
            why += " Expressions that git computes ('main~3', 'a..b') are not supported: name the commit itself."
        elif "*" in name:
            why += f" To allow several versions, write: '=={name}'."
        raise _refused(text, why)
    return GitRef(name)


def _refused(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is not a version, specifier or git ref", why=why, fix=_FORMS)


def foreign_pins(stack: Stack, pins: Mapping[str, str]) -> dict[str, str]:
    """The pins that ask for something else than the stack's file, under the stack's names of the components.

    Next to such a pin, one that repeats the file counts too: what the pinned components declare would win over
    the file. Not the anchor's, since a pin of it sets another date.
    """
    every = stack.every_component()
    own = {name: spec.ref or spec.version.removeprefix("==") for name, spec in every.items()}
    named = {canonicalize_name(name) if canonicalize_name(name) in every else name: text for name, text in pins.items()}
    foreign = {name for name, text in named.items() if own.get(name) != text}
    return {name: text for name, text in named.items() if name in foreign or (foreign and name != stack.anchor)}


def variant_name(stack_name: str, stack: Stack, pins: Mapping[str, str], name: str | None) -> str:
    """The name under which a lock is kept: pins never overwrite the lock of the stack itself.

    A pin of the anchor alone names its variant (``nemo-v2.3.0``).

    Args:
        pins: see :func:`foreign_pins`.

    Raises:
        UsageError: other pins without ``--name``, or the name has characters that a folder of a lock may not have.
    """
    if name is not None:
        return checked_name(name)
    if not pins:
        return stack_name
    if list(pins) == [stack.anchor]:
        text = re.sub(r"[^a-z0-9._-]+", "-", next(iter(pins.values())).lower()).strip("-")
        return f"{stack_name}-{text}"
    raise UsageError(
        "pins need a name for the lock that they make",
        why=f"The lock of stack {stack_name} itself is not overwritten by {', '.join(pins)}.",
        fix="Add --name NAME (the lock goes to lockfiles/NAME/BASE) or --out DIR.",
    )


def checked_name(name: str) -> str:
    """The name of a lock, which is that of its folder.

    Raises:
        UsageError: it has characters that the folder may not have.
    """
    if re.match(NAME_PATTERN, name) is None:
        raise UsageError(
            f"--name {name!r} is not a valid name of a lock",
            why=f"It must match {NAME_PATTERN}.",
            fix="Use small letters, digits, dots, dashes and underscores.",
        )
    return name


def parse_pins(stack_name: str, stack: Stack, texts: Mapping[str, str], whole: Stack | None = None) -> dict[str, Ref]:
    """The pins of a command line, by component; other names may be packages that a component from git takes.

    Args:
        whole: the stack with what it has on other bases only, to say so of a pin.

    Raises:
        UsageError: a pin names no component of the stack, and none comes from git.
        ConfigurationError: a ref has no valid form, or names a commit of a component without a repository.
    """
    every = stack.every_component()
    pins: dict[str, Ref] = {}
    for raw, text in texts.items():
        name = canonicalize_name(raw)
        if name not in every:
            elsewhere = whole.every_component() if whole is not None else {}
            if name in elsewhere:
                raise _not_on_this_base(stack_name, name, elsewhere[name])
            # What a component from git takes from git itself: known once its commit is. A name like a component's is
            # most likely that one misspelt, and is not looked for first.
            if all(spec.git is None for spec in every.values()):
                raise unknown_pin(stack_name, raw, every)
            if _like_a_component(name, every) and not text.startswith(GIT_PREFIX):
                meant = f"If a component takes a package {name} from git, and that one is meant: --pin {name}=git:REF"
                raise unknown_pin(stack_name, raw, every, meant)
        if (address := _ADDRESS.fullmatch(text.strip())) is not None:
            raise _no_address(stack_name, name, address)
        pins[name] = parse_ref(text)
        if name in every and isinstance(pins[name], GitRef) and every[name].git is None:
            raise ConfigurationError(
                f"{raw}={text} names a branch, tag or commit, and {name} has no repository",
                why=f"[components.{name}] of stack {stack_name} has no key git.",
                fix=f"Add git = URL there, or pin a version: --pin {name}=VERSION",
            )
    return pins


def unknown_pin(stack_name: str, name: str, known: Iterable[str], fix: str = "") -> UsageError:
    """That there is nothing of this name to pin."""
    names = list(known)
    near = _near(canonicalize_name(name), names)
    meant = f"Did you mean {near!r}? " if near else ""
    return UsageError(
        f"stack {stack_name} has no component {name!r} to pin",
        why=f"{meant}Its components, and what those from git take from elsewhere: {', '.join(names)}.",
        fix=fix or "Pin one of these, or hold another package back under [requirements] of the stack.",
    )


def _near(name: str, known: Iterable[str]) -> str:
    """The component that a name may mean: nearly its name (``megatron-cor``), or a part of it (``nemo``)."""
    names = list(known)
    parts = [other for other in names if name in other.split("-")]
    return next(iter([*parts, *difflib.get_close_matches(name, names, n=1)]), "")


def _like_a_component(name: str, components: Iterable[str]) -> bool:
    """Whether a name differs from a component's by a slip of the finger, or is a part of it."""
    near = _near(name, components)
    # Not transformer-engine-torch, nor megatron-energon: those are other packages of the same family.
    slip = difflib.SequenceMatcher(None, name, near).ratio() >= SLIP and not name.startswith(f"{near}-")
    return bool(near) and (slip or name in near.split("-"))


def _no_address(stack_name: str, name: str, address: re.Match[str]) -> ConfigurationError:
    url, ref = _SECRET.sub(r"\1\2", address["url"]), address["ref"]
    if page := _PAGE.search(url):
        url, ref = url[: page.start()], page["ref"] or f"refs/pull/{page['pull']}/head"
    own = f"Of the component's own repository, write --pin {name}={ref}\n" if ref else ""
    return ConfigurationError(
        f"--pin {name}={url} names a repository, and a pin names a version, or a ref of {name}'s own",
        why="Which repository a component is from is said by the stack's file.",
        fix=f"{own}Of a fork, write a stack of a few lines, envs/stacks/NAME.toml, and lock it with --stack NAME:\n"
        f'extends = "{stack_name}"\n[components.{name}]\ngit = "{url}"\nref = "{ref or "REF"}"',
    )


def _not_on_this_base(stack_name: str, name: str, spec: Component) -> UsageError:
    with_or_without = "with" if spec.device is Device.CUDA else "without"
    return UsageError(
        f"stack {stack_name} has {name} on bases {with_or_without} CUDA only, so here is nothing to pin",
        why=f'[components.{name}] of the stack has device = "{spec.device.value if spec.device else ""}".',
        fix="Leave the pin out, or choose another base (`envbuild list stacks`, `envbuild list bases`).",
    )
