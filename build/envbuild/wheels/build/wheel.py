"""Builds one wheel: the locked sources, against phase main, with no variable that is not declared."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import BuildError, CheckRefusedError, MachineError, disk_full
from envbuild.core.exit_status import describe_status, ran_out_of_space, tail
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.process import ProcessOptions, run
from envbuild.lock.uv.program import uv_program
from envbuild.wheels.build.compiler_wrappers import CompilerWrappers, Tokens, write_wrappers
from envbuild.wheels.build.fixed_paths import BuildPaths, are_possible
from envbuild.wheels.build.unpack import SOURCE_DATE_EPOCH, apply_patches, unpack
from envbuild.wheels.plan import WheelPlan
from envbuild.wheels.toolchain.toolchain import Toolchain

# ninja's counter of finished steps.
_COUNTER = re.compile(r"^\[(\d+)/(\d+)\]")
# What nvcc, g++ and the shell print of a compiler that the kernel ended: each nvcc takes 2 to 4 GiB.
_KILLED = re.compile(r"died due to signal 9|Killed signal terminated|\bKilled\b")
# What a build that was ended leaves for the next one: sources with their object files.
KEPT = "source"


@dataclass(frozen=True, kw_only=True)
class WheelWorkspace:
    """Where a wheel is built.

    Attributes:
        environment: the virtual environment with the lock's phase main.
        folder: the build's own; one that was ended before its end goes on in the same folder.
        tokens: what compilers wait for.
    """

    environment: Path
    toolchain: Toolchain
    folder: Path
    log: Path
    tokens: Tokens

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.environment / "bin" / "python"


def build_wheel(plan: WheelPlan, archive: bytes, workspace: WheelWorkspace, progress: Callable[[str], None]) -> Path:
    """Build the wheel of a plan and return its path, inside the workspace's folder.

    Args:
        archive: the package's sources, as a tar or zip archive.
        progress: called with how far it is, such as ``3 of 28 files``.

    Raises:
        BuildError: it does not build, or takes longer than its recipe allows.
        CheckRefusedError: the sources are no archive, a patch does not apply, or headers are not in the environment.
        MachineError: the disk is full, or Python's headers are missing.
    """
    _clear(workspace.folder)
    tree = unpack(plan.name, archive, workspace.folder / KEPT, plan.origin.subdirectory)
    apply_patches(plan.name, tree, plan.patches)
    source = tree / plan.origin.subdirectory
    paths = _paths(workspace)
    wrappers = write_wrappers(workspace.toolchain, plan.asked, workspace.tokens, workspace.folder / "wrappers", paths)
    environment = _variables(plan, workspace, wrappers, paths)
    out = workspace.folder / "out"
    progress("building")

    def show(line: str) -> None:
        if match := _COUNTER.match(line):
            progress(f"{match[1]} of {match[2]} files")

    finished = run(
        paths.command(
            [
                # Nothing but the lock's phase main is there to build with, and nothing is fetched while it builds.
                *(uv_program(), "build", "--wheel", "--no-build-isolation", "--no-config", "--offline"),
                *("--color", "never", "--python", paths.seen(workspace.python)),
                *("--out-dir", paths.seen(out), paths.seen(source)),
            ]
        ),
        what=f"build the wheel of {plan.name}",
        log=workspace.log,
        on_line=show,
        check=False,
        options=ProcessOptions(
            env=environment,
            cwd=workspace.folder,
            timeout_seconds=plan.recipe.time_limit_minutes * 60,
            # What a build starts may be in a process group of its own (timeout(1) makes one), which a signal to the
            # group of the build does not reach.
            whole=True,
            fix=f"Raise time_limit_minutes in envs/wheels/{plan.parts.package}.toml, or build where there are more "
            "cores. What was compiled is kept: the next run goes on from there.",
        ),
    )
    if finished.status != 0:
        # Compilers name a full disk in words of their own; the error for it says which disk.
        if ran_out_of_space(finished.output, workspace.folder):
            raise disk_full(workspace.folder)
        raise _failed(plan, workspace, finished.status, finished.output)
    # The name is the package's to choose: it is checked later, with all else.
    wheels = sorted(out.glob("*.whl"))
    if len(wheels) != 1:
        raise BuildError(
            f"the build of {plan.name} made no wheel",
            why=f"It ended without an error and left {[path.name for path in wheels] or 'nothing'}.",
            fix="See the log for what the package's build did.",
            log=workspace.log,
        )
    return wheels[0]


def _clear(folder: Path) -> None:
    """Make the build's folder, or empty it but for what the build goes on from."""
    with machine_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.name != KEPT:
                remove_tree(path)


def _failed(plan: WheelPlan, workspace: WheelWorkspace, status: int, output: str) -> BuildError:
    memory = bool(_KILLED.search(output))
    jobs = workspace.tokens.limits.jobs_for(workspace.tokens.job_memory_gib)
    return BuildError(
        f"the wheel of {plan.name} does not build: uv {describe_status(status)}",
        why=("A compiler was killed, most likely because memory ran out.\n" if memory else "") + tail(output),
        fix=f"Run it with fewer compilers at once: --jobs {max(1, jobs // 2)}. What was compiled is kept."
        if memory
        else "The lines above are the build's own; the whole of it is in the log. Compilers and flags are those of "
        f"--explain; what the package needs beyond that belongs into envs/wheels/{plan.parts.package}.toml.",
        log=workspace.log,
    )


def _paths(workspace: WheelWorkspace) -> BuildPaths:
    """Where the build sees its folders; at places of their own on each machine where it lets no process mount."""
    stage = workspace.folder / "stage"
    stage.mkdir()
    return BuildPaths(
        build=workspace.folder,
        environment=workspace.environment,
        cuda=workspace.toolchain.home,
        stage=stage if are_possible() else None,
    )


def _variables(
    plan: WheelPlan, workspace: WheelWorkspace, wrappers: CompilerWrappers, paths: BuildPaths
) -> dict[str, str]:
    """The whole environment of a build: what is not declared is not there."""
    for name in ("home", "tmp"):
        (workspace.folder / name).mkdir(exist_ok=True)
    home, folder = wrappers.cuda_home, paths.seen(workspace.folder)
    compilers = {"CC": str(wrappers.cc), "CXX": str(wrappers.cxx)}
    places = {
        "PATH": f"{paths.seen(workspace.environment)}/bin:{home}/bin:{os.environ.get('PATH', os.defpath)}",
        # Settings of the user (pip.conf, .netrc, distutils' .pydistutils.cfg) do not reach the build.
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "UV_CACHE_DIR": str(folder / "uv"),
        "CUDA_HOME": str(home),
        "CUDA_PATH": str(home),
        # torch.utils.cpp_extension calls this one; CMake and nvcc take their host compilers from the next two.
        "PYTORCH_NVCC": str(home / "bin" / "nvcc"),
        "CUDAHOSTCXX": compilers["CXX"],
        "NVCC_CCBIN": compilers["CXX"],
    }
    # As many as there are in all: those of other packages may be fewer just then, and each waits for tokens.
    jobs = str(workspace.tokens.limits.jobs)
    limits = {"MAX_JOBS": jobs, "NVTE_BUILD_MAX_JOBS": jobs, "UV_PYTHON_DOWNLOADS": "never"}
    # With a fixed hash seed sets of sources are compiled and linked in the same order each time.
    fixed = {"LANG": "C.UTF-8", "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH), "PYTHONHASHSEED": "0"}
    torch = {"TORCH_CUDA_ARCH_LIST": plan.asked.torch_list()}
    if plan.origin.commit:
        # An archive has no history to take a version from (setuptools-scm's own variable for that).
        fixed["SETUPTOOLS_SCM_PRETEND_VERSION"] = plan.parts.version
    if headers := _headers(plan, workspace):
        places["CPATH"] = ":".join(str(paths.seen(header)) for header in headers)
    return {**fixed, **places, **compilers, **limits, **torch, **plan.parts.variables}


def _headers(plan: WheelPlan, workspace: WheelWorkspace) -> list[Path]:
    python = "python" + plan.parts.python.replace("cp3", "3.")
    site_packages = workspace.environment / "lib" / python / "site-packages"
    folders = [site_packages / folder for folder in plan.parts.headers]
    if missing := [str(folder.relative_to(workspace.environment)) for folder in folders if not folder.is_dir()]:
        raise CheckRefusedError(
            f"{plan.name} cannot be built: headers are missing",
            why=f"The lock's phase main has no {', '.join(missing)}; torch's own dependencies usually bring them.",
            fix=f"Correct headers in envs/wheels/{plan.parts.package}.toml, or add the package that has them to the "
            "stack.",
        )
    where = "import sysconfig; print(sysconfig.get_paths()['include'])"
    finished = run(
        [workspace.python, "-I", "-c", where],
        what="ask Python where its headers are",
        options=ProcessOptions(error=MachineError),
    )
    if not (Path(finished.output.strip()) / "Python.h").is_file():
        raise MachineError(
            f"{plan.name} cannot be built: Python's own headers are missing",
            why=f"There is no Python.h in {finished.output.strip()}.",
            fix=f"Install them: apt-get install {python}-dev",
        )
    return folders
