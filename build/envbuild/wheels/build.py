"""Builds one wheel: the locked sdist, unpacked afresh, against phase main, with no variable that is not declared."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import BuildError, CheckRefusedError, MachineError, disk_full
from envbuild.core.files import machine_errors
from envbuild.core.process import describe_status, ran_out_of_space, run, tail
from envbuild.core.progress import Reporter
from envbuild.lock.uv import uv_program
from envbuild.wheels import nvcc_front
from envbuild.wheels.planning import WheelPlan
from envbuild.wheels.toolchain import Toolchain

# 1980-01-02, the first day that every time zone's zip files can have.
SOURCE_DATE_EPOCH = "315619200"
# ninja's counter of finished steps.
_COUNTER = re.compile(r"^\[(\d+)/(\d+)\]")
_KILLED = re.compile(r"died due to signal 9|Killed signal terminated|\bKilled\b")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where a wheel is built.

    Attributes:
        environment: the virtual environment with the lock's phase main.
        folder: a private scratch folder.
        jobs: compilers at once.
    """

    environment: Path
    toolchain: Toolchain
    folder: Path
    log: Path
    jobs: int

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.environment / "bin" / "python"


def build_wheel(plan: WheelPlan, sdist: bytes, bench: Bench, reporter: Reporter) -> Path:
    """Build the wheel of a plan and return its path, inside the bench's folder.

    Raises:
        BuildError: it does not build, or takes longer than its recipe allows.
        CheckRefusedError: the sdist is no archive, or headers are not in the environment.
        MachineError: the disk is full, or Python's headers are missing.
    """
    source = _unpacked(plan, sdist, bench.folder / "source")
    environment = _variables(plan, bench)
    out = bench.folder / "out"

    def progress(line: str) -> None:
        match = _COUNTER.match(line)
        reporter.update(f"{match[1]} of {match[2]} files" if match else line)

    finished = run(
        [
            *(uv_program(), "build", "--wheel", "--no-build-isolation", "--no-config", "--offline", "--color", "never"),
            *("--python", bench.python, "--out-dir", out, source),
        ],
        what=f"build the wheel of {plan.name}",
        log=bench.log,
        env=environment,
        cwd=bench.folder,
        timeout_seconds=plan.recipe.time_limit_minutes * 60,
        on_line=progress,
        check=False,
        fix=f"Raise time_limit_minutes in envs/wheels/{plan.parts.package}.toml, or build where there are more cores.",
    )
    if finished.status != 0:
        if ran_out_of_space(finished.output, bench.folder):
            raise disk_full(bench.folder)
        raise _failed(plan, bench, finished.status, finished.output)
    wheels = sorted(out.glob("*.whl"))
    if len(wheels) != 1:
        raise BuildError(
            f"the build of {plan.name} made no wheel",
            why=f"It ended without an error and left {[path.name for path in wheels] or 'nothing'}.",
            fix="Look at the log; the package's build says what it did.",
            log=bench.log,
        )
    return wheels[0]


def _failed(plan: WheelPlan, bench: Bench, status: int, output: str) -> BuildError:
    memory = bool(_KILLED.search(output))
    return BuildError(
        f"the wheel of {plan.name} does not build: uv {describe_status(status)}",
        why=("A compiler was killed, most likely because memory ran out.\n" if memory else "") + tail(output),
        fix=f"Run it with fewer compilers at once: --jobs {max(1, bench.jobs // 2)}"
        if memory
        else "The lines above are the build's own; the whole of it is in the log. Compilers and flags are those of "
        f"--explain; what the package needs beyond that belongs into envs/wheels/{plan.parts.package}.toml.",
        log=bench.log,
    )


def _unpacked(plan: WheelPlan, sdist: bytes, folder: Path) -> Path:
    """The one top folder of an sdist, unpacked."""
    try:
        with machine_errors(folder):
            if sdist[:2] == b"PK":
                with zipfile.ZipFile(io.BytesIO(sdist)) as archive:
                    archive.extractall(folder)  # noqa: S202 - zipfile keeps members below the folder
            else:
                with tarfile.open(fileobj=io.BytesIO(sdist), mode="r:*") as tar:
                    tar.extractall(folder, filter="data")
        tops = [path for path in folder.iterdir() if path.is_dir()]
        if len(tops) != 1:
            raise ValueError(f"it has {len(tops)} folders on top instead of one")
        return tops[0]
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, ValueError) as error:
        raise CheckRefusedError(
            f"the sdist of {plan.name} cannot be unpacked",
            why=str(error),
            fix="Choose another version of the component and lock again.",
        ) from error


def _variables(plan: WheelPlan, bench: Bench) -> dict[str, str]:
    """The whole environment of a build: what is not declared is not there."""
    home = cuda_look_alike(plan, bench.toolchain, bench.folder / "cuda")
    for name in ("home", "tmp"):
        (bench.folder / name).mkdir(exist_ok=True)
    compilers = {"CC": str(bench.toolchain.cc), "CXX": str(bench.toolchain.cxx)}
    places = {
        "PATH": f"{bench.environment}/bin:{home}/bin:{os.environ.get('PATH', os.defpath)}",
        "HOME": str(bench.folder / "home"),
        "TMPDIR": str(bench.folder / "tmp"),
        "UV_CACHE_DIR": str(bench.folder / "uv"),
        "CUDA_HOME": str(home),
        "CUDA_PATH": str(home),
        "PYTORCH_NVCC": str(home / "bin" / "nvcc"),
        "CUDAHOSTCXX": compilers["CXX"],
        "NVCC_CCBIN": compilers["CXX"],
    }
    limits = {"MAX_JOBS": str(bench.jobs), "NVTE_BUILD_MAX_JOBS": str(bench.jobs), "UV_PYTHON_DOWNLOADS": "never"}
    fixed = {"LANG": "C.UTF-8", "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH, "PYTHONHASHSEED": "0"}
    torch = {"TORCH_CUDA_ARCH_LIST": plan.asked.torch_list()}
    if headers := _headers(plan, bench):
        places["CPATH"] = ":".join(headers)
    return {**fixed, **places, **compilers, **limits, **torch, **plan.parts.variables}


def _headers(plan: WheelPlan, bench: Bench) -> list[str]:
    python = "python" + plan.parts.python.replace("cp3", "3.")
    site_packages = bench.environment / "lib" / python / "site-packages"
    folders = [site_packages / folder for folder in plan.parts.headers]
    if missing := [str(folder.relative_to(bench.environment)) for folder in folders if not folder.is_dir()]:
        raise CheckRefusedError(
            f"{plan.name} cannot be built: headers are missing",
            why=f"The lock's phase main has no {', '.join(missing)}; torch's own dependencies usually bring them.",
            fix=f"Correct headers in envs/wheels/{plan.parts.package}.toml, or add the package that has them to the "
            "stack.",
        )
    where = "import sysconfig; print(sysconfig.get_paths()['include'])"
    asked = run([bench.python, "-I", "-c", where], what="ask Python where its headers are", error=MachineError)
    if not (Path(asked.output.strip()) / "Python.h").is_file():
        raise MachineError(
            f"{plan.name} cannot be built: Python's own headers are missing",
            why=f"There is no Python.h in {asked.output.strip()}.",
            fix=f"Install them: apt-get install {python}-dev",
        )
    return [str(folder) for folder in folders]


def cuda_look_alike(plan: WheelPlan, toolchain: Toolchain, folder: Path) -> Path:
    """A folder like the toolkit's, whose ``bin/nvcc`` compiles for the plan's architectures only."""
    wanted = plan.asked
    with machine_errors(folder):
        (folder / "bin").mkdir(parents=True)
        for part in toolchain.home.iterdir():
            if part.name != "bin":
                (folder / part.name).symlink_to(part)
        for program in (toolchain.home / "bin").iterdir():
            if program.name != "nvcc":
                (folder / "bin" / program.name).symlink_to(program)
        front = folder / "nvcc_front.py"
        front.write_bytes(Path(nvcc_front.__file__).read_bytes())
        command = [sys.executable, "-I", "-S", str(front), "--nvcc", str(toolchain.nvcc)]
        command += ["--sm", ",".join(wanted.sass), "--ptx", ",".join(wanted.ptx), "--"]
        nvcc = folder / "bin" / "nvcc"
        nvcc.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        nvcc.chmod(0o755)
    return folder


def jobs_for(job_memory_gib: float, cores: int, memory_bytes: int) -> int:
    """Compilers at once: as many as there are cores and room in memory, at least one."""
    return max(1, min(cores, int(memory_bytes / (job_memory_gib * 2**30))))


def machine_limits(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Cores that this process may use, and memory in bytes that is free for it: proc(5), cgroup v2's memory.max."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    free = int(match[1]) * 1024 if match else 2**32
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used)
    return len(os.sched_getaffinity(0)), free


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
