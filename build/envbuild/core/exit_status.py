"""Describes programs and their exit statuses, without the credentials that may be in them."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path

from envbuild.core.files import space_is_low

TAIL_LINES, INNERMOST_LINES = 30, 6
# RFC 3986, 3.2: user information is what stands before the @ of an authority, which ends at the first slash.
_CREDENTIALS = re.compile(r"://[^/@\s'\"]+@")

# Two slashes and a host are of an address. file:///x has no host.
_ABSOLUTE_PATH = re.compile(r"""(?<![\w/.])(?!//[^/])(/[^\s`'":,()]+)""")

# The last line of a traceback, and what is printed of a compiler or another child that was killed. By number: input or
# output error, too little of memory, threads, files or disk, a time-out, a stale file handle, a quota (errno(3)).
_SHORTAGE = re.compile(
    r"^[ \t]*(?:"
    r"(?:\w+\.)*\w*(?:MemoryError|Timeout|TimeoutError|TimeoutExpired)(?::.*)?"
    r"|(?:\w+\.)*\w*Error: (?:\[Errno (?:5|11|12|23|24|28|110|116|122)\].*|can't start new thread.*|.*\btimed out\b.*)"
    r")$"
    r"|^.*(?:\(signal: 9 \(SIGKILL\)\)|died with <Signals\.SIGKILL: 9>|\bKilled signal terminated program|"
    r"\binternal compiler error: Killed|: [Cc]annot allocate memory$|virtual memory exhausted|std::bad_alloc|"
    r":\s+Resource temporarily unavailable$|: failed to map segment from shared object$).*$",
    re.MULTILINE,
)


def mask(text: str) -> str:
    """``text`` without the user names and passwords of the URLs in it."""
    return _CREDENTIALS.sub("://***@", text)


def describe_status(status: int) -> str:
    """An exit status for people: ``exited with status 2``, ``was ended by SIGKILL``."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    # The kernel ends programs with SIGKILL when memory runs out, and tells them nothing.
    hint = " (often: the machine ran out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def tail(text: str, lines: int = TAIL_LINES) -> str:
    """The last lines of a program's output."""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def shortage(output: str) -> str:
    """The line by which a program that failed shows that it had too little memory, time, threads or files; or empty."""
    line = _SHORTAGE.search(output)
    return line[0].strip() if line else ""


def innermost_calls(output: str) -> str:
    """The top of the last stack that faulthandler wrote down; the last lines where there is none."""
    # The heading that faulthandler writes over each stack; the last one is of the thread that failed.
    _, heading, stack = output.rpartition("most recent call first):\n")
    return "\n".join(stack.splitlines()[:INNERMOST_LINES]) if heading else tail(output, lines=INNERMOST_LINES)


def ran_out_of_space(output: str, path: Path) -> bool:
    """Whether a program failed for a full disk: it printed so (and may have cleaned up since), or little is left."""
    return os.strerror(errno.ENOSPC) in output or space_is_low(path)


def full_disk(output: str, path: Path) -> Path:
    """The place on the disk that is full: what a program printed that it could not write, else ``path``.

    A program also writes elsewhere than where it works: uv into its cache, compilers into TMPDIR.
    """
    if space_is_low(path):
        return path
    for line in output.splitlines():
        if os.strerror(errno.ENOSPC) not in line:
            continue
        for named in map(Path, _ABSOLUTE_PATH.findall(line)):
            # Inside of a sandbox paths have another meaning: then nothing is full there.
            place = next(folder for folder in (named, *named.parents) if folder.exists())
            if space_is_low(place):
                return place
    return path
