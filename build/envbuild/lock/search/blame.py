"""Which packages a failed attempt is about: read from its findings, or from uv's explanation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from packaging.utils import canonicalize_name

from envbuild.core.errors import EnvbuildError, NetworkError, ResolutionError
from envbuild.lock.checks.findings import LockRefusedError
from envbuild.lock.search.clashes import Clash, clashes, in_plain_ranges
from envbuild.lock.search.state import Blame
from envbuild.lock.uv.explanation import NAME, NO_SOLUTION, names_in, not_there

# A package that uv must build for its metadata, and cannot; its hint says who asked for it, from the project on.
_NOT_BUILT = re.compile(rf"Failed to (?:download and )?build `{NAME}(?: @ |==)")
_INCLUDED = re.compile(r"was included because (.*?)(?:hint:|$)", re.DOTALL)
_ASKED_FOR = re.compile(rf"depends on `{NAME}(?=[`<>=!~\[ ])")
# NeMo of 2025-04-08 to 04-19 has f-strings of Python 3.12: `nemo.collections.llm ... does not import: SyntaxError: ...`
_SYNTAX = re.compile(r" does not import: (?:SyntaxError|IndentationError|TabError): ")
# Numbers of versions, lines and times differ between two failures of one cause.
_NUMBER = re.compile(r"\d+")

# The first reason of uv 0.13's explanation, which goes on for pages.
_BECAUSE = re.compile(r"Because (.{1,200}?)(?:,? we can conclude| and because|$)", re.IGNORECASE)
_BUILD_FAILED = re.compile(r"error: (Failed to [^`]{1,40}`[^`]{1,200}`)")


def blame_of(error: EnvbuildError, direct: Iterable[str]) -> Blame:
    """What a failure is about.

    Args:
        direct: the packages that the lock's project names itself: of a contradiction, only these can be moved.
    """
    if isinstance(error, LockRefusedError):
        packages = dict.fromkeys(name for finding in error.findings for name in finding.packages)
        missing = dict.fromkeys(finding.missing_module for finding in error.findings if finding.missing_module)
        text = "\n".join(sorted(f"{finding.code} {_NUMBER.sub('', finding.what)}" for finding in error.findings))
        of_syntax = all(_SYNTAX.search(finding.what) for finding in error.findings)
        return Blame(
            error=error,
            packages=tuple(packages),
            missing=tuple(missing),
            signature=text,
            of_syntax=of_syntax,
        )
    named = tuple(error.packages)
    excluding: tuple[Clash, ...] = ()
    unbuilt = ""
    if not named and isinstance(error, ResolutionError):
        text = error.explanation or error.why
        if NO_SOLUTION in text:
            named, excluding = contradicting(text, direct), clashes(text)
        elif (match := _NOT_BUILT.search(text)) is not None:
            unbuilt, named = canonicalize_name(match[1]), asking(text, direct)
    about = [unbuilt, *named, *(clash.kept.package for clash in excluding)]
    signature = " ".join([type(error).__name__, error.what, *filter(None, about)])
    return Blame(
        error=error,
        packages=named,
        clashes=excluding,
        unbuilt=unbuilt,
        signature=signature,
        of_source=isinstance(error, NetworkError),
    )


def asking(explanation: str, direct: Iterable[str]) -> tuple[str, ...]:
    """The packages that the project itself names, among those that led to one which uv cannot build: the last first."""
    match = _INCLUDED.search(" ".join(explanation.split()))
    names = [canonicalize_name(name) for name in _ASKED_FOR.findall(match[1])] if match is not None else []
    movable = set(direct)
    return tuple(dict.fromkeys(name for name in reversed(names) if name in movable))


def contradicting(explanation: str, direct: Iterable[str]) -> tuple[str, ...]:
    """The packages of uv's explanation of which nothing is there, then those that the project itself names."""
    movable = set(direct)
    often = [name for name, _ in Counter(names_in(explanation)).most_common()]
    # Of a package that another one asks for the index may have nothing as of the moment: its first release is tried.
    return tuple(dict.fromkeys([*not_there(explanation), *(name for name in often if name in movable)]))


def summary(error: EnvbuildError) -> str:
    """A failure in one line: what excludes each other, else the first thing that is wrong."""
    if isinstance(error, LockRefusedError):
        return error.findings[0].what.splitlines()[0]
    if isinstance(error, ResolutionError):
        if clash := next(iter(clashes(error.why)), None):
            kept, relaxed = clash.kept, clash.relaxed
            return (
                f"{error.what}: {relaxed.by} declares {relaxed.package}{relaxed.range}, {kept.by} "
                f"{kept.package}{kept.range}"
            )
        text = in_plain_ranges(" ".join(error.why.split()))
        # Of what is not built uv says, in a hint, because of what it was included.
        unbuilt = _BUILD_FAILED.search(text) if NO_SOLUTION not in text else None
        if match := unbuilt or _BECAUSE.search(text):
            return f"{error.what}: {match[1]}"
    return error.what
