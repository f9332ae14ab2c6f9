"""The compilers as a build sees them: each behind a wrapper that waits for tokens, nvcc behind one more."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.files import machine_errors, remove_tree
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.build import jobserver, nvcc_wrapper
from envbuild.wheels.build.fixed_paths import BuildPaths
from envbuild.wheels.build.limits import Limits
from envbuild.wheels.toolchain.toolchain import Toolchain


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The pool of tokens that compilers share.

    Attributes:
        folder: where its files are; shared by the builds that share the limits.
        job_memory_gib: GiB that one compiler counts for.
    """

    folder: Path
    limits: Limits
    job_memory_gib: int

    def command(self, script: Path) -> list[str]:
        """The command before that of a compiler."""
        numbers = {"--cores": self.limits.jobs, "--memory": self.limits.memory_gib, "--needs": self.job_memory_gib}
        limits = [word for name, number in numbers.items() for word in (name, str(number))]
        # -I and -S: PYTHONPATH, PYTHONHOME and packages of the build do not reach the wrapper.
        return [sys.executable, "-I", "-S", str(script), "--tokens", str(self.folder), *limits, "--"]


@dataclass(frozen=True, kw_only=True)
class CompilerWrappers:
    """Where the wrappers are, as the processes of the build see them."""

    cuda_home: Path
    cc: Path
    cxx: Path


def write_wrappers(
    toolchain: Toolchain, wanted: Architectures, tokens: Tokens, folder: Path, paths: BuildPaths
) -> CompilerWrappers:
    """Fill a folder with a CUDA_HOME like the toolkit's and with host compilers; what was in it goes.

    The folder's path is in the commands of the build: the same one finds object files made before up to date.

    Args:
        folder: in that of the build.
        paths: where the build sees it, and the toolkit.
    """
    # What stands for a folder where a compiler writes down a file's name (GCC manual, "Overall Options"; Clang has it,
    # too). nvcc asks the host compiler to preprocess.
    places = {paths.build: "/build", paths.environment: "/environment", paths.cuda: "/cuda"}
    named = [f"-ffile-prefix-map={paths.seen(place)}={name}" for place, name in places.items()]
    with machine_errors(folder):
        remove_tree(folder)
        scripts = folder / "scripts"
        scripts.mkdir(parents=True)
        # Copied: envbuild may be updated while a build goes on, and ninja compiles anew where a command changed.
        for module in (jobserver, nvcc_wrapper):
            (scripts / Path(str(module.__file__)).name).write_bytes(Path(str(module.__file__)).read_bytes())
        waiting = tokens.command(paths.seen(scripts / "jobserver.py"))
        host = folder / "host"
        host.mkdir()
        compilers = {}
        for path in (toolchain.cc, toolchain.cxx):
            compilers[path] = paths.seen(host / path.name)
            _write(host / path.name, [*waiting, str(path), *named])
        home = _cuda_home(toolchain.home, folder / "cuda", paths)
        nvcc = str(paths.seen(toolchain.nvcc))
        restricted = [sys.executable, "-I", "-S", str(paths.seen(scripts / "nvcc_wrapper.py")), "--nvcc", nvcc]
        restricted += ["--sm", ",".join(wanted.sass), "--ptx", ",".join(wanted.ptx), "--"]
        _write(home / "bin" / "nvcc", [*waiting, *restricted])
    return CompilerWrappers(cuda_home=paths.seen(home), cc=compilers[toolchain.cc], cxx=compilers[toolchain.cxx])


def _cuda_home(home: Path, folder: Path, paths: BuildPaths) -> Path:
    """Links to all of a toolkit but its nvcc."""
    # A folder of its own, with links: build systems call $CUDA_HOME/bin/nvcc whatever PYTORCH_NVCC or PATH name.
    (folder / "bin").mkdir(parents=True)
    for part in home.iterdir():
        if part.name != "bin":
            (folder / part.name).symlink_to(paths.seen(part))
    for program in (home / "bin").iterdir():
        if program.name != "nvcc":
            (folder / "bin" / program.name).symlink_to(paths.seen(program))
    return folder


def _write(path: Path, command: Sequence[str]) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)
