"""An nvcc that compiles for the architectures asked for, whatever the command line says.

A script by itself (standard library only): a build runs it as PYTORCH_NVCC and as ``bin/nvcc`` of its CUDA_HOME, with
any Python from 3.8 on::

    python nvcc_wrapper.py --nvcc /usr/local/cuda/bin/nvcc --sm 90,100a [--ptx 100a] -- <nvcc's own arguments>

``-gencode`` pairs of architectures that were not asked for are dropped. Those asked for and not named are added where
several were named, or none is left: a source that is compiled for one architecture alone keeps it.
``-arch`` and ``-code`` always give way to them, since each stands for machine code and PTX of its own choice.
Intermediate files have the names of their sources: those that nvcc makes up for temporary files have its process's
number in them, and come back in the object file, which then is another one each time.
Its digest is part of the build key. Source of the options: NVIDIA CUDA Compiler Driver, "GPU Code Generation" and
"File and Path Specifications".
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PAIRS = ("-gencode", "--generate-code")
CHOICES = ("-arch", "--gpu-architecture", "-code", "--gpu-code")
OPTION_FILES = ("-optf", "--options-file")
KEEPING = ("--keep", "-keep", "--save-temps", "-save-temps", "--keep-dir", "-keep-dir", "--clean-targets", "-clean")
# Asked about, nvcc compiles nothing.
QUESTIONS = frozenset(("--version", "-V", "--help", "-h", "--list-gpu-arch", "-arch-ls", "--list-gpu-code", "-code-ls"))
SOURCES = (".cu", ".cuh", ".ptx", ".cubin", ".fatbin", ".c", ".cc", ".cpp", ".cxx", ".o", ".obj", ".a", ".so")


def rewritten(arguments: Sequence[str], sm: Sequence[str], ptx: Sequence[str] = ()) -> list[str]:
    """The arguments of an nvcc command with the architectures ``sm`` (and PTX for ``ptx``), and no others."""
    wanted = [*(f"sm_{name}" for name in sm), *(f"compute_{name}" for name in ptx)]
    rest: list[str] = []
    named = 0
    pairs: list[tuple[str, list[str]]] = []
    for option, value in _options(list(_expanded(arguments))):
        if option in PAIRS:
            virtual, codes = _pair(value)
            named += 1
            if kept := [code for code in codes if code in wanted]:
                pairs.append((virtual, _with_ptx(kept, wanted)))
        elif option not in CHOICES:
            rest.append(value)
    if QUESTIONS.intersection(rest) or not any(_is_input(word) for word in rest):
        return list(arguments)
    there = {code for _, codes in pairs for code in codes}
    # A source of its own for one architecture must not be compiled for the others.
    if named > 1 or not any(code.startswith("sm_") for code in there):
        pairs = [pair for pair in pairs if any(code.startswith("sm_") for code in pair[1])]
        pairs += [(f"compute_{name}", _with_ptx([f"sm_{name}"], wanted)) for name in sm if f"sm_{name}" not in there]
    for virtual, codes in pairs:
        code = codes[0] if len(codes) == 1 else "[" + ",".join(codes) + "]"
        rest.append(f"-gencode=arch={virtual},code={code}")
    return rest


def _with_ptx(codes: list[str], wanted: Sequence[str]) -> list[str]:
    """``codes`` and the PTX of their SMs where it is wanted."""
    more = [code.replace("sm_", "compute_") for code in codes if code.startswith("sm_")]
    return list(dict.fromkeys([*codes, *(code for code in more if code in wanted)]))


def _expanded(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, with those of option files in the files' place."""
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in OPTION_FILES:
            yield word
            continue
        for name in (value if equals else next(words, "")).split(","):
            yield from _expanded(shlex.split(Path(name).read_text(), comments=True))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options on architectures with their values; every other word as ``("", word)``."""
    at = 0
    while at < len(words):
        option, equals, value = words[at].partition("=")
        if option not in (*PAIRS, *CHOICES):
            yield "", words[at]
        elif equals:
            yield option, value
        else:
            at += 1
            yield option, words[at] if at < len(words) else ""
        at += 1


def _pair(text: str) -> tuple[str, list[str]]:
    """``arch=compute_90,code=[sm_90,compute_90]`` as ``("compute_90", ["sm_90", "compute_90"])``."""
    plain = text.replace('"', "").replace("'", "").replace("\\", "")
    virtual, _, codes = plain.partition(",code=")
    virtual = virtual.partition("arch=")[2]
    return virtual, [code for code in codes.strip("[]").split(",") if code] or [virtual]


def _is_input(word: str) -> bool:
    return not word.startswith("-") and word.endswith(SOURCES)


def folder_of_names(arguments: Sequence[str]) -> str:
    """A new folder for the intermediate files of a command; its own name is the same for the same command.

    Empty where they must not have their sources' names: two sources of one name would meet there, and a command that
    keeps them itself knows where.
    """
    sources = [Path(word).stem for word in arguments if _is_input(word)]
    own = [word for word in arguments if word.partition("=")[0] in KEEPING]
    if own or not sources or len(set(sources)) < len(sources) or QUESTIONS.intersection(arguments):
        return ""
    told = "\0".join([str(Path.cwd()), *arguments]).encode(errors="surrogateescape")
    folder = Path(os.environ.get("TMPDIR") or "/tmp") / f"nvcc-{hashlib.sha256(told).hexdigest()[:16]}"  # noqa: S108
    try:
        folder.mkdir(mode=0o700)
    except OSError:  # the same command runs already, or there is no place: nvcc says what it thinks of that
        return ""
    return str(folder)


def main(arguments: Sequence[str]) -> None:
    """Run nvcc, and end as it does."""
    split = list(arguments).index("--")
    own = dict(zip(arguments[:split:2], arguments[1:split:2]))  # noqa: B905 - strict is not in Python 3.8
    sm, ptx = (tuple(filter(None, own.get(name, "").split(","))) for name in ("--sm", "--ptx"))
    command = [own["--nvcc"], *rewritten(arguments[split + 1 :], sm, ptx)]
    folder = folder_of_names(command[1:])
    if not folder:
        os.execv(command[0], command)  # noqa: S606 - this is the point
    try:
        # It inherits the turn that it runs in.
        status = subprocess.call([*command, "--keep", "--keep-dir", folder], close_fds=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main(sys.argv[1:])
