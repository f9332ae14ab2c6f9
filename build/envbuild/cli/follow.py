"""One process asks for many: of those on a machine that run the same pull at once, the others take its answer.

A job runs the same pull in every rank. Each would read the configuration, ask the registry and verify a signature, and
64 of them would keep the machine busy for longer than the download takes. An answer counts for a process that began
before its question was asked, so that nobody gets an older answer than their own would be; the rest wait, and ask.

Next to nothing is imported here, not even pathlib: a process that follows needs 0.05 s, and one that has read the
command line with click twice that. So the question is the command line as it is, but for where the answer goes.
"""

# ruff: noqa: PTH100, PTH102, PTH115, PTH116

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from envbuild import __version__
from envbuild.cli.output import put

# Variables that may decide an answer: where the configuration, keys and credentials are, and how hosts are reached.
VARIABLES = (
    *("ENVBUILD_", "XDG_", "AWS_", "GOOGLE_", "DOCKER_", "REGISTRY_", "SSL_", "PIP_", "UV_", "HOME", "PATH", "TMPDIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
# What is next to an --output: its certificate.
CERTIFICATE_SUFFIX = ".intoto.jsonl"
# With these the command does something else, or for one process alone.
_OWN, _OWN_OPTION = ("-h", "--help", "--"), "--format"
# What the command of this process leaves for the others.
_left: dict[str, object] = {}
# What the process before has copied to where: the source, and what tells that the copy is still what it was.
_placed: dict[str, list[object]] = {}


def leave(asked: float, found: Mapping[str, object], lines: list[str]) -> None:
    """Leave an answer for those who wait for it.

    Args:
        asked: when its last question was asked: ``time.monotonic()``, which all processes of a machine share.
        found: what ``--json`` prints, with the paths in the store.
        lines: what people read, but for the path.
    """
    # As the store has just seen it: a process that follows does not know the store.
    changed = os.stat(str(found["path"])).st_ctime_ns
    _left.clear()
    _left.update({"asked": asked, "found": dict(found), "lines": lines, "changed": changed})


def follow(words: list[str], ask: Callable[[], int]) -> int:
    """Run a command line, or do what it would do with the answer of a process that ran it after we began.

    Args:
        ask: runs it; where it succeeds it has called :func:`leave`.

    Raises:
        EnvbuildError: what asking raised, here or there.
    """
    began = time.monotonic()
    question, wishes = _split(words)
    own = any(word in _OWN or word.startswith(_OWN_OPTION) for word in words)
    name = None if own else _place(question)
    if name is None:
        return ask()
    lock = _held(f"{name}.lock", wishes)
    if lock is None:
        return ask()
    try:
        known = _read(f"{name}.json")
        _placed.clear()
        _placed.update(known.get("placed", {}))
        if known.get("clock") == _clock() and known.get("asked", 0) >= began:
            # The next one need not wait until we have taken it.
            os.close(lock)
            lock = None
            return 0 if _use(known, wishes) else ask()
        _left.clear()
        started = time.monotonic()
        try:
            code = ask()
        except Exception as error:
            _leave_failure(f"{name}.json", error, started)
            raise
        # A command line that click refuses ends with a code and leaves nothing: each process reports its own.
        if code == 0 and _left:
            _write(f"{name}.json", _left)
        return code
    finally:
        if lock is not None:
            os.close(lock)


def _split(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The question, and what this process wants with the answer."""
    question, wishes = [], {}
    rest = iter(words)
    for word in rest:
        if word == "--output":
            wishes["output"] = next(rest, "")
        elif word.startswith("--output="):
            wishes["output"] = word.partition("=")[2]
        elif word in ("--json", "--quiet", "-q"):
            # Under j or q: --quiet and -q are one wish.
            wishes[word.lstrip("-")[0]] = word
        else:
            question.append(word)
    return question, wishes


def _place(question: list[str]) -> str | None:
    """The path of a question's files, without their endings; None where this account has no place of its own."""
    # As store.temporary has it, which imports more than the rest of this together.
    folder = f"{os.environ.get('TMPDIR') or '/tmp'}/envbuild-{os.geteuid()}"  # noqa: S108 - checked below
    try:
        for path in (folder, f"{folder}/pulls"):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:  # noqa: PERF203 - two folders
                # /tmp is open to all: another account may have made it first, or put a link there.
                info = os.lstat(path)
                # A directory, with no rights for group and others: S_IFDIR and 0o077 of inode(7).
                if info.st_uid != os.geteuid() or info.st_mode & 0o170077 != 0o040000:
                    return None
        deciding = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
        # With the current directory, to which paths of the question may be relative.
        asked = json.dumps([__version__, os.getcwd(), question, sorted(deciding.items())])
    except OSError:
        return None
    # The digest alone: some of these variables are secrets. Words and variables may be no UTF-8 (PEP 383).
    return f"{folder}/pulls/{sha256(asked.encode(errors='surrogateescape')).hexdigest()}"


def _held(path: str, wishes: Mapping[str, str]) -> int | None:
    """Hold a lock; None where it cannot be made."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if "q" not in wishes:
            sys.stderr.write("another envbuild runs the same pull: waiting for it\n")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        os.close(lock)
        return None
    return lock


def _read(path: str) -> dict[str, Any]:
    """The last answer; empty where there is none, or one of another version."""
    try:
        with open(path, encoding="utf-8") as stream:
            answer = json.load(stream)
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _use(answer: Mapping[str, Any], wishes: Mapping[str, str]) -> bool:
    """Do with an answer what this process wants; False where the file is not what it was."""
    if "error" in answer:
        _raise(answer["error"])
    found = answer["found"]
    try:
        info = os.stat(found["path"])
    except OSError:
        return False
    if (info.st_size, info.st_ctime_ns) != (found["size_bytes"], answer["changed"]):
        return False  # whoever asks the store gets it made anew
    if "output" in wishes:
        found["path"] = place(found, wishes["output"])
    if "j" in wishes:
        put(json.dumps(found, indent=2) + "\n")
    elif "q" not in wishes:
        put("".join(f"{line}\n" for line in [*answer["lines"], found["path"]]))
    return True


def place(found: Mapping[str, Any], output: str) -> str:
    """Copy a .sqsh of the store, and its certificate, to where somebody wants it; the path from the root."""
    known = {}
    for source, name in ((found["path"], output), (found["certificate"], output + CERTIFICATE_SUFFIX)):
        if source is None:
            continue
        path = os.path.abspath(name)
        # In the store a name is a digest: what was copied from it, and is what it was, need not be copied again.
        if path not in _placed or _placed[path] != [source, *_identity(path)]:
            # What is needed for that is imported only now.
            from pathlib import Path

            from envbuild.core.files import clone_or_copy

            clone_or_copy(Path(source), Path(name))
        known[path] = [source, *_identity(path)]
    _left["placed"] = known
    return os.path.abspath(output)


def _identity(path: str) -> list[int]:
    """What tells that a file is the one that was there, and that nobody has changed it or its rights."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return []
    # Its change time is set by the kernel alone (utimensat(2)).
    return [info.st_dev, info.st_ino, info.st_size, info.st_ctime_ns]


def _raise(error: Mapping[str, Any]) -> None:
    from envbuild.core.errors import ERROR_CLASSES, MachineError

    kind = next((item for item in ERROR_CLASSES if item.__name__ == error["kind"]), MachineError)
    raise kind(error["what"], why=error["why"], fix=error["fix"], reason=error.get("reason", ""))


def _leave_failure(path: str, error: Exception, started: float) -> None:
    from envbuild.core.errors import EnvbuildError, InternalError, InterruptedByUserError

    # The others are neither interrupted nor broken.
    if isinstance(error, EnvbuildError) and not isinstance(error, InternalError | InterruptedByUserError):
        _write(path, {"asked": started, "error": error.as_json()})


def _write(path: str, answer: Mapping[str, object]) -> None:
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump({"clock": _clock(), **answer}, stream)
        os.replace(temporary, path)
    except OSError:
        pass  # a full disk: the others ask for themselves


def _clock() -> str:
    """Which clock time.monotonic() is: it starts anew with the machine, and a time namespace has its own."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        boot = stream.read().strip()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return boot
